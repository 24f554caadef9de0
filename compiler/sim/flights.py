"""What runs beside the executor that issued it: products of the tensor cores and stores by TMA, in the
scheduled programs of GPUs.

An executor has a queue of each kind (``PUT``, ``PULL``: a non-blocking copy to another rank or from it,
whose own signal says that it is complete; it moves when it is issued, and is nobody's to await). What is in
flight begins behind what its issuer did before and reads its operands until it is awaited; an accumulator
is nobody's until then. Products of one queue are complete in their order, so that one may add to what the
one before it leaves. Stores are not ordered among each other, and waiting for them means that they have
read what they store: what they write stays unordered to all else of the launch but what comes behind a wait
for complete ones.

So the operands' reads and the accumulator's writes are those of an *engine* with a clock of its own (as with
copies into rings, rings.py), and who awaits comes behind it. Three things are told by name, whether or not
other order saves them, since a target does not: an accumulator that is touched while a product into it is in
flight, a stage that is released while a product reads it, and what nobody awaits before the block ends.
Against the adversary all data moves when it is awaited, else when it is issued.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tilescale.compiler.findings import Finding, Where
from tilescale.compiler.ir.contexts import Site
from tilescale.compiler.sim.memory import Storage, describe
from tilescale.compiler.sim.rings import AsyncUnit, stages_of

if TYPE_CHECKING:
    from tilescale.compiler.sim.diagnose import Race
    from tilescale.compiler.sim.machine import Executor, Machine
    from tilescale.compiler.sim.rings import Ring
    from tilescale.compiler.sim.view import Placed

PRODUCT, STORE, PUT, PULL = "product", "store", "put", "pull"
#: copies to other ranks by TMA, whose tile has been read where they stand; and such of a ring's stage, which
#: read it until their group is awaited
COPY, ROW = "copy", "row"


class Put:
    """Who performs an executor's non-blocking puts, in the place of the executor where it signals: others
    learn of the puts, and of what the executor had heard when it issued them, not of what it did itself."""

    def __init__(self, ex: Executor, unit: AsyncUnit):
        self.ex, self.unit = ex, unit
        self.machine, self.number, self.now, self.block = ex.machine, unit.number, unit.now, ex.block
        self.vc = unit.vc

    def release(self) -> Any:
        clock = self.unit.vc.copy()
        clock[self.ex.number], clock[self.number] = 0, self.now
        return clock

    def where(self, site: Site, region: str = "") -> Where:
        return self.unit.where(site, region)


@dataclass
class Flight:
    """One operation under way: its engine's number and time, what it reads, the accumulator that it writes
    (None: memory), what it does."""

    number: int
    at: int
    where: Where
    reads: tuple[Placed, ...]
    to: Placed | None
    move: Callable[[], None]
    #: of how many groups of its queue it comes behind
    group: int = 0

    def touched(self, ex: Executor, storage: Storage, key: Any, mode: str, site: Site) -> None:
        """Somebody else touches the accumulator."""
        region, line = (
            describe(storage.name, key),
            f" of line {self.where.loc.line}" if self.where.loc else "",
        )
        verb = "read" if mode == "read" else "written"
        text = (
            f"{region} is {verb} while the product{line} that computes {storage.name} is in flight: it "
            "has not been awaited"
        )
        hint = f"the wait for that product in front of what touches {storage.name}"
        ex.machine.report.add(Finding("schedule", text, ex.where(site, region), (self.where,), hint))


@dataclass
class Queue:
    """What an executor has in flight, the oldest first."""

    now: int = 0
    number: int = -1
    groups: int = 0
    flying: list[Flight] = field(default_factory=list)
    #: whose it is
    of: Executor | None = None


def queue(ex: Executor, kind: str) -> Queue:
    made: Queue = ex.block.flights.setdefault((ex.number, kind), Queue())
    made.of = ex
    return made


def units(ex: Executor, kind: str, offset: int) -> tuple[AsyncUnit | None, AsyncUnit]:
    """Who reads and who writes for the operation that ``ex`` issues now; None: the executor. Only who awaits
    complete stores comes behind their writes."""
    q, number = queue(ex, kind), ex.root + offset + ex.linear
    q.now, q.number = q.now + 2, number
    clock = ex.vc.copy()
    if kind in (PRODUCT, PUT, PULL):
        clock[number] = q.now - 1  # behind those before it
    if kind == PULL:
        clock[ex.number] = 0  # and behind what the executor has awaited, not behind what it did itself
    reads = AsyncUnit(ex.machine, number, q.now - 1, clock, ex.name)
    if kind == COPY:
        return None, AsyncUnit(ex.machine, number, q.now, clock, ex.name)
    return reads, reads if kind in (PRODUCT, PUT, PULL) else AsyncUnit(
        ex.machine, number, q.now, clock, ex.name
    )


def start(
    ex: Executor,
    kind: str,
    engine: AsyncUnit,
    site: Site,
    reads: tuple[Placed, ...],
    to: Placed | None,
    move: Callable[[], None],
) -> None:
    """An operation is issued; what it touches has been recorded."""
    flight = Flight(
        engine.number,
        engine.now,
        ex.where(site),
        reads,
        to,
        move if ex.machine.late else _nothing,
        queue(ex, kind).groups,
    )
    for r in reads:
        before = r.storage.shadow.flying
        if (
            kind == PRODUCT and before is not None
        ):  # a left operand in registers, which a product still computes
            before.touched(ex, r.storage, r.key, "read", site)
    if to is not None:
        to.storage.shadow.flying = flight
    if not ex.machine.late:
        move()
    queue(ex, kind).flying.append(flight)


def wait(ex: Executor, kind: str, pending: int = 0, complete: bool = False) -> None:
    """All but the youngest ``pending`` operations are complete; the executor comes behind them. ``complete``:
    behind what stores write too, of those awaited before as well."""
    _awaited(ex, queue(ex, kind), pending, complete)


def _awaited(ex: Executor, q: Queue, pending: int, complete: bool) -> None:
    while len(q.flying) > pending:
        f = q.flying.pop(0)
        f.move()
        if f.to is not None and f.to.storage.shadow.flying is f:
            f.to.storage.shadow.flying = None
        ex.vc[f.number] = max(int(ex.vc[f.number]), f.at)
        ex.machine.polling.changed()
    if complete and q.number >= 0:
        ex.vc[q.number] = max(int(ex.vc[q.number]), q.now)


def grouped(ex: Executor) -> None:
    """The rows that the executor issued since the last group are one."""
    queue(ex, ROW).groups += 1


def landed(ex: Executor, pending: int, complete: bool) -> None:
    """All rows but those of the last ``pending`` groups have read their stages; with ``complete`` all copies
    of the executor by TMA have landed, those of its roles, which have ended, among them."""
    rows = queue(ex, ROW)
    late = sum(f.group >= rows.groups - pending for f in rows.flying)
    wait(ex, ROW, late, complete)
    if complete:
        wait(ex, COPY, 0, complete)
        for (_, kind), q in ex.block.flights.items():
            roles = q.of is not None and q.of.parent is ex and q.of.path[-1][1] is None
            if kind in (ROW, COPY) and roles:
                _awaited(ex, q, 0, complete)


def released(ex: Executor, ring: Ring, n: int, site: Site) -> None:
    """A stage is released: no product may read it still."""
    for (_, kind), q in ex.block.flights.items():
        for f in q.flying if kind == PRODUCT else ():
            if any(r.storage.ring is ring and stages_of(r.key)[0] == ring.stage(n) for r in f.reads):
                text = f"ring {ring.number}: round {n} is released while a product in flight reads its stage"
                hint = "the wait for that product in front of the release"
                ex.machine.report.add(Finding("schedule", text, ex.where(site), (f.where,), hint))
                return


def left(machine: Machine) -> None:
    """Reports what is in flight when its block ends."""
    for block in machine.blocks.values():
        for (_, kind), q in block.flights.items():
            if q.flying:
                text = f"this {kind} is in flight when the block ends: nobody awaits it"
                machine.report.add(Finding("schedule", text, q.flying[0].where))


def race(machine: Machine, found: Race) -> tuple[str, str] | None:
    """What a race says about operations in flight, and what would order it; None where none has to do with
    it."""
    made, events = machine.prepared, machine.events
    places = [(int(events.who[e]) - machine.first) % made.executors for e in (found.event, found.other)]
    kinds = [
        next((kind for kind, first, count in made.beside if first <= p < first + count), "") for p in places
    ]
    kind = kinds[1] or kinds[0]
    if not kind:
        return None
    if kind in (COPY, ROW):
        text = "; the copy goes on beside its executor until that signals or meets others"
        return text, "blocking=True of that copy, or a T.signal or T.barrier between the two"
    return f"; the {kind} is in flight until it is awaited", f"the wait for that {kind} between the two"


def _nothing() -> None:
    pass
