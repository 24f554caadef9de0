"""Scales: who runs a statement, from a thread to a block, and whom it reaches, from a cluster to all
ranks."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

#: who may run a statement, from the smallest on
EXECUTORS = ("thread", "warp", "warpgroup", "block")
#: whom a statement may reach beyond its block
REACHES = ("cta_cluster", "grid", "device")
#: what a grid's extents multiply to is below this: numbers of blocks are 32 bits wide on every target
MOST_BLOCKS = 1 << 31
#: all of them; the IR names one by its place here
SCALES = (*EXECUTORS, *REACHES)
#: threads of a warp and of a warpgroup (PTX ISA, "Warps" and "warpgroup")
WARP, WARPGROUP = 32, 128
#: the scales below a block
WIDTHS = {"thread": 1, "warp": WARP, "warpgroup": WARPGROUP}


@dataclass(frozen=True)
class Executor:
    """Who runs a statement: the innermost scale up to the block and its threads. ``outer``: the scales around
    it, the block aside."""

    name: str
    threads: int
    outer: tuple[tuple[str, int], ...] = ()

    def within(self, scale: str) -> Executor:
        """The executor inside ``T.Scale(scale)``; the own one where that is a reach."""
        if scale not in WIDTHS:
            return self
        width = WIDTHS[scale]
        return Executor(scale, width, (*self.outer, (scale, self.threads // width)))

    @property
    def count(self) -> int:
        """How many of them a block has."""
        return prod(n for _, n in self.outer)
