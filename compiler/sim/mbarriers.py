"""Barriers with phases, and the author's copies by TMA, while a program runs (ops/mbarrier.py). What arrives
in a phase releases to who waits for its end; a copy by TMA is performed where it is issued, in its issuer's
name, and its bytes arrive at once. A phase that gets more arrivals or bytes than it expects is reported.

Two orders are none of clocks, and told by name. A store reads its tile until its executor has awaited the
store's group: whoever writes there before, or ends the block, is reported. Who reads a tile that TMA fills
does so through another proxy than TMA (PTX ISA 9.0, "Proxies"): between such a read and the next copy into
the tile the reader makes a proxy fence, and the copy comes behind that.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tilescale.compiler.findings import Finding, Fix
from tilescale.compiler.ir.contexts import RegionView, SimContext, Site
from tilescale.compiler.ir.multicast import mask_of, others
from tilescale.compiler.ir.scales import WARPGROUP, WIDTHS

if TYPE_CHECKING:
    from tilescale.compiler.sim.diagnose import Race
    from tilescale.compiler.sim.machine import Executor, Machine


@dataclass(frozen=True)
class Phase:
    """An arrival of an executor at a barrier, or a wait of it that is over: how many accesses the machine had
    seen by then, and which phase it was, from 0."""

    when: int
    waited: bool
    barrier: str
    phase: int
    loc: Any
    site: int


@dataclass
class MBarrier:
    """One barrier of one block. ``coming``: what the arrivals of this phase have released; ``over``: those of
    the last one."""

    name: str
    count: int
    pending: int
    bytes: int = 0
    phases: int = 0
    coming: Any = None
    over: Any = None
    waiters: list[Any] = field(default_factory=list)

    def release(self, ex: Any, site: Site) -> None:
        _note(ex, Phase(len(ex.machine.events.said), False, self.name, self.phases, site.loc, site.number))
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


def threads(call: Any, cx: SimContext) -> int:
    """The threads of the executor of a call."""
    return WIDTHS.get(str(call.attrs["executor"]), cx.program.launch.threads)


def finder(region: Any, cx: SimContext) -> Callable[..., MBarrier]:
    """The barrier that a region names, for the executor that asks: of its block, or of ``block``."""
    slot, index, name = cx.slots[region.source], cx.scalar(region.region[0].min), region.source.name
    counts = cx.barrier_counts[region.source]

    def find(ex: Any, block: Any = None) -> MBarrier:
        k, of = int(index(ex)), (block or ex.block).mbarriers
        made: MBarrier | None = of.get((slot, k))
        if made is None:
            made = of[slot, k] = MBarrier(f"{name}[{k}]", counts[k], counts[k])
        return made

    return find


def arrive(ex: Any, barrier: MBarrier, count: int, site: Site) -> Generator[str, None, None]:
    yield "signal"
    ex.flush()
    barrier.pending -= count
    if barrier.pending < 0:
        text = (
            f"{barrier.name} is arrived at by {-barrier.pending} threads more than its phase expects "
            f"({barrier.count})"
        )
        ex.machine.report.add(Finding("schedule", text, ex.where(site)))
        barrier.pending = 0
    barrier.release(ex, site)
    barrier.settle(ex)


def arrive_elsewhere(
    ex: Any, find: Callable[..., MBarrier], rank: int, count: int, site: Site
) -> Generator[str, None, None]:
    """An arrival at the barrier of another block of the cluster."""
    machine = ex.machine
    if machine.reaches(ex, rank, "cta_cluster", site):
        yield from arrive(ex, find(ex, machine.clustered(ex, rank)), count, site)


def expect(ex: Any, barrier: MBarrier, count: int) -> None:
    barrier.bytes += count


def wait(ex: Any, barrier: MBarrier, parity: int, site: Site) -> Generator[str, None, None]:
    from tilescale.compiler.sim.machine import Waiting

    yield "wait"
    while barrier.phases & 1 == parity:
        barrier.waiters.append(ex)
        missing = f"{barrier.pending} arrivals and {barrier.bytes} bytes are missing"
        hint = (
            f"T.mbarrier_arrive({barrier.name}) by {barrier.pending} threads more, or T.alloc_barrier "
            "for as many as arrive"
        )
        if not barrier.pending:
            hint = (
                f"the T.tma_copy with barrier={barrier.name} that is missing, or T.mbarrier_expect_tx "
                "for as many bytes as come"
            )
        ex.waiting = Waiting(
            site, f"{barrier.name}, the end of a phase of parity {parity}: {missing}", hint=hint
        )
        yield "wait"
    _note(
        ex, Phase(len(ex.machine.events.said), True, barrier.name, barrier.phases - 1, site.loc, site.number)
    )
    if barrier.over is not None:
        ex.acquire(barrier.over)


def _note(ex: Executor, done: Phase) -> None:
    ex.machine.phases.setdefault(ex.number, []).append(done)


def race(machine: Machine, found: Race) -> tuple[str, str, Fix | None] | None:
    """Of two executors of a block that use barriers with phases: which arrival tells of the one's access, and
    which wait the other lacks. None where neither arrives anywhere behind its own."""
    made, events = machine.prepared, machine.events
    if any(events.said[e][0][:2] != events.said[found.event][0][:2] for e in (found.event, found.other)):
        return None
    pairs = [(found.other, found.event), (found.event, found.other)]  # who tells, and who is to wait
    acquired = [(tells, waits, told) for tells, waits in pairs for told in _behind(machine, tells)]
    unacquired = [
        (tells, waits, told) for tells, waits, told in acquired if not _awaits(machine, waits, told.barrier)
    ]
    if unacquired:
        tells, waits, told = unacquired[0]
    elif (early := _early(machine, found)) is not None:
        line = f" at line {early.loc.line}" if early.loc else ""
        return "", f"T.mbarrier_arrive({early.barrier}){line} behind that access: it is sent before it", None
    elif acquired:
        tells, waits, told = acquired[0]
    else:
        return None
    site = events.said[waits][1]
    line = f" at line {told.loc.line}" if told.loc else ""
    where = "this" if waits == found.event else "that access"
    wait = f"T.mbarrier_wait_parity({told.barrier}, {told.phase & 1})"
    at = made.nest_of.get(site.number, site.loc)
    once = not made.loops_of.get(site.number) and not made.loops_of.get(told.site) and bool(unacquired)
    whose = events.said[tells][1]
    text = (
        f"; behind {'this' if tells == found.event else 'the other'} access ({whose.what}) comes an "
        f"arrival at {told.barrier}{line}"
    )
    hint = f"{wait} in front of {where}" + ("" if once else ", with the parity of the round")
    return text, hint, Fix("before", at, wait) if once and at is not None else None


def _behind(machine: Machine, event: int) -> list[Phase]:
    """The barriers that whoever made an access arrives at behind it."""
    mine = machine.phases.get(int(machine.events.who[event]), ())
    return [p for p in mine if not p.waited and p.when > event]


def _awaits(machine: Machine, event: int, barrier: str) -> bool:
    """Whether whoever made an access waits for a barrier anywhere in the launch; as one of several, for any
    of these."""
    mine = machine.phases.get(int(machine.events.who[event]), ())
    return any(p.waited and p.barrier.split("[")[0] == barrier.split("[")[0] for p in mine)


def _early(machine: Machine, found: Race) -> Phase | None:
    """The arrival that the later executor has awaited, and that stands in front of the access it should tell
    of."""
    this, other = (machine.phases.get(int(machine.events.who[e]), ()) for e in (found.event, found.other))
    acquired = {p.barrier for p in this if p.waited and p.when <= found.event}
    last = next((p for p in reversed(other) if p.when <= found.other), None)
    return last if last is not None and not last.waited and last.barrier in acquired else None


def copy(call: Any, cx: SimContext) -> Any:
    """``T.tma_copy``."""
    from tilescale.compiler.sim import tiles

    src, dst = (cx.view(r, call) for r in call.args[:2])
    site, kind = cx.site(call, "T.tma_copy"), str(call.attrs["reduce"])
    find = finder(call.args[2], cx) if len(call.args) > 2 else None
    combine = {"add": np.add, "min": np.minimum, "max": np.maximum}.get(kind)
    mask = mask_of(call)
    rank = cx.scalar(call.args[3]) if mask else None

    if find is not None:
        cx.filling(call.args[1])

    def run(ex: Any) -> Generator[str, None, None]:
        more = () if rank is None else others(mask, int(rank(ex)))
        if more is None:  # another block copies for this one
            return
        storage, key = _place(dst if find is not None else src, ex)
        if find is None:
            _store(ex, storage, key, site)
        else:
            _filled(ex, storage, key, site)
        values = tiles.converted(src.read(ex, None), src.dtype, dst.dtype)
        if combine is not None:
            values = combine(dst.read(ex, None), values).astype(values.dtype)
        dst.write(ex, values, None)
        for block in more:
            storage, key = _place(dst, ex, block)
            _filled(ex, storage, key, site)
            storage.record(ex, key, "write", site)
            dst.placed(ex, block).write(values)
        if find is None:
            return
        yield "signal"
        size = int(values.size) * values.dtype.itemsize
        _complete(ex, find(ex), size, site, own=True)
        for block in more:
            _complete(ex, find(ex, ex.machine.clustered(ex, block)), size, site, own=False)

    return run


def _complete(ex: Any, barrier: MBarrier, size: int, site: Site, own: bool) -> None:
    """Bytes have come. What another block sent may come before its own has announced it, though not once the
    phase expects no arrival."""
    barrier.bytes -= size
    if barrier.bytes < 0 and (own or not barrier.pending):
        text = f"{barrier.name} gets {-barrier.bytes} bytes more than were announced"
        ex.machine.report.add(Finding("schedule", text, ex.where(site)))
        barrier.bytes = 0
    barrier.release(ex, site)
    barrier.settle(ex)


def _place(view: RegionView, ex: Any, block: int | None = None) -> tuple[Any, Any]:
    """The memory that a region lies in, this block's or another one's, and what indexes it there."""
    storage = view.storage(ex, block)
    return storage, view.cut(ex, storage)[0]


def _cells(storage: Any, key: Any) -> Any:
    """Which cells of a memory a region covers, as a flat mask."""
    mask = np.zeros(storage.shadow.last.shape, bool)
    mask.reshape(storage.cells)[key] = True
    return mask


# ---- stores by TMA


@dataclass
class Stored:
    """A store that may still read its tile: who made it where, the tile's cells, and its group (0: of none
    yet)."""

    where: Any
    shadow: Any
    cells: Any
    group: int = 0


@dataclass
class Stores:
    """Those of one executor, the oldest first, and how many groups there are."""

    groups: int = 0
    flying: list[Stored] = field(default_factory=list)


def _store(ex: Any, storage: Any, key: Any, site: Site) -> None:
    made = Stored(ex.where(site), storage.shadow, _cells(storage, key))
    ex.block.stores.setdefault(ex.number, Stores()).flying.append(made)
    storage.shadow.stored.append(made)


def commit(ex: Any) -> None:
    """``T.tma_store_arrive``."""
    mine = ex.block.stores.setdefault(ex.number, Stores())
    mine.groups += 1
    for one in mine.flying:
        one.group = one.group or mine.groups


def await_stores(ex: Any, pending: int) -> None:
    """``T.tma_store_wait``: the stores of all but the last ``pending`` groups have read their tiles."""
    mine = ex.block.stores.setdefault(ex.number, Stores())
    for one in [s for s in mine.flying if 0 < s.group <= mine.groups - pending]:
        mine.flying.remove(one)
        one.shadow.stored.remove(one)


_AWAIT = "T.tma_store_arrive() and T.tma_store_wait(0, read=True)"


def overwritten(ex: Any, storage: Any, key: Any, site: Site) -> None:
    """Somebody writes where stores may still read."""
    from tilescale.compiler.sim.memory import describe

    cells = _cells(storage, key)
    for one in storage.shadow.stored:
        if (one.cells & cells).any():
            line = f" of line {one.where.loc.line}" if one.where.loc else ""
            region = describe(storage.name, key)
            text = (
                f"{region} is written while the store by TMA{line} may still read it: it has not been awaited"
            )
            hint = f"{_AWAIT} by {one.where.who or 'whoever stores'} in front of this"
            ex.machine.report.add(Finding("schedule", text, ex.where(site, region), (one.where,), hint))
            return


def left(machine: Any) -> None:
    """Reports stores that nobody has awaited when their block ends: its shared memory is another block's
    then."""
    for block in machine.blocks.values():
        for mine in block.stores.values():
            if mine.flying:
                text = "this store by TMA may still read its tile when the block ends: nobody awaits it"
                machine.report.add(
                    Finding("schedule", text, mine.flying[0].where, hint=f"{_AWAIT} behind it")
                )


# ---- proxy fences


@dataclass
class Look:
    """A reader of a tile that TMA fills: what it has read since its last proxy fence; of reads in front of
    one, who made that when."""

    path: tuple[Any, ...]
    where: Any
    cells: Any
    fenced: tuple[int, int] | None = None


def looked(ex: Any, storage: Any, key: Any, site: Site) -> None:
    """Somebody reads a tile that TMA fills: its threads do, unless it is the tensor cores or TMA itself."""
    width = next(
        (WIDTHS[scale] for scale, _ in reversed(getattr(ex, "path", ())) if scale in WIDTHS), WARPGROUP
    )
    if site.what == "T.tma_copy" or (site.what in ("T.gemm", "T.gemm_sp") and width >= WARPGROUP):
        return
    looks = storage.shadow.looks
    mine = next((k for k in looks if k.path == ex.name and k.fenced is None), None)
    if mine is None:
        looks.append(mine := Look(ex.name, ex.where(site), np.zeros(storage.shadow.last.shape, bool)))
    mine.cells |= _cells(storage, key)


def fence(ex: Any) -> None:
    """``T.fence_proxy_async``: what these threads read, as this executor or as one inside or around it, lies
    in front of it."""
    for tile in ex.block.tiles.values():
        for one in (tile.shadow.looks if hasattr(tile, "shadow") else None) or ():
            both = min(len(one.path[2]), len(ex.path))
            if one.path[2][:both] == ex.path[:both] and one.fenced is None:
                one.fenced = ex.number, ex.now


def _filled(ex: Any, storage: Any, key: Any, site: Site) -> None:
    """TMA fills a part of a tile: everybody who read there has made a fence since, which comes before
    this."""
    from tilescale.compiler.sim.memory import describe

    looks, cells = storage.shadow.looks, _cells(storage, key)
    for one in looks:
        if (one.cells & cells).any() and (one.fenced is None or one.fenced[1] > ex.vc[one.fenced[0]]):
            line = f" at line {one.where.loc.line}" if one.where.loc else ""
            region = describe(storage.name, key)
            text = (
                f"TMA fills {region}, which the threads of {one.where.who} read{line} with no proxy "
                "fence between the two"
            )
            hint = "T.fence_proxy_async() behind that read, in front of the arrival that gives the tile back"
            ex.machine.report.add(Finding("schedule", text, ex.where(site, region), (one.where,), hint))
        one.cells &= ~cells
    storage.shadow.looks = [one for one in looks if one.cells.any()]
