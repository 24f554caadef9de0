"""Tiles in shared memory: strides and the XOR swizzles that TMA, wgmma and ldmatrix agree on; what an access
costs in bank conflicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from tilescale.compiler.layout.pieces import Piece, canonical, check_axes, evaluate, is_injective, span
from tilescale.errors import TileValueError

BANKS, BANK_BYTES = 32, 4
#: bytes of a row of the swizzle → how many of the address bits 4, 5, 6 are XORed with bits 7, 8, 9
#: (PTX ISA, "Tensor Swizzling Modes"; 16-byte chunks are moved whole)
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
CHUNK_BYTES = 16


@dataclass(frozen=True)
class Shared:
    """A tile of ``bits``-wide elements. ``pieces`` lead to ``"offset"``, in elements; ``swizzle`` is 0, 32,
    64 or 128 bytes.

    The tile's start must be aligned to ``alignment`` bytes, since the swizzle reads address bits.

    Raises:
        TileValueError: elements that share a place, digits that do not cut the axes, a swizzle that does not
        exist.
    """

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    bits: int
    swizzle: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "pieces", canonical(self.pieces))
        if self.swizzle not in SWIZZLES:
            raise TileValueError(f"a swizzle of {self.swizzle} bytes", expected="0, 32, 64 or 128")
        if any(p.to != "offset" or p.axis is None for p in self.pieces):
            raise TileValueError(f"a shared tile of {self.pieces}", expected="pieces to an offset")
        check_axes(self.shape, self.pieces)
        if not is_injective(self.pieces):
            raise TileValueError(
                f"two elements of a shared tile {self.shape} share a place",
                expected="strides that do not overlap",
            )

    def offset(self, *index: Any) -> Any:
        """The place of an element before the swizzle, in elements."""
        return evaluate(self.pieces, "offset", index)

    def byte(self, *index: Any) -> Any:
        """The byte at which an element begins, from the start of the tile. The swizzle is its own inverse,
        and maps every aligned block of ``alignment`` bytes onto itself, so the map is as injective as the
        offsets are."""
        place = self.offset(*index) * self.bits // 8
        mask = (1 << SWIZZLES[self.swizzle]) - 1
        return place ^ ((place >> 7 & mask) << 4)

    @property
    def bytes(self) -> int:
        """How much memory the tile takes, to the end of the last block that the swizzle permutes."""
        plain = -(-span(self.pieces, "offset") * self.bits // 8)
        return -(-plain // self.alignment) * self.alignment if self.swizzle else plain

    @property
    def alignment(self) -> int:
        """Bytes: 8 rows of the swizzle's width, 16 without one."""
        return 8 * self.swizzle or CHUNK_BYTES

    def vector(self, axis: int) -> int:
        """How many neighbours along an axis lie side by side, whatever the index of the first (a multiple of
        that number): at most a 16-byte chunk where there is a swizzle."""
        for p in self.pieces:
            if p.axis == axis and p.unit == 1:
                run = p.extent if p.stride == 1 else 1
                return min(run, CHUNK_BYTES * 8 // self.bits) if self.swizzle else run
        return 1

    def staged(self, stages: int) -> Shared:
        """``stages`` such tiles behind one another, with the stage as a leading axis."""
        stride = self.bytes * 8 // self.bits
        moved = [
            Piece(p.axis + 1, p.unit, p.extent, p.to, p.stride) for p in self.pieces if p.axis is not None
        ]
        return Shared(
            (stages, *self.shape), (*moved, Piece(0, 1, stages, "offset", stride)), self.bits, self.swizzle
        )


def strided(shape: Sequence[int], bits: int, strides: Sequence[int] | None = None) -> Shared:
    """No swizzle; row-major unless ``strides`` (in elements) are given."""
    steps = list(strides) if strides is not None else [prod(shape[k + 1 :]) for k in range(len(shape))]
    pieces = [Piece(axis, 1, e, "offset", s) for axis, (e, s) in enumerate(zip(shape, steps, strict=True))]
    return Shared(tuple(shape), tuple(pieces), bits)


def boxed(shape: Sequence[int], bits: int, swizzle: int, contiguous: int = -1) -> Shared:
    """What TMA writes for a two-dimensional tile and wgmma reads: columns of boxes, each ``swizzle`` bytes
    wide along the axis ``contiguous`` and as long as the other axis; the boxes one behind the other (PTX ISA,
    "Shared Memory Matrix Layout").

    Raises:
        TileValueError: the contiguous axis is no whole number of boxes, the other no multiple of 8 rows.
    """
    rows_axis, cols_axis = (0, 1) if contiguous in (-1, 1) else (1, 0)
    rows, cols = shape[rows_axis], shape[cols_axis]
    wide = swizzle * 8 // bits
    if not wide or cols % wide or rows % 8:
        raise TileValueError(
            f"a tile of {rows} rows of {cols} × {bits} bits under a swizzle of {swizzle} bytes",
            expected=f"8·k rows of {wide or '?'}·k",
        )
    pieces = (
        Piece(cols_axis, 1, wide, "offset", 1),
        Piece(cols_axis, wide, cols // wide, "offset", rows * wide),
        Piece(rows_axis, 1, rows, "offset", wide),
    )
    return Shared(tuple(shape), pieces, bits, swizzle)


def widest_swizzle(contiguous: int, bits: int) -> int:
    """The widest swizzle that a tile with so many contiguous elements can have; 0 where not even 32 bytes
    fit."""
    return next((w for w in (128, 64, 32) if contiguous * bits % (8 * w) == 0), 0)


def bank_conflicts(addresses: Any, width: int) -> int:
    """How many wavefronts beyond the fewest possible one access of a warp takes.

    Args:
        addresses: first byte of each thread, int array (32,). width: bytes of each thread: 1, 2, 4, 8 or 16.

    Accesses of 8 (16) bytes are served for half (quarter) warps; threads that read one word share it.
    """
    group = 32 // max(1, width // BANK_BYTES)
    extra = 0
    for start in range(0, len(addresses), group):
        first = np.asarray(addresses[start : start + group])
        words = np.unique(
            (first[:, None] + np.arange(0, max(width, 1), min(width, BANK_BYTES))[None]) // BANK_BYTES
        )
        extra += int(np.bincount(words % BANKS, minlength=BANKS).max()) - 1
    return extra
