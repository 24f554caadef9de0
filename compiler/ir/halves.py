"""The store of half a byte, as it stands in the IR: ``A[at] = kept half of A[at] | code << shift``."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.tvm_compat import ir, tirx


def store_half(buffer: Any, at: list[Any], code: Any, shift: Any, span: Any) -> Any:
    """``code``: four bits, of an int32. ``shift``: 0 or 4, an int32."""
    old = tirx.Cast("int32", tirx.Cast("uint8", tirx.BufferLoad(buffer, at)))
    kept = tirx.bitwise_and(old, tirx.shift_right(tirx.IntImm("int32", 0xF0), shift))
    byte = tirx.bitwise_or(kept, tirx.shift_left(code, shift))
    return tirx.BufferStore(buffer, tirx.Cast(str(buffer.ty.dtype), byte), at, span)


def kept_half(s: Any) -> Any:
    """The load by which a store keeps the other half of its byte; None of any other store. What it finds
    there need not have been written: nobody reads it by that."""
    e = s.value.value if isinstance(s.value, tirx.Cast) else None
    e = e.a.a if isinstance(e, tirx.BitwiseOr) and isinstance(e.a, tirx.BitwiseAnd) else None
    e = e.value.value if isinstance(e, tirx.Cast) and isinstance(e.value, tirx.Cast) else None
    return e if isinstance(e, ir.TensorLoad) and e.source.same_as(s.buffer) else None
