"""Which products the tensor cores have, by dtype: mma.sync and wgmma (PTX ISA 9.0, "Matrix Shape",
"wgmma.mma_async")."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.advice import reason
from tilescale.compiler.layout.loops import element_dtype

HALVES, BYTES, FLOAT8 = ("float16", "bfloat16"), ("int8", "uint8"), ("float8_e4m3fn", "float8_e5m2")
#: as instructions name them; float32 is tf32 to them: the upper 19 bits of it
KINDS = {
    "float16": "f16",
    "bfloat16": "bf16",
    "int8": "s8",
    "uint8": "u8",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
    "float32": "tf32",
}


def cut(call: Any) -> bool:
    """Whether the float32 operands of a ``ts.gemm`` may be cut to tf32."""
    return "precision" in call.attrs


def has_mma(call: Any) -> bool:
    """Whether tensor cores have the product: equal 16-bit floats, 8-bit floats, 8-bit integers, float32 where
    it may be cut."""
    a, b = (element_dtype(r.source) for r in call.args[:2])
    return (
        a == b
        and a in HALVES
        or a in BYTES
        and b in BYTES
        or a in FLOAT8
        and b in FLOAT8
        or a == b == "float32"
        and cut(call)
    )


def kind_of(call: Any) -> str:
    """The operands' dtypes in the name of an instruction: ``"bf16"``, ``"e4m3_e5m2"``."""
    a, b = (KINDS[element_dtype(r.source)] for r in call.args[:2])
    return a if a == b else f"{a}_{b}"


def depth(bits: int) -> int:
    """Elements along k of one product: 32 bytes."""
    return 256 // bits


def widths(dtype: str) -> tuple[int, ...]:
    """The n that a product of wgmma has."""
    return (8, 16, 24, *range(32, 257, 16)) if dtype in BYTES else tuple(range(8, 257, 8))


def no_wgmma(call: Any) -> str | None:
    """Why operands of these dtypes, stored in this order, are none of wgmma's; None where they are. Products
    of integers go to int32, all others to float32, and what has not 16 bits must be stored with its rows
    along k."""
    a, b, c = (element_dtype(r.source) for r in call.args[:3])
    what = call.op.name.replace("ts.", "T.")
    sums = "int32" if a in BYTES else "float32"
    if not has_mma(call):
        return f"{what} of {a} by {b} into {c}"
    if c != sums:
        return reason(f"{what} of {a} by {b} into {c}", f"an accumulator of {sums}")
    if a not in HALVES and (call.attrs["trans_a"] or not call.attrs["trans_b"]):
        why = (
            f"{what} of {a}, which wgmma takes with A stored as (M, K) and B as (N, K) alone "
            "(transpose_B=True)"
        )
        return reason(why, "A stored as (M, K), B as (N, K), and transpose_B=True")
    return None
