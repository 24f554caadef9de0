"""Barriers of a cluster at which arriving and waiting are apart (PTX ISA, "barrier.cluster"). An executor
that has arrived awaits that phase before it arrives again, so a phase's clock is kept until all have had
it."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tilescale.compiler.ir.contexts import Site
    from tilescale.compiler.sim.machine import Executor


@dataclass
class Arrivals:
    """``came``: how many have arrived in this phase, and in ``clock`` what they released; ``over``: the same
    of the last one. ``owe``: who has arrived and not waited."""

    expected: int
    came: int = 0
    phase: int = 0
    clock: Any = None
    over: Any = None
    owe: dict[int, int] = field(default_factory=dict)
    waiters: list[Executor] = field(default_factory=list)


def of_cluster(ex: Executor, each: int) -> Arrivals:
    """That of the executor's cluster, each block of which has so many executors that come."""
    key = (ex.rank.number, ex.block.cluster)
    made = ex.machine.arrivals.get(key)
    if made is None:
        made = ex.machine.arrivals[key] = Arrivals(each * ex.machine.cluster_size)
    return made


def arrive(ex: Executor, at: Arrivals, relaxed: bool, site: Site) -> Generator[str, None, None]:
    yield "signal"
    while ex.number in at.owe:
        yield from _stands(ex, at, site, "T.cluster_wait, of the last time that it arrived")
    if not relaxed:
        ex.flush()
        clock = ex.release()
        at.clock = clock if at.clock is None else np.maximum(at.clock, clock)
    at.owe[ex.number] = at.phase
    at.came += 1
    ex.machine.polling.changed()
    if at.came < at.expected:
        return
    at.phase, at.came, at.over, at.clock = at.phase + 1, 0, at.clock, None
    for waiter in at.waiters:
        ex.machine.wake(waiter)
    at.waiters.clear()


def wait(ex: Executor, at: Arrivals, site: Site) -> Generator[str, None, None]:
    yield "wait"
    while ex.number not in at.owe:
        yield from _stands(ex, at, site, "T.cluster_arrive in front of it")
    while at.phase == at.owe[ex.number]:
        yield from _stands(ex, at, site, f"{at.expected - at.came} more to come to T.cluster_arrive")
    del at.owe[ex.number]
    if at.over is not None:
        ex.acquire(at.over)


def _stands(ex: Executor, at: Arrivals, site: Site, text: str) -> Generator[str, None, None]:
    from tilescale.compiler.sim.machine import Waiting

    at.waiters.append(ex)
    ex.waiting = Waiting(site, f"{text} at {site.what}")
    yield "wait"
