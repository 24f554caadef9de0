"""A set of integers as sorted, disjoint, non-adjacent half-open extents: free memory, and memory that has
been backed."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator


class Extents:
    def __init__(self) -> None:
        self._lo: list[int] = []
        self._hi: list[int] = []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(zip(self._lo, self._hi, strict=True))

    def total(self) -> int:
        return sum(self._hi) - sum(self._lo)

    def add(self, lo: int, hi: int) -> None:
        """Adds ``[lo, hi)``, merging what it touches."""
        i, j = bisect_left(self._hi, lo), bisect_right(self._lo, hi)
        if i < j:
            lo, hi = min(lo, self._lo[i]), max(hi, self._hi[j - 1])
        self._lo[i:j], self._hi[i:j] = [lo], [hi]

    def remove(self, lo: int, hi: int) -> None:
        """Removes ``[lo, hi)``, whether or not all of it is there."""
        i, j = bisect_right(self._hi, lo), bisect_left(self._lo, hi)
        if i >= j:
            return
        left, right = self._lo[i], self._hi[j - 1]
        keep = [(a, b) for a, b in ((left, lo), (hi, right)) if a < b]
        self._lo[i:j], self._hi[i:j] = [a for a, _ in keep], [b for _, b in keep]

    def first_fit(self, size: int, start: int = 0) -> int | None:
        """The lowest offset at or after ``start`` at which ``size`` members follow one another; None where
        there is none."""
        for lo, hi in self:
            at = max(lo, start)
            if hi - at >= size:
                return at
        return None

    def missing(self, lo: int, hi: int) -> list[tuple[int, int]]:
        """The parts of ``[lo, hi)`` that are not in the set."""
        out = []
        for a, b in self:
            if b <= lo:
                continue
            if a >= hi:
                break
            if lo < a:
                out.append((lo, a))
            lo = b
        if lo < hi:
            out.append((lo, hi))
        return out
