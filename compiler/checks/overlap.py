"""Launches with ``ordered=False``, as they run: overlapped.

A window is a team's consecutive unordered launches, each with its own arguments. A rank's launches follow one
another, as in a stream: the blocks of one begin where all of the rank's blocks of the one before have ended,
and what its host did in between. No rank waits for another one's launch to begin or to end. Symmetric memory
and counters are shared by the launches of a window; a rank's own tensors are taken as the run in turn found
them, since its own launches are ordered anyway.

In front of the window everything is complete, and so known to everyone, but for what hosts are said to have
touched since.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tilescale.compiler.checks.run import Launch
from tilescale.compiler.findings import Report
from tilescale.compiler.ir.contexts import Site
from tilescale.compiler.sim import schedule
from tilescale.compiler.sim.counters import Counters
from tilescale.compiler.sim.machine import Executor, Machine
from tilescale.compiler.sim.memory import HOST, UNWRITTEN, Events, Shadow, Storage
from tilescale.compiler.sim.packets import Packets

#: launches of a window; executors of all of them, each of which has a clock with an entry for every one
MOST_LAUNCHES, MOST_EXECUTORS = 8, 4096


@dataclass(frozen=True)
class Touch:
    """What a rank's host did with symmetric memory in front of a launch: the bytes from an address on where
    ``mask`` holds."""

    address: int
    mask: Any
    writes: bool
    what: str
    loc: Any


@dataclass
class Step:
    """One launch of a window, its arguments as they were at its beginning (`Launch.keep`).

    Attributes:
        places: for each rank, of its symmetric arguments: name → address. touches: for each rank, by its host
            in front of the launch.
        changed: for each rank: name → the elements that its host or a launch of its own has changed since the
            launch before.
    """

    launch: Launch
    number: int
    places: list[dict[str, int]]
    touches: list[list[Touch]] = field(default_factory=list)
    changed: list[dict[str, Any]] = field(default_factory=list)
    loc: Any = None

    @property
    def executors(self) -> int:
        """Of all ranks, with their hosts."""
        x, y, z = self.launch.grid
        return self.launch.ranks * (x * y * z * self.launch.made.executors + 1)

    def regions(self) -> list[tuple[int, int, tuple[Any, ...]]]:
        """Its symmetric memory: from, up to, and as what it is seen."""
        out = []
        for rank, places in enumerate(self.places):
            for name, address in places.items():
                array = self.launch.bound[rank].arrays[name]
                info = self.launch.made.buffers[self.slot(name)]
                out.append(
                    (address, address + array.nbytes, (array.shape, info.dtype, info.cells, info.scope))
                )
        return out

    def slot(self, name: str) -> int:
        """The buffer of a parameter."""
        return next(self.launch.made.slots[p.var] for p in self.launch.made.program.params if p.name == name)


def fits(steps: Sequence[Step], step: Step) -> bool:
    """Whether a launch sees all memory that it shares with these as they do: as tensors of one shape and
    dtype, and not by parts."""
    there = {region for s in steps for region in s.regions()}
    return all(
        mine == its or mine[1] <= its[0] or its[1] <= mine[0] for mine in step.regions() for its in there
    )  # fmt: skip


class Window:
    """The launches ``steps``, overlapped; to be run any number of times from the same beginning."""

    def __init__(self, steps: Sequence[Step], *, limit: int, whose: str = ""):
        self.steps, self.limit, self.whose = list(steps), limit * len(steps), whose
        self.tracked, self.viewed = self._facts()

    def _facts(self) -> tuple[set[int], set[int]]:
        """Addresses of what any of the launches or a host writes, and of what any sees through a view."""
        tracked, viewed = set(), set()
        written = [t for step in self.steps for touches in step.touches for t in touches if t.writes]
        for step in self.steps:
            for rank, places in enumerate(step.places):
                for name, address in places.items():
                    info, end = (
                        step.launch.made.buffers[step.slot(name)],
                        address + step.launch.bound[rank].arrays[name].nbytes,
                    )
                    host = name in step.changed[rank] or any(
                        t.address < end and address < t.address + len(t.mask) for t in written
                    )
                    tracked |= {address} if info.tracked or host else set()
                    viewed |= {address} if info.viewed else set()
        return tracked, viewed

    def run(self, order: str, seed: int, into: Report) -> None:
        """One run, its findings marked with the schedule and added to ``into``."""
        chosen, events = schedule.make(order, seed), Events()
        clocks = 1 + sum(step.executors for step in self.steps)
        memory: dict[int, Any] = {}
        machines: list[Machine] = []
        with np.errstate(all="ignore"):
            for step in self.steps:
                machines.append(self._machine(step, machines, chosen, events, clocks, memory))
            for rank in machines[0].ranks:
                machines[0].begin(rank, np.zeros(clocks, np.int64))
            machines[0].run()
        for machine in machines:
            machine.close()
        into.runs += 1
        first, last = self.steps[0].number, self.steps[-1].number
        shown = f"launches {first} to {last} overlapped" if last > first else f"launch {first}"
        ranks = self.steps[0].launch.ranks
        for finding in machines[0].report.findings:
            into.add(
                replace(
                    finding, schedule=f"{chosen.shown}, {ranks} rank{'s' * (ranks != 1)}{self.whose}, {shown}"
                )
            )

    def _machine(
        self,
        step: Step,
        before: list[Machine],
        chosen: Any,
        events: Events,
        clocks: int,
        memory: dict[int, Any],
    ) -> Machine:
        launch = step.launch
        made = Machine(launch.made, launch.grid, chosen, events, self.limit)
        made.launch, made.clocks = step.number, clocks
        if before:
            made.first = before[-1].first + self.steps[len(before) - 1].executors
            made.behind(before[0])
        slots = [self._slots(step, rank, made, events, memory) for rank in range(launch.ranks)]
        made.place([launch.bound[r].scalars for r in range(launch.ranks)], slots)
        for rank in range(launch.ranks):
            made.hosts[rank] = functools.partial(self._host, step, rank, memory)
        return made

    def _slots(
        self, step: Step, rank: int, made: Machine, events: Events, memory: dict[int, Any]
    ) -> dict[int, Any]:
        """A rank's arguments by buffer: the window's own memory where they are symmetric, made from what its
        first launch found there."""
        bound, out = step.launch.bound[rank], {}
        for name, values in bound.arrays.items():
            slot, address = step.slot(name), step.places[rank].get(name)
            known = None if address is None else memory.get(address)
            if known is None:
                known = self._fresh(bound, name, values, slot, made, events, address)
            elif isinstance(known, Storage):
                known = Storage(
                    name, known.dtype, known.data, known.shadow, scope=known.scope, owner=known.owner
                )
            if address is not None:
                memory.setdefault(address, known)
            out[slot] = known
        return out

    def _fresh(
        self,
        bound: Any,
        name: str,
        values: Any,
        slot: int,
        made: Machine,
        events: Events,
        address: int | None,
    ) -> Any:
        array, info, owner = np.array(values, order="C"), bound.made.buffers[slot], (bound.rank,)
        if info.scope.endswith("signal"):
            return Counters(name, array, made.clocks, owner, slot)
        if info.scope.endswith("packets"):
            params = bound.made.program.params
            return bound.box(next(p for p in params if p.name == name), array, slot)
        tracked, viewed = info.tracked or address in self.tracked, info.viewed or address in self.viewed
        mask = bound.masks.get(name)
        fresh = mask is not None and bool(mask.any())
        key = (bound.rank, "symmetric", address) if address is not None else (bound.rank, slot, made.first)
        shadow = Shadow(
            array.size * info.cells, events, tracked=tracked, written=not fresh, key=key, viewed=viewed
        )
        if fresh:
            shadow.last[:] = HOST
            shadow.last.reshape(*array.shape, info.cells)[mask] = UNWRITTEN
        return Storage(name, info.dtype, array, shadow, scope=info.scope, owner=owner)

    def _host(self, step: Step, rank: int, memory: dict[int, Any], ex: Executor) -> None:
        """What a rank's host did in front of a launch: its accesses, and the values that it left."""
        for number, touch in enumerate(step.touches[rank]):
            site = Site(touch.what, touch.loc, -1 - number)
            for address, storage in memory.items():
                if isinstance(storage, Storage) and (hit := _elements(touch, address, storage)) is not None:
                    storage.shadow.access(
                        ex, storage.cells, np.nonzero(hit), "write" if touch.writes else "read", site, storage
                    )
        for name, changed in step.changed[rank].items():
            address, values = step.places[rank][name], step.launch.bound[rank].arrays[name]
            storage = memory[address]
            if isinstance(storage, Counters):
                for index in zip(*np.nonzero(changed), strict=True):
                    counter = storage.at(tuple(map(int, index)))
                    assert counter is not None
                    counter.signal(
                        ex, int(values[index]), "set", Site("what comes in front of this launch", step.loc, 0)
                    )
                continue
            if isinstance(storage, Packets):
                storage.data[changed] = values[changed]
                continue
            rest, told = changed.copy(), (t for touches in step.touches for t in touches if t.writes)
            for hit in (_elements(t, address, storage) for t in told):  # of whichever rank's host
                rest &= True if hit is None else ~hit
            storage.data[changed] = values[changed]
            if rest.any():
                site = Site("what comes in front of this launch", step.loc, 0)
                storage.shadow.access(ex, storage.cells, np.nonzero(rest), "write", site, storage)


def _elements(touch: Touch, address: int, storage: Storage) -> Any:
    """The elements of a storage that a host touched; None where there are none."""
    nbytes, item = storage.data.nbytes, storage.data.itemsize
    low, high = max(touch.address, address), min(touch.address + len(touch.mask), address + nbytes)
    if low >= high:
        return None
    hit = np.zeros(nbytes, bool)
    hit[low - address : high - address] = touch.mask[low - touch.address : high - touch.address]
    made = hit.reshape(*storage.shape, item).any(-1)
    return made if made.any() else None
