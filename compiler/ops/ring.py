"""The tokens of a ring of stages (scheduled level only): a producer acquires a free stage and commits it
full, a consumer waits for it and releases it. Stage and phase come from one counter that lives across loops
and tiles: stage = counter % depth.

Where one role does everything in program order (the CPU), the order itself is the guard and the tokens lower
to nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from tilescale.compiler.ir.contexts import SimContext
from tilescale.compiler.ir.operations import Access, TileOp, register


class _Token(TileOp):
    levels = ("scheduled",)
    attributes: ClassVar[tuple[str, ...]] = ("ring",)
    waits = True

    def effects(self, call: Any) -> list[Access]:
        return []

    def simulate(self, call: Any, cx: SimContext) -> Any:
        from tilescale.compiler.sim import rings

        kind, ring, counter = self.name[len("ring_") :], int(call.attrs["ring"]), cx.scalar(call.args[0])
        run, site = getattr(rings, kind), cx.token(call, kind, ring)
        if len(call.args) == 1:
            return lambda ex: run(ex, ring, counter(ex), site)
        when = cx.scalar(call.args[1])

        def late(ex: Any) -> Iterator[str]:
            if when(ex):
                yield from run(ex, ring, counter(ex) - 1, site)

        return late


@register
class RingAcquire(_Token):
    """The stage of the counter's round is empty: its readers of the round before have released it. ``tiles``:
    which of the ring's tiles the round fills, bit k for the k-th; all of them without."""

    name = "ring_acquire"
    attributes = ("ring", "tiles?")


@register
class RingCommit(_Token):
    """The stage is full when the asynchronous copies issued into the ring before are complete."""

    name = "ring_commit"


@register
class RingWait(_Token):
    """The stage of the counter's round is full."""

    name = "ring_wait"


@register
class RingRelease(_Token):
    """The stage has been read."""

    name = "ring_release"
    attributes = ("ring", "fenced?")
