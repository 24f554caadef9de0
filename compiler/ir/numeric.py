"""Index expressions evaluated by NumPy: what an expression is for every thread and iteration at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tilescale.compiler.tvm_compat import IF_THEN_ELSE, ir, structural_walk, tirx

_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Min": np.minimum,
    "Max": np.maximum,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
    "EQ": np.equal,
    "NE": np.not_equal,
    "And": np.logical_and,
    "Or": np.logical_or,
    "LShift": np.left_shift,
    "RShift": np.right_shift,
    "BitwiseAnd": np.bitwise_and,
    "BitwiseOr": np.bitwise_or,
    "BitwiseXor": np.bitwise_xor,
}
_DIVISION: dict[str, Callable[[Any, Any], Any]] = {
    "FloorDiv": np.floor_divide, "FloorMod": np.mod,
    "Div": lambda a, b: np.trunc(np.divide(a, b)).astype(np.int64), "Mod": np.fmod,
}  # fmt: skip
_BITS = {
    "shift_left": "LShift",
    "shift_right": "RShift",
    "bitwise_and": "BitwiseAnd",
    "bitwise_or": "BitwiseOr",
    "bitwise_xor": "BitwiseXor",
}


class Unknown(Exception):
    """An expression that depends on more than the given variables."""


def evaluate(e: Any, values: Mapping[Any, Any]) -> Any:
    """The value of an integer expression, arrays element by element.

    Raises:
        Unknown: it reads memory, a variable without a value, or something that is no index arithmetic.
    """
    if isinstance(e, int):
        return e
    if isinstance(e, tirx.IntImm):
        return int(e.value)
    if isinstance(e, ir.Var):
        if e not in values:
            raise Unknown(e.name)
        return values[e]
    kind = type(e).__name__
    if kind in _BINARY:
        return _BINARY[kind](evaluate(e.a, values), evaluate(e.b, values))
    if kind in _DIVISION:
        a, b = evaluate(e.a, values), evaluate(e.b, values)
        if "int" not in str(e.ty) or np.any(np.asarray(b) == 0):
            raise Unknown(kind)
        return _DIVISION[kind](a, b)
    if kind == "Cast" and "int" in str(e.ty) and "int" in str(e.value.ty):
        return evaluate(e.value, values)
    if kind == "Not":
        return np.logical_not(evaluate(e.a, values))
    if kind == "Select":
        return np.where(
            evaluate(e.condition, values), evaluate(e.true_value, values), evaluate(e.false_value, values)
        )
    if isinstance(e, ir.Call):
        name = e.op.name
        if name == IF_THEN_ELSE:
            return np.where(*(evaluate(a, values) for a in e.args))
        short = _BITS.get(name.split(".")[-1])
        if short:
            return _BINARY[short](*(evaluate(a, values) for a in e.args))
    raise Unknown(kind)


def variables(e: Any) -> set[Any]:
    """The scalar variables of an expression, and None for memory that it reads."""
    found: set[Any] = set()
    if isinstance(e, int):
        return found
    structural_walk(e, (ir.Var, lambda v: found.add(v) if not tirx.is_buffer_var(v) else None))
    structural_walk(e, (ir.TensorLoad, lambda _: found.add(None)))
    structural_walk(e, (ir.Call, lambda c: found.add(None) if c.op.name.startswith("ts.") else None))
    return found
