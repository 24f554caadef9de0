"""Barriers with phases while a program runs (ops/mbarrier.py). What arrives in a phase releases to who waits for its end; a copy by TMA is
performed where it is issued, in its issuer's name, and its bytes arrive at once. A phase that gets more arrivals or bytes than it expects
is reported."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilescale.compiler.sim.findings import Finding
from tilescale.compiler.sim.memory import Site
from tilescale.compiler.widths import WIDTHS


@dataclass
class MBarrier:
    """One barrier of one block. ``coming``: what the arrivals of this phase have released; ``over``: those of the last one."""

    name: str
    count: int
    pending: int
    bytes: int = 0
    phases: int = 0
    coming: Any = None
    over: Any = None
    waiters: list[Any] = field(default_factory=list)

    def release(self, ex: Any) -> None:
        clock = ex.release()
        self.coming = clock if self.coming is None else np.maximum(self.coming, clock)

    def settle(self, ex: Any) -> None:
        ex.machine.polling.changed()
        if self.pending or self.bytes:
            return
        self.phases, self.pending, self.over, self.coming = self.phases + 1, self.count, self.coming, None
        for waiter in self.waiters:
            ex.machine.wake(waiter)
        self.waiters.clear()


def threads(call: Any, cx: Any) -> int:
    """The threads of the executor of a call."""
    return WIDTHS.get(str(call.attrs["executor"]), cx.program.launch.threads)


def finder(region: Any, cx: Any) -> Callable[[Any], MBarrier]:
    """The barrier that a region names, for the executor that asks."""
    slot, index, name = cx.slots[region.source], cx.scalar(region.region[0].min), region.source.name
    counts = cx.barrier_counts[region.source]

    def find(ex: Any) -> MBarrier:
        k = int(index(ex))
        made: MBarrier | None = ex.block.mbarriers.get((slot, k))
        if made is None:
            made = ex.block.mbarriers[slot, k] = MBarrier(f"{name}[{k}]", counts[k], counts[k])
        return made

    return find


def arrive(ex: Any, barrier: MBarrier, count: int, site: Site) -> Generator[str, None, None]:
    yield "signal"
    ex.flush()
    barrier.pending -= count
    if barrier.pending < 0:
        text = f"{barrier.name} is arrived at by {-barrier.pending} threads more than its phase expects ({barrier.count})"
        ex.machine.report.add(Finding("schedule", text, ex.where(site)))
        barrier.pending = 0
    barrier.release(ex)
    barrier.settle(ex)


def expect(ex: Any, barrier: MBarrier, count: int) -> None:
    barrier.bytes += count


def wait(ex: Any, barrier: MBarrier, parity: int, site: Site) -> Generator[str, None, None]:
    from tilescale.compiler.sim.machine import Waiting

    yield "wait"
    while barrier.phases & 1 == parity:
        barrier.waiters.append(ex)
        missing = f"{barrier.pending} arrivals and {barrier.bytes} bytes are missing"
        ex.waiting = Waiting(site, f"{barrier.name}, the end of a phase of parity {parity}: {missing}")
        yield "wait"
    if barrier.over is not None:
        ex.acquire(barrier.over)


def copy(call: Any, cx: Any) -> Any:
    """``T.tma_copy``."""
    from tilescale.compiler.sim import tiles

    src, dst = (cx.view(r, call) for r in call.args[:2])
    site, kind = cx.site(call, "T.tma_copy"), str(call.attrs["reduce"])
    find = finder(call.args[2], cx) if len(call.args) > 2 else None
    combine = {"add": np.add, "min": np.minimum, "max": np.maximum}.get(kind)

    def run(ex: Any) -> Generator[str, None, None]:
        values = tiles.converted(src.read(ex, None), src.dtype, dst.dtype)
        if combine is not None:
            values = combine(dst.read(ex, None), values).astype(values.dtype)
        dst.write(ex, values, None)
        if find is None:
            return
        yield "signal"
        barrier = find(ex)
        barrier.bytes -= int(values.size) * values.dtype.itemsize
        if barrier.bytes < 0:
            text = f"{barrier.name} gets {-barrier.bytes} bytes more than were announced"
            ex.machine.report.add(Finding("schedule", text, ex.where(site)))
            barrier.bytes = 0
        barrier.release(ex)
        barrier.settle(ex)

    return run
