"""Tensor maps and swizzles of shared memory, as the emulated TMA and the emulated tensor cores see them
(`engines`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tilescale.compiler.emulator.copies import EmulationError

#: by a swizzle's width in bytes: which bits of a row's number change where its parts of 16 bytes lie
MASKS = {128: 7, 64: 3, 32: 1, 0: 0}


def swizzled(address: Any, width: int) -> Any:
    """Where a byte goes (PTX ISA, "Tensor Swizzling Modes")."""
    return address ^ ((address >> 7 & MASKS[width]) << 4)


@dataclass
class TensorMap:
    """A tensor map as TMA sees it."""

    array: Any
    box: tuple[int, ...]
    swizzle: int
    #: where several ranks run: the tensor as the block sees it
    memory: Any = None

    def inside(self, coordinates: list[int]) -> tuple[Any, Any] | None:
        """The part of a box that lies inside the tensor, as slices of both; None where there is none."""
        if coordinates[0] * self.array.dtype.itemsize % 16:
            raise EmulationError(
                f"a box begins at column {coordinates[0]}, no multiple of 16 bytes: an illegal instruction"
            )
        starts = coordinates[::-1]
        parts = [
            (max(0, s), min(e, s + n)) for s, n, e in zip(starts, self.box, self.array.shape, strict=True)
        ]
        if not all(a < z for a, z in parts):
            return None
        box = tuple(slice(a - s, z - s) for (a, z), s in zip(parts, starts, strict=True))
        return box, tuple(slice(a, z) for a, z in parts)

    def elements(self, coordinates: list[int]) -> Any:
        """The numbers of a box's elements that lie inside the tensor."""
        parts = self.inside(coordinates)
        flat = np.arange(self.array.size).reshape(self.array.shape)
        return flat[parts[1]].ravel() if parts is not None else flat[:0].ravel()

    def cells(self, at: int) -> Any:
        """The bytes of shared memory of a box that begins at byte ``at``, in the box's order."""
        size = self.array.dtype.itemsize
        if self.swizzle and (self.box[-1] * size != self.swizzle or at % (8 * self.swizzle)):
            raise EmulationError(
                f"a box of {self.box[-1] * size} bytes a row at byte {at}, under a swizzle of {self.swizzle}"
            )
        if any(n > 256 for n in self.box):
            raise EmulationError(f"a box of {self.box}")
        return swizzled(at + np.arange(int(np.prod(self.box)) * size), self.swizzle)


@dataclass
class Row:
    """Neighbours of a tensor, as a bulk copy without a tensor map sees them: so many elements from the
    coordinate on."""

    array: Any
    box: tuple[int]
    memory: Any = None

    def inside(self, coordinates: list[int]) -> tuple[Any, Any] | None:
        """All of them, as slices of the row and of the tensor."""
        (first,), (count,) = coordinates, self.box
        if any(x * self.array.dtype.itemsize % 16 for x in (first, count)):
            raise EmulationError(
                f"{count} elements from {first} on are no multiple of 16 bytes: an illegal instruction"
            )
        return (slice(None),), (slice(first, first + count),)

    def elements(self, coordinates: list[int]) -> Any:
        """Their numbers."""
        return coordinates[0] + np.arange(self.box[0])

    def cells(self, at: int) -> Any:
        """The bytes of shared memory from byte ``at`` on."""
        if at % 16:
            raise EmulationError(f"a row begins at byte {at} of shared memory: an illegal instruction")
        return at + np.arange(self.box[0] * self.array.dtype.itemsize)
