"""Copies that an emulated block's threads start by cp.async: what they bring is there when its thread has
waited for its group, not before.

Their bytes of shared memory hold garbage until then, and nobody may touch them. A copy is a write by its
thread when it is issued, which readers of what was there must have met, and again when it is complete, which
readers of what it brings must meet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np


class EmulationError(AssertionError):
    """What would go wrong on a GPU, or might: a race, a barrier in a branch, an access outside memory."""


def overlap(some: Any, others: Any) -> bool:
    """Whether two lists of cells, neither of them empty, have one in common. Most are of different tiles, so
    their bounds decide."""
    low, high = max(some.min(), others.min()), min(some.max(), others.max())
    if low > high:
        return False
    there = np.zeros(high - low + 1, bool)
    there[some[(some >= low) & (some <= high)] - low] = True
    return bool(there[others[(others >= low) & (others <= high)] - low].any())


@dataclass
class Part:
    """What one instruction copies in threads of which each has committed ``group`` groups: (threads,
    bytes)."""

    group: int
    who: Any
    cells: Any
    data: Any
    again: Callable[[], Any]

    def of(self, some: Any) -> Part:
        """That of some of its threads."""
        return replace(
            self,
            who=self.who[some],
            cells=self.cells[some],
            data=self.data[some],
            again=lambda: self.again()[some],
        )


class Copies:
    """Those of one block."""

    def __init__(self) -> None:
        self.flying: list[Part] = []
        #: how many groups each thread has committed
        self.groups: Any = None
        #: whether a copy into a cell of the block's shared memory is under way: into no cell are two, since
        #: the second would touch it
        self.coming = np.zeros(0, bool)

    def touched(self, cells: Any) -> None:
        """Somebody reads or writes shared memory."""
        if self.flying and self.coming[cells].any():
            raise EmulationError("shared memory is touched while a copy into it is under way")

    def issue(self, b: Any, m: Any, size: int, to: Any, source: Any, count: Any) -> None:
        who = np.flatnonzero(m)
        counts = np.broadcast_to(count, m.shape)[who]
        arena, memory = to.memory.arena, source.memory
        item = memory.data.itemsize
        cells = (to.memory.offset + to.index[who] * to.memory.size)[:, None] + np.arange(size)
        if (cells[:, 0] % size).any() or (source.index[who] * item % size)[counts > 0].any():
            raise EmulationError(f"a copy of {size} bytes that is not aligned")
        if (counts % item).any() or (counts < 0).any() or (counts > size).any():
            raise EmulationError(f"a copy of {sorted(set(counts.tolist()))} of {size} bytes")
        index = source.index[who][:, None] + np.arange(size // item)
        there = np.arange(size // item)[None] * item < counts[:, None]
        if there.any() and (index[there].min() < 0 or index[there].max() >= memory.data.size):
            raise EmulationError(
                f"{memory.name}: a copy of elements {index[there].min()}…{index[there].max()} of "
                f"{memory.data.size}"
            )

        def read() -> Any:
            found = memory.data[np.where(there, index, 0)]
            found[~there] = 0
            return np.ascontiguousarray(found).view(np.uint8).reshape(len(who), size)

        b.touch(
            memory,
            np.where(there, index, index[:, :1]) if there.all() else index[there],
            _who(who, there),
            False,
        )
        self.touched(cells)
        b.units.overwritten(cells)
        b.touch(arena, cells, np.broadcast_to(who[:, None], cells.shape), True)
        arena.data[cells] = b.draw.integers(0, 256, cells.shape, np.uint8)
        groups = self._groups(m)[who]
        whole = Part(0, who, cells, read(), read)
        for group in np.unique(groups):
            some = np.flatnonzero(groups == group)
            part = whole if len(some) == len(who) else whole.of(some)
            self.flying.append(replace(part, group=int(group)))
        if not self.coming.size:
            self.coming = np.zeros(arena.cells, bool)
        self.coming[cells] = True

    def _groups(self, m: Any) -> Any:
        if self.groups is None:
            self.groups = np.zeros(m.shape, np.int64)
        return self.groups

    def commit(self, m: Any) -> None:
        self._groups(m)[m] += 1

    def wait(self, b: Any, m: Any, pending: int) -> None:
        groups = self._groups(m)
        self._complete(b, lambda p: m[p.who] & (p.group < groups[p.who] - pending))

    def own(self, b: Any, m: Any) -> None:
        """Those of these threads that belong to no group yet are complete."""
        groups = self._groups(m)
        self._complete(b, lambda p: m[p.who] & (p.group == groups[p.who]))

    def _complete(self, b: Any, over: Callable[[Part], Any]) -> None:
        """Copies in those of their threads that ``over`` names are complete."""
        done, left = [], []
        for p in self.flying:
            ended = over(p)
            if not ended.any():
                left.append(p)
            elif ended.all():
                done.append(p)
            else:
                done.append(p.of(ended))
                left.append(p.of(~ended))
        self.flying = left
        for p in done:
            self.coming[p.cells] = False
        for p in done:
            if not np.array_equal(p.again(), p.data):
                raise EmulationError("the source of a copy changed while it was under way")
            arena = b.units.arena
            b.touch(arena, p.cells, np.broadcast_to(p.who[:, None], p.cells.shape), True)
            arena.data[p.cells] = p.data

    def finish(self) -> None:
        """The block is over."""
        if self.coming.any():
            raise EmulationError("a block ends while copies into its shared memory are under way")


def _who(who: Any, there: Any) -> Any:
    every = np.broadcast_to(who[:, None], there.shape)
    return every if there.all() else every[there]
