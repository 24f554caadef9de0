"""Rings of stages while a scheduled program runs: tokens as counters, copies in flight, and what to say where
an order is missing.

A ring belongs to a block, or to one executor of a T.Scale below it. ``commit`` of round n makes stage n %
depth full when all copies issued into the ring before it are complete; ``wait`` of round n awaits that;
``release`` of round n makes the stage empty; ``acquire`` of round n awaits the release of round n - depth. A
stage is filled between acquire and commit of its round, and read between wait and release: an access
elsewhere is reported whether or not other order saves it, since that is where a target synchronises.

An asynchronous copy is performed by an *engine*, which has a clock of its own: it begins behind what its
issuer did before, and only who awaited its round comes behind it. Nothing orders it against its issuer's
later accesses, nor two copies of one ring against each other before they were awaited. Copies of one ring are
complete in the order of their rounds, so one clock a ring is enough: whoever awaits round n has awaited those
before it, else the order of tokens is reported. Against the adversary a copy moves its data only when its
round is awaited, which is as late as anybody may notice; otherwise at once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tilescale.compiler.findings import Finding, Where
from tilescale.compiler.ir.contexts import Site
from tilescale.compiler.sim.memory import Storage, describe

if TYPE_CHECKING:
    from tilescale.compiler.sim.diagnose import Race
    from tilescale.compiler.sim.machine import Block, Executor, Machine

#: the tokens of the side that fills and of the side that reads, in their order within a round
FILLS, READS = ("acquire", "commit"), ("wait", "release")


@dataclass
class AsyncUnit:
    """Who performs one asynchronous copy, in the place of an executor where accesses are recorded."""

    machine: Machine
    number: int
    now: int
    vc: Any
    name: tuple[Any, ...]
    polled: None = None  # it has no loops
    shares: bool = False  # its clock is its own

    @property
    def known(self) -> Any:
        return self.vc

    def where(self, site: Site, region: str = "") -> Where:
        rank, block, path = self.name
        return Where(site.what, site.loc, rank, block, path, region)


class Ring:
    """A ring of one block, or of ``owner``, an executor below it."""

    def __init__(self, block: Block, number: int, owner: Executor | None = None):
        made = block.machine.prepared
        self.number, self.owner = number, owner
        self.depth: int = made.program.schedule.rings[number].depth
        #: the place of its engine among the executors of a block
        self.offset: int | None = None
        if number in made.units:
            self.offset = made.units[number][0] + (0 if owner is None else owner.linear)
        self.now = 0  # copies issued so far
        self.full: dict[int, Any] = {}  # round → what its commit releases
        self.empty: dict[int, Any] = {}
        self.read: set[int] = set()  # rounds that were awaited
        self.waiters: list[Executor] = []
        self.issued: list[Callable[[], None]] = []  # copies behind the last commit whose data has not moved
        self.flying: dict[int, list[Callable[[], None]]] = {}  # the same of committed rounds
        self.next = dict.fromkeys((*FILLS, *READS), 0)  # token → the round that it is to come for
        self.held: dict[tuple[str, str], list[int]] = {FILLS: [], READS: []}  # rounds between a side's tokens

    def stage(self, n: int) -> int:
        return n % self.depth

    def wake(self, machine: Machine) -> None:
        for waiter in self.waiters:
            machine.wake(waiter)
        self.waiters.clear()

    def expect(self, ex: Executor, kind: str, n: int, site: Site) -> None:
        """Each side's tokens follow one another, round by round. Who fills holds one stage at a time; who
        reads may wait for the next round before it releases the one before, whose products are in flight."""
        ex.machine.polling.changed()
        side = FILLS if kind in FILLS else READS
        opens, closes = side
        first, second = self.next[opens], self.next[closes]
        wanted = (kind, self.next[kind])
        if kind == closes and first == second:
            wanted = opens, first
        elif kind == opens == "acquire" and first != second:
            wanted = closes, second
        if wanted != (kind, n):
            text = (
                f"ring {self.number} does {kind} of round {n}, and {wanted[0]} of round {wanted[1]} is next"
            )
            ex.machine.report.add(Finding("schedule", text, ex.where(site)))
            self.next = {**self.next, opens: n + 1, closes: n + (kind == closes)}
            self.held[side] = [n] if kind == opens else []
            return
        self.next[kind] = n + 1
        if kind == opens:
            self.held[side].append(n)
        else:
            self.held[side].remove(n)

    def touched(self, ex: Executor | AsyncUnit, storage: Storage, key: Any, mode: str, site: Site) -> None:
        """A stage is touched between the tokens of its round."""
        side = READS if mode == "read" else FILLS
        held, (first, end) = self.held[side], stages_of(key)
        if end != first + 1 or first not in [self.stage(n) for n in held]:
            where = (
                f"in round {held[-1]}, whose stage is {self.stage(held[-1])}"
                if held
                else f"outside {' and '.join(side)}"
            )
            region = describe(storage.name, key)
            text = f"ring {self.number}: {region} is {'read' if mode == 'read' else 'written'} {where}"
            ex.machine.report.add(Finding("schedule", text, ex.where(site, region)))


def stages_of(key: Any) -> tuple[int, int]:
    """The first stage that an index touches, and the one behind the last."""
    first = key[0] if isinstance(key, tuple) else key
    if isinstance(first, slice):
        return first.start, first.stop
    touched = np.asarray(first)
    return int(touched.min()), int(touched.max()) + 1


def of(ex: Executor, number: int) -> Ring:
    """A ring of an executor's block, or its own; of one that goes through its T.Scale again a new one, whose
    rounds are counted anew."""
    block = ex.block
    below = block.machine.prepared.program.schedule.rings[number].below
    key, owner = (number, ex.place(below)), ex if below else None
    made: Ring | None = block.rings.get(key)
    if made is None or made.owner is not owner:
        block.rings[key] = made = Ring(block, number, owner)
    return made


def unread(machine: Machine) -> None:
    """Reports the rounds that were committed and that nobody awaited: their copies are in flight when the
    block ends."""
    for block in machine.blocks.values():
        for ring in block.rings.values():
            late = [n for n in ring.full if n not in ring.read]
            if late:
                text = (
                    f"ring {ring.number}: round {late[0]} is filled, and nobody waits for it before the "
                    "block ends"
                )
                site = machine.prepared.tokens[ring.number, "commit"][0]
                machine.report.add(
                    Finding("schedule", text, Where(site.what, site.loc, block.rank.number, block.shown))
                )


def unit(ex: Executor, number: int) -> AsyncUnit:
    """Who performs the copy that ``ex`` issues into a ring now."""
    ring = of(ex, number)
    ring.now += 1
    assert ring.offset is not None, "a ring without asynchronous copies"
    return AsyncUnit(ex.machine, ex.root + ring.offset, ring.now, ex.vc.copy(), ex.name)


def start(ex: Executor, number: int, move: Callable[[], None]) -> None:
    """The data of a copy moves: at once, or when its round is awaited."""
    if ex.machine.late:
        of(ex, number).issued.append(move)
    else:
        move()


# ---- tokens


def acquire(ex: Executor, number: int, n: int, site: Site) -> Generator[str, None, None]:
    ring = of(ex, number)
    ring.expect(ex, "acquire", n, site)
    before = n - ring.depth
    if before >= 0:
        text = (
            f"stage {ring.stage(n)} of ring {number} to be empty: round {n} fills it behind the release "
            f"of round {before}"
        )
        yield from _until(ex, ring, ring.empty, before, "release", text, site)
        ex.acquire(ring.empty[before])


def commit(ex: Executor, number: int, n: int, site: Site) -> Generator[str, None, None]:
    ring = of(ex, number)
    yield from _releasing(ex, ring)
    ring.expect(ex, "commit", n, site)
    clock = ex.release()
    if ring.offset is not None:
        # Who awaits this round comes behind all copies issued so far, and behind their issuer.
        clock[ex.root + ring.offset] = ring.now
    ring.full[n] = clock
    ring.flying[n], ring.issued = ring.issued, []
    ring.wake(ex.machine)


def wait(ex: Executor, number: int, n: int, site: Site) -> Generator[str, None, None]:
    ring = of(ex, number)
    ring.expect(ex, "wait", n, site)
    if n < 0:
        return  # as with the phases of an mbarrier: what lies before the first round is complete
    text = f"stage {ring.stage(n)} of ring {number} to be full: round {n} has not been committed"
    yield from _until(ex, ring, ring.full, n, "commit", text, site)
    for round_ in sorted(r for r in ring.flying if r <= n):
        for move in ring.flying.pop(round_):
            move()
    ring.read.add(n)
    ex.acquire(ring.full[n])


def release(ex: Executor, number: int, n: int, site: Site) -> Generator[str, None, None]:
    from tilescale.compiler.sim.flights import released

    ring = of(ex, number)
    yield from _releasing(ex, ring)
    ring.expect(ex, "release", n, site)
    released(ex, ring, n, site)
    ring.empty[n] = ex.release()
    ring.wake(ex.machine)


def _releasing(ex: Executor, ring: Ring) -> Generator[str, None, None]:
    """Others may go on behind this token, where there are others."""
    if ring.offset is not None:
        yield "signal"
    ex.flush()


def _until(
    ex: Executor, ring: Ring, rounds: dict[int, Any], n: int, token: str, text: str, site: Site
) -> Generator[str, None, None]:
    from tilescale.compiler.sim.machine import Waiting

    while n not in rounds:
        ring.waiters.append(ex)
        ex.waiting = Waiting(site, text, ring=(ring.number, token))
        yield "wait"


# ---- what people read


def race(machine: Machine, found: Race) -> tuple[str, str] | None:
    """What a race says about rings, and what would order it; None where no ring has to do with it."""
    made, storage, events = machine.prepared, found.storage, machine.events
    mode, other = events.said[found.event][2], events.said[found.other][2]
    key = events.said[found.other if found.too_early else found.event][3]
    ring = storage.ring
    if ring is None:
        places = [(int(events.who[e]) - machine.first) % made.executors for e in (found.event, found.other)]
        flying = [r for r, (at, n) in made.units.items() if any(at <= p < at + n for p in places)]
        apart = events.said[found.event][0][:2] != events.said[found.other][0][:2]
        if not flying or mode == "read" and (apart or found.too_early):  # what it did not await says more
            return None
        text = f"; a copy into ring {flying[0]} reads it, which is in flight until its round is awaited"
        return (
            text,
            f"the change behind the wait for the round of ring {flying[0]} that copies it, or in front of "
            "the copy",
        )
    name = f"stage {stages_of(key)[0]} of ring {ring.number}"
    if mode == "write" and other == "read":
        hint = (
            f"release of ring {ring.number} behind the last reader of a stage, acquire in front of the "
            "copy into it"
        )
        return f": reuse of {name} before its reader is done", hint
    if mode == "read":
        hint = (
            f"commit of ring {ring.number} behind the last copy into a stage, wait in front of its first "
            "reader"
        )
        return f": {name} is read before it is full", hint
    hint = f"acquire of ring {ring.number} in front of the copy, and a stage of its own for each round"
    return f": {name} is filled while it is in use", hint
