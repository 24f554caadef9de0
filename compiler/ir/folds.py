"""What reductions and scans fold by: in which dtype, from which value on, with which operation."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.tvm_compat import ir, register_op, tirx

_FLOATS = ("float", "bfloat")

#: reductions of floats that leave NaN out, by those in which a NaN wins
NUMBERS = {"max": "fmax", "min": "fmin", "absmax": "absfmax"}

for _name in ("fmax", "fmin"):
    register_op(f"ts.math.{_name}", pure=True)


def accumulator(source: str, target: str) -> str:
    """What a reduction is folded in: floats in float32, float64 where a side is; integers in the result's
    dtype."""
    if not target.startswith(_FLOATS):
        return target
    return "float64" if "float64" in (source, target) else "float32"


def in_any_order(op: str) -> bool:
    """Whether the order makes no difference."""
    return op.removeprefix("abs") in ("max", "min", "fmax", "fmin")


def identity(op: str, dtype: str) -> Any:
    """What changes nothing."""
    kind = op.removeprefix("abs").removeprefix("f")
    if op.startswith("abs") or kind in ("sum", "prod") or kind in ("bitor", "bitxor"):
        return tirx.const(1 if kind == "prod" else 0, dtype)
    if kind == "bitand":
        return tirx.const(
            -1
            if not dtype.startswith(("uint", "bool"))
            else (1 if dtype == "bool" else 2 ** int(dtype[4:]) - 1),
            dtype,
        )
    if dtype.startswith("float"):
        return tirx.const(float("-inf") if kind == "max" else float("inf"), dtype)
    return tirx.min_value(dtype) if kind == "max" else tirx.max_value(dtype)


def fold(op: str, a: Any, b: Any) -> Any:
    kind = op.removeprefix("abs")
    if kind in ("fmax", "fmin"):
        return ir.Call(f"ts.math.{kind}", [a, b], ret_ty=ir.PrimType(str(a.ty)))
    if kind in ("max", "min"):
        return (tirx.max if kind == "max" else tirx.min)(a, b)
    if kind in ("sum", "prod"):
        return a + b if kind == "sum" else a * b
    return {"bitand": tirx.bitwise_and, "bitor": tirx.bitwise_or, "bitxor": tirx.bitwise_xor}[kind](a, b)
