"""What the CPU emitters work on: a strided view of a flat buffer, and the context that lends them scratch
memory."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

from tilescale.compiler.tvm_compat import tirx

Expr = Any
"""A tirx expression."""
Buf = Any
"""A flat, one-dimensional tirx buffer variable, counted in elements of its storage dtype."""
Stmt = Any
"""A tirx statement."""


@dataclass(frozen=True)
class Tile:
    """A tile at thread IR: element (i, j, …) lies at ``buf[offset + i * strides[0] + j * strides[1] + …]``.

    ``dtype`` is the language's dtype; ``buf`` has the storage dtype of `convert.storage_dtype` (fp8 lies in
    uint8). Shape and strides are constants, in elements; ``offset`` is a constant or an int32 or int64
    expression.
    """

    buf: Buf
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: Expr | int = 0

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def index(self, *ids: Expr | int) -> Expr:
        """The flat index of an element; constants are folded."""
        return add(self.offset, *(mul(i, s) for i, s in zip(ids, self.strides, strict=True)))


class Context(Protocol):
    """What an emitter may ask of the function that it emits into."""

    def scratch(self, numel: int, dtype: str) -> Buf:
        """A flat buffer of ``numel`` elements of the storage dtype ``dtype``: 64-byte aligned, private to the
        block, undefined."""
        ...


def imm(value: int, dtype: str = "int32") -> Expr:
    return tirx.IntImm(dtype, value)


def const(value: Expr) -> int | None:
    """The value of a constant integer, None for anything else."""
    if isinstance(value, int):
        return value
    return int(value.value) if isinstance(value, tirx.IntImm) else None


def mul(a: Expr | int, b: int) -> Expr | int:
    value = const(a)
    if value is not None:
        return value * b
    return a if b == 1 else 0 if b == 0 else a * b


def add(*terms: Expr | int) -> Expr:
    """The sum as an expression, its constant parts folded into one trailing term (so that LLVM sees base +
    displacement)."""
    total, result = 0, None
    for term in terms:
        value = const(term)
        if value is not None:
            total += value
        else:
            result = term if result is None else result + term
    if result is None:
        return imm(total)
    return result + total if total else result
