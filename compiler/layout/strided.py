"""Layouts in which an element's place is linear in its indices: all that the CPU needs, and the plain half of
the algebra that swizzles and fragments will extend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from tilescale.errors import TileValueError


@dataclass(frozen=True)
class Strided:
    """Element ``(i, j, …)`` of a tile lies at ``i * strides[0] + j * strides[1] + …``, counted in elements
    from its start."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.strides) or any(e <= 0 for e in self.shape):
            raise TileValueError(
                f"a layout of shape {self.shape} with strides {self.strides}",
                expected="one stride an axis, positive extents",
            )

    @classmethod
    def row_major(cls, shape: Sequence[int], pad: int = 0) -> Strided:
        """The last axis contiguous; ``pad`` elements are left free behind each row."""
        strides, step = [1], shape[-1] + pad
        for extent in reversed(shape[:-1]):
            strides.insert(0, step)
            step *= extent
        return cls(tuple(shape), tuple(strides[: len(shape)]))

    def __call__(self, *index: int) -> int:
        """The place of an element."""
        return sum(i * s for i, s in zip(index, self.strides, strict=True))

    @property
    def size(self) -> int:
        """How many places the layout spans, the free ones among them."""
        return 1 + sum((e - 1) * abs(s) for e, s in zip(self.shape, self.strides, strict=True))

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements fill their span without a gap, in row-major order."""
        return self == Strided.row_major(self.shape)

    def is_injective(self) -> bool:
        """Whether no two elements share a place: axes sorted by stride must each step over everything that
        the smaller ones span."""
        reach = 0
        for stride, extent in sorted(
            (abs(s), e) for s, e in zip(self.strides, self.shape, strict=True) if e > 1
        ):
            if stride <= reach:
                return self._injective_by_counting()
            reach += stride * (extent - 1)
        return True

    def _injective_by_counting(self) -> bool:
        places = {0}
        for stride, extent in zip(self.strides, self.shape, strict=True):
            places = {p + k * stride for p in places for k in range(extent)}
        return len(places) == prod(self.shape)

    def permuted(self, order: Sequence[int]) -> Strided:
        """The same places with the axes in another order."""
        return Strided(tuple(self.shape[k] for k in order), tuple(self.strides[k] for k in order))
