"""Where the buffers of tile IR lie at thread IR."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.tvm_compat import ir, tirx


def pointer(dtype: str) -> Any:
    return ir.PointerType(ir.PrimType(dtype), "global")


class Memory:
    """Where a buffer of tile IR lies: a flat buffer, its extents and strides in elements."""

    #: in bytes, of what lies in the block's arena
    arena_offset: int | None = None

    def __init__(
        self,
        buf: Any,
        dtype: str,
        shape: tuple[Any, ...],
        strides: tuple[Any, ...],
        scope: str,
        name: str,
        start: Any,
    ):
        self.buf, self.dtype, self.shape, self.strides = buf, dtype, shape, strides
        self.scope, self.name, self.start = scope, name, start

    @property
    def is_global(self) -> bool:
        return self.scope.startswith("global")

    @property
    def index_dtype(self) -> str:
        return "int64" if self.is_global else "int32"


def narrow(value: Any, dtype: str) -> Any:
    return value if str(value.ty) == dtype else tirx.Cast(dtype, value)


def size_of(dtype: str) -> int:
    return {"bool": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "float16": 2}.get(dtype) or (
        8 if "64" in dtype else 4
    )
