"""A region of memory as the CPU's emitters see it: a flat buffer, where each axis starts, its stride, and
what may lie outside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tilescale.compiler.cpu.tile import Tile, const
from tilescale.compiler.tvm_compat import tirx
from tilescale.errors import InternalError


@dataclass(frozen=True)
class View:
    """A rectangle of a buffer. Element ``(i, j, …)`` is at ``offset + i * strides[0] + j * strides[1] + …``
    of ``buf``.

    ``valid``: for each axis None, or the half-open range [low, high) of indices that lie inside the tensor
    (expressions), where that could not be proven to be the whole axis.
    """

    buf: Any
    dtype: str
    shape: tuple[Any, ...]
    strides: tuple[Any, ...]
    offset: Any
    valid: tuple[tuple[Any, Any] | None, ...]
    index_dtype: str
    is_global: bool

    def at(self, indices: Sequence[Any]) -> Any:
        """The flat index of an element."""
        total = self.offset
        for i, s in zip(indices, self.strides, strict=True):
            total = total + widened(i, self.index_dtype) * s
        return total

    def squeeze(self) -> View:
        """Without the axes of extent one that lie inside for sure."""
        keep = [k for k, e in enumerate(self.shape) if const(e) != 1 or self.valid[k] is not None]

        def pick(values: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(values[k] for k in keep)

        return replace(self, shape=pick(self.shape), strides=pick(self.strides), valid=pick(self.valid))

    def tile(self) -> Tile:
        """As a tile of constant shape and strides, all of it inside."""
        shape, strides = [const(e) for e in self.shape], [const(s) for s in self.strides]
        if None in shape or None in strides or any(v is not None for v in self.valid):
            raise InternalError(f"a tile of {self.buf} whose shape is not constant reached an emitter")
        return Tile(self.buf, self.dtype, tuple(shape), tuple(strides), self.offset)  # type: ignore[arg-type]


def widened(value: Any, dtype: str) -> Any:
    """An index in the width that offsets are computed in."""
    if isinstance(value, int):
        return tirx.IntImm(dtype, value)
    return value if str(value.ty) == dtype else tirx.Cast(dtype, value)


def like(tile: Tile, shape: Sequence[int]) -> Tile:
    """The same elements under ``shape``, which differs only in axes of extent one."""
    steps = [s for e, s in zip(tile.shape, tile.strides, strict=True) if e != 1]
    if [e for e in tile.shape if e != 1] != [e for e in shape if e != 1]:
        raise InternalError(f"a tile of {tile.shape} is taken for one of {tuple(shape)}")
    strides = tuple(steps.pop(0) if e != 1 else 0 for e in shape)
    return Tile(tile.buf, tile.dtype, tuple(shape), strides, tile.offset)


def matrix(tile: Tile) -> Tile:
    """The tile as rows and columns: its axes of extent other than one, filled up from the back."""
    keep = [k for k, e in enumerate(tile.shape) if e != 1]
    for k in reversed(range(len(tile.shape))):
        if len(keep) < 2 and k not in keep:
            keep.append(k)
    if len(keep) != 2:
        raise InternalError(f"a tile of {tile.shape} is no matrix")
    a, b = sorted(keep)
    return Tile(
        tile.buf, tile.dtype, (tile.shape[a], tile.shape[b]), (tile.strides[a], tile.strides[b]), tile.offset
    )
