"""A launch of several ranks on the emulated GPU: all blocks of all ranks take turns, which a seed draws,
wherever one tells another something or waits for it.

Memory is as it would be if every store were seen at once, so what a GPU might do otherwise is looked for
instead, as it is inside a block: every element of a tensor remembers when which block touched it last, and an
access that conflicts with another block's must know of that by signals, waits and meetings
(include/ts/team.cuh). A release tells what the block's threads did before they met last, an acquire serves
all of them once they have met behind it: the meetings that passes/insert_barriers.py puts around both. Who
takes a rank's address must know that the rank has entered the launch (entries.py); the flags at its end are
not run.

A block's producer is somebody of its own: what it acquired the consumers do not know, and what it copied they
know of behind the ring's barrier. So are the warps that put to other ranks, who meet each other. TMA knows
what its thread knew at its last proxy fence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilescale.compiler.emulator import nvshmem
from tilescale.compiler.emulator.copies import EmulationError
from tilescale.compiler.emulator.entries import await_entry, require_entry
from tilescale.compiler.emulator.interleaving import Interleaving
from tilescale.compiler.emulator.memory import Block, Memory, Pointer, Several
from tilescale.compiler.ir.signals import OPS
from tilescale.compiler.ops.atomic import KINDS
from tilescale.compiler.sim import numerics
from tilescale.compiler.sim.tiles import updated
from tilescale.packets import EMPTY, SHIFT

#: who of a block acts for itself: its threads that meet, its producer, and the warps that put to other ranks
THREADS, PRODUCER, COMMUNICATOR = range(3)
#: where they stand among a block's places in a clock: the producer, the communicator, then one warp of its
#: threads after another
FIRST_WARP = 2
#: a thread's stamp is how often the block's threads had met, and below that bit, how often its warp had
BLOCK = 1 << 32
#: later than all that anybody knows of
UNDER_WAY = 1 << 60


class Record:
    """Who touched each element of a rank's tensor in one way, and when: at every place of a clock one more
    than the stamp by then (of a producer, than how many copies it had made); 0: never."""

    #: who touched an element (`Task.code`): nobody so far; several
    NOBODY, SEVERAL = -1, -2

    def __init__(self, places: int, size: int):
        self.stamps = np.zeros((size, places), np.int64)
        self.by = np.full(size, self.NOBODY, np.int32)

    def note(self, cells: Any, code: int, places: Any, stamps: Any) -> None:
        before = self.by[cells]
        self.by[cells] = np.where((before == self.NOBODY) | (before == code), code, self.SEVERAL)
        self.stamps[cells, places] = stamps + 1

    def others(self, cells: Any, code: int) -> Any:
        """Which of these somebody else has touched."""
        by = self.by[cells]
        return (by != code) & (by != self.NOBODY)


class Cells:
    """The records of a rank's tensor. added: to an element that ranks add to; summed: that is added to
    atomically among the blocks of one rank."""

    def __init__(self, places: int, size: int):
        self.wrote, self.read, self.added, self.summed = (Record(places, size) for _ in range(4))

    def conflicting(self, writes: bool, adds: str) -> list[tuple[Record, str, bool]]:
        """What an access must come behind, and whether only where another rank did it. adds: "all" of an
        addition that is atomic among all ranks, "rank" of one among its own rank's blocks, else ""."""
        found = [(self.wrote, "writes", False)]
        found += [(self.read, "reads", False)] if writes else []
        if adds != "all":
            found.append((self.added, "adds to", adds == "rank"))
        return [*found, (self.summed, "adds to", adds != "")]


@dataclass
class Acquired:
    """What threads learnt: of each place in a clock, all that was done there before such a stamp."""

    actor: int
    place: int
    threads: frozenset[int]
    stamp: int
    clock: Any


@dataclass
class Task:
    """One block of one rank."""

    number: int
    rank: int
    block: int
    known: Any
    #: how many places in a clock each block has: one for all warps where they never act by themselves
    width: int
    acquired: list[Acquired] = field(default_factory=list)
    rounds: dict[Any, int] = field(default_factory=dict)
    views: dict[tuple[int, str], Memory] = field(default_factory=dict)
    #: (threads, ranks): whose entry a thread knows of
    entered: Any = None
    #: the looks of its executors, as `entries` keeps them
    looks: dict[Any, list[None]] = field(default_factory=dict)
    saw: dict[Any, set[int]] = field(default_factory=dict)
    #: of packets that threads have looked for in vain: whether they have come
    late: list[Callable[[], bool]] = field(default_factory=list)
    #: how many copies the producer has made
    copies: int = 0
    #: puts that NVSHMEM has under way, and where their tiles are staged (emulator/nvshmem.py)
    flights: list[Any] = field(default_factory=list)
    scratch: dict[tuple[str, int], Memory] = field(default_factory=dict)
    #: what a thread knew at its last proxy fence
    fenced: dict[int, Any] = field(default_factory=dict)

    @property
    def actors(self) -> slice:
        """Its places in a clock."""
        return slice(self.number * self.width, (self.number + 1) * self.width)

    def code(self, b: Block) -> int:
        """The block, or its communicator, whose pulls the block's threads await."""
        return 2 * self.number + int(b.actor == COMMUNICATOR)

    def place(self, b: Block, thread: Any) -> Any:
        """Of what a thread does (or several) in a clock."""
        within = b.actor - PRODUCER
        if b.actor == THREADS:
            within = FIRST_WARP + (thread // b.wave if self.width > FIRST_WARP + 1 else thread * 0)
        return self.number * self.width + within

    def stamp(self, b: Block, thread: Any) -> Any:
        """When a thread does something (or several)."""
        if b.actor == PRODUCER:
            return self.copies
        met = b.stamps[thread]
        if b.actor == COMMUNICATOR:
            return met[..., 1]
        alone = self.width > FIRST_WARP + 1
        return met[..., 0] * BLOCK + (met[..., 2] if alone else 0)


class World:
    """The ranks of one launch. ``arrays``: for each rank its flat tensors by name. ``ordered``: ranks await
    each other's entry."""

    def __init__(
        self,
        arrays: list[dict[str, Any]],
        blocks: int,
        warps: int,
        draw: Any,
        seed: int = 0,
        ordered: bool = True,
    ):
        self.arrays, self.blocks, self.ordered = arrays, blocks, ordered
        #: the ranks that have entered
        self.entered: set[int] = set()
        total, self.width = len(arrays) * blocks, FIRST_WARP + warps
        self.cells = [
            {name: Cells(total * self.width, a.size) for name, a in of.items() if isinstance(a, np.ndarray)}
            for of in arrays
        ]
        self.clocks: dict[Any, Any] = {}
        self.counts: dict[Any, int] = {}
        self.interleaving = Interleaving(draw, seed)
        none = np.zeros(total * self.width, np.int64)
        self.tasks = [Task(k, k // blocks, k % blocks, none.copy(), self.width) for k in range(total)]

    def view(self, task: Task, rank: int, name: str) -> Memory:
        """A rank's tensor as one block sees it: the data are everyone's, what its threads touched since they
        met is its own."""
        if (rank, name) not in task.views:
            data = self.arrays[rank][name]
            task.views[rank, name] = Memory(name, data, data.size)
        return task.views[rank, name]

    def place(self, task: Task, memory: Memory) -> tuple[int, str]:
        return next(key for key, m in task.views.items() if m is memory)

    # -- what is known
    # ------------------------------------------------------------------------------------------------
    def knowledge(self, b: Block, thread: int) -> Any:
        """What a thread knows of all blocks: what it heard itself, and what any heard before it and that one
        met, as threads of the block or of one warp."""
        task: Task = b.task
        now, all_met = task.stamp(b, thread), int(b.stamps[:, 0].min()) * BLOCK
        for h in [h for h in task.acquired if h.actor == THREADS and h.stamp // BLOCK * BLOCK < all_met]:
            task.known = np.maximum(task.known, h.clock)
            task.acquired.remove(h)
        clock = task.known
        for h in task.acquired:
            if h.actor != b.actor:
                continue
            since = now if h.place == task.place(b, thread) else now // BLOCK * BLOCK
            if thread in h.threads or b.actor != PRODUCER and h.stamp < since:
                clock = np.maximum(clock, h.clock)
        return clock

    def tell(self, b: Block, thread: int, key: Any) -> None:
        """A release by a thread, kept with what it releases to."""
        clock, task = self.knowledge(b, thread).copy(), b.task
        stamp, place = task.stamp(b, thread), task.place(b, thread)
        if b.actor == THREADS:  # what all warps did before they met, and what this one did since
            every = slice(task.actors.start + FIRST_WARP, task.actors.stop)
            clock[every] = np.maximum(clock[every], stamp // BLOCK * BLOCK)
        clock[place] = stamp
        before = self.clocks.get(key)
        self.clocks[key] = clock if before is None else np.maximum(before, clock)

    def acquire(self, b: Block, thread: int, key: Any) -> None:
        """An acquire."""
        if key in self.clocks:
            self.hear(b, [thread], self.clocks[key].copy())

    def hear(self, b: Block, threads: Any, clock: Any) -> None:
        """Threads learn what a clock says; those of a warp have met equally often."""
        task: Task = b.task
        lanes = np.unique(np.asarray(list(threads), np.int64))
        places = np.broadcast_to(task.place(b, lanes), lanes.shape)
        for place in np.unique(places):
            who = frozenset(int(t) for t in lanes[places == place])
            stamp = int(task.stamp(b, min(who)))
            for h in task.acquired:
                if (h.actor, h.place, h.threads, h.stamp) == (b.actor, place, who, stamp):
                    h.clock = np.maximum(h.clock, clock)
                    break
            else:
                task.acquired.append(Acquired(b.actor, int(place), who, stamp, clock))

    def fence(self, b: Block, threads: Any) -> None:
        """A proxy fence of global memory by each of these threads."""
        alike = self._alike(b, threads)
        known = {thread: self.knowledge(b, thread) for thread in np.unique(alike).tolist()}
        b.task.fenced.update(
            {t: known[like] for t, like in zip(threads.tolist(), alike.tolist(), strict=True)}
        )

    def loaded(self, b: Block, thread: int, memory: Memory, cells: Any) -> Any:
        """TMA reads elements of a tensor for a thread; gives what is known behind the barrier that it
        completes."""
        task: Task = b.task
        known = task.fenced.get(thread, np.zeros_like(task.known))
        self._ordered(b, memory, cells, known, writes=False, by="TMA for ")
        record = self._record(task, memory)
        if record is not None:
            record.read.note(cells.ravel(), task.code(b), task.place(b, thread), task.stamp(b, thread))
        clock = self.knowledge(b, thread).copy()
        if b.actor == PRODUCER:
            task.copies += 1
            clock[task.place(b, thread)] = task.copies
        return clock

    def touched(
        self, b: Block, memory: Memory, cells: Any, who: Any, writes: bool, adds: bool = False
    ) -> None:
        """Looks for accesses of other blocks that nothing orders before these, and remembers these. adds:
        what they write is added, whoever else adds there."""
        task: Task = b.task
        record = self._record(task, memory)
        if record is None:
            return
        flat, threads = cells.ravel(), np.broadcast_to(who, cells.shape).ravel()
        code, asked = task.code(b), np.zeros(len(flat), bool)
        for seen, *_ in record.conflicting(writes, "all" if adds else ""):
            asked |= seen.others(flat, code)
        if asked.any():
            flat_asked, group = flat[asked], self._alike(b, threads[asked])
            for thread in np.unique(group):
                known = self.knowledge(b, int(thread))
                self._ordered(
                    b, memory, flat_asked[group == thread], known, writes, adds="all" if adds else ""
                )
        kind = record.added if adds else record.wrote if writes else record.read
        kind.note(flat, code, task.place(b, threads), task.stamp(b, threads))

    def _alike(self, b: Block, threads: Any) -> Any:
        """For each of these threads one of those that know the same: who stands at the same place at the
        same stamp, and heard the same by itself."""
        heard: dict[int, list[int]] = {}
        for k, h in enumerate(b.task.acquired):
            for thread in h.threads if h.actor == b.actor else ():
                heard.setdefault(thread, []).append(k)
        lanes = np.unique(threads)
        places, stamps = (np.broadcast_to(of(b, lanes), lanes.shape) for of in (b.task.place, b.task.stamp))
        first: dict[Any, int] = {}
        found = np.zeros(b.threads, np.int64)
        for thread, place, stamp in zip(lanes.tolist(), places.tolist(), stamps.tolist(), strict=True):
            found[thread] = first.setdefault((place, stamp, *heard.get(thread, ())), thread)
        return found[threads]

    def stored(self, b: Block, thread: int, memory: Memory, cells: Any, adds: str = "") -> Callable[[], None]:
        """TMA begins to write elements of a tensor for a thread, or to add to them. Nobody else may know of
        that before the thread has awaited it, as it does by calling what this gives."""
        task: Task = b.task
        # What it adds to it reads, and that is there by the thread's last proxy fence.
        known = task.fenced.get(thread, np.zeros_like(task.known)) if adds else self.knowledge(b, thread)
        self._ordered(b, memory, cells, known, writes=True, by="TMA for ", adds=adds)
        record = self._record(task, memory)
        at, place = cells.ravel(), task.place(b, thread)
        if record is None:
            return lambda: None
        code, kind = task.code(b), record.summed if adds else record.wrote
        kind.note(at, code, place, UNDER_WAY)

        def awaited() -> None:
            kind.note(at, code, place, task.stamp(b, thread))

        return awaited

    def _record(self, task: Task, memory: Memory) -> Cells | None:
        """Who touched a tensor; None where it is the block's own."""
        where = next((key for key, m in task.views.items() if m is memory), None)
        return None if where is None else self.cells[where[0]][where[1]]

    def _ordered(
        self,
        b: Block,
        memory: Memory,
        cells: Any,
        known: Any,
        writes: bool,
        by: str = "",
        adds: str = "",
    ) -> None:
        """Raises for accesses of other blocks that are not ``known`` to come before these, and for what this
        block's communicator has pulled."""
        task: Task = b.task
        record, at = self._record(task, memory), cells.ravel()
        if record is None:
            return
        for seen, verb, elsewhere in record.conflicting(writes, adds):
            stamps = seen.stamps[at] - 1
            pulling = task.actors.start + COMMUNICATOR - PRODUCER
            pulls = stamps[:, pulling].copy()
            stamps[:, task.actors] = -1
            if seen is record.wrote and b.actor != COMMUNICATOR:
                stamps[:, pulling] = pulls
            if elsewhere:
                each = self.blocks * self.width  # places of a rank in a clock
                stamps[:, task.rank * each : (task.rank + 1) * each] = -1
            bad = stamps >= np.maximum(known, 0)
            bad &= stamps >= 0
            if bad.any():
                cell, other = (int(x[0]) for x in np.nonzero(bad))
                them = self.tasks[other // self.width]
                rank = self.place(task, memory)[0]
                raise EmulationError(
                    f"race in {memory.name} of rank {rank} at {at[cell]}: block {them.block} of "
                    f"rank {them.rank} {verb} it, {by}block "
                    f"{task.block} of rank {task.rank} touches it, and nothing orders the two"
                )

    # -- waiting
    # ------------------------------------------------------------------------------------------------------
    def until(self, ready: Callable[[], bool]) -> None:
        self.interleaving.yields(ready)

    def meet(self, b: Block, thread: int, key: Any, of: int) -> None:
        """Arrives, and waits for the others of this round."""
        n = b.task.rounds[key] = b.task.rounds.get(key, 0) + 1
        round_ = (*key, n)
        self.tell(b, thread, round_)
        self.counts[round_] = self.counts.get(round_, 0) + 1
        self.until(lambda: self.counts[round_] >= of)
        self.acquire(b, thread, round_)


# ---- instructions


def _one(m: Any, what: str) -> int:
    lanes = np.flatnonzero(m)
    if len(lanes) != 1:
        raise EmulationError(f"{what} by {len(lanes)} threads")
    return int(lanes[0])


def _one_a_warp(b: Block, m: Any, what: str) -> list[int]:
    """The threads of warps that each do something by themselves, one of each. Warps of a block go in step
    here: where one of them waits all do, so that warps which wait for each other do not come to an end."""
    lanes = np.flatnonzero(m)
    if len(np.unique(lanes // b.wave)) != len(lanes):
        raise EmulationError(f"{what} by {len(lanes)} threads, several of one warp")
    return [int(x) for x in lanes]


def scalar(value: Any, m: Any) -> int:
    found = np.unique(np.broadcast_to(value, m.shape)[m])
    if len(found) != 1:
        raise EmulationError("threads name different ranks")
    return int(found[0])


def _address(know: Callable[[Block, Any, int], None]) -> Callable[..., Pointer]:
    """A rank's address, for threads that ``know`` of its entry."""

    def run(b: Block, m: Any, team: Any, pointer: Pointer, rank: Any, site: Any) -> Pointer:
        world, (_, name) = b.world, b.world.place(b.task, pointer.memory)
        ranks = np.broadcast_to(rank, m.shape)
        views = {}
        for there in map(int, np.unique(ranks[m])):
            if not 0 <= there < len(world.arrays):
                raise EmulationError(f"rank {there} is out of range")
            know(b, m & (ranks == there), there)
            views[there] = world.view(b.task, there, name)
        return Pointer(views.popitem()[1] if len(views) == 1 else Several(ranks, views), pointer.index)

    return run


def _signal(op: str) -> Callable[..., None]:
    def run(b: Block, m: Any, pointer: Pointer, value: Any) -> None:
        for thread in _one_a_warp(b, m, "a signal"):
            memory = pointer.memory
            memory = memory.of_thread(thread) if isinstance(memory, Several) else memory
            rank, name = b.world.place(b.task, memory)
            at = int(np.broadcast_to(pointer.index, m.shape)[thread])
            number = int(np.broadcast_to(value, m.shape)[thread])
            b.world.until(lambda: True)  # others may come first
            if op == "set":
                b.world.clocks.pop((rank, name, at), None)
            b.world.tell(b, thread, (rank, name, at))
            data = b.world.arrays[rank][name]
            data[at] = OPS[op](int(data[at]), number)

    return run


_HOLDS: list[Callable[[int, int], bool]] = [
    lambda x, v: x >= v,
    lambda x, v: x == v,
    lambda x, v: x > v,
    lambda x, v: x != v,
    lambda x, v: x <= v,
    lambda x, v: x < v,
]


def _wait(
    b: Block, m: Any, team: Any, pointer: Pointer, index: Any, value: Any, compare: Any, site: Any
) -> None:
    rank, name = b.world.place(b.task, pointer.memory)
    data, holds = b.world.arrays[rank][name], _HOLDS[scalar(compare, m)]
    awaited = [
        (thread, *(int(np.broadcast_to(x, m.shape)[thread]) for x in (index, value)))
        for thread in _one_a_warp(b, m, "a wait")
    ]
    b.world.until(lambda: all(holds(int(data[at]), wanted) for _, at, wanted in awaited))
    for thread, at, _ in awaited:
        b.world.acquire(b, thread, (rank, name, at))


def _test(
    b: Block,
    m: Any,
    team: Any,
    pointer: Pointer,
    index: Any,
    inside: Any,
    value: Any,
    compare: Any,
    site: Any,
) -> Any:
    rank, name = b.world.place(b.task, pointer.memory)
    holds, out = _HOLDS[scalar(compare, m)], np.zeros(m.shape, np.int32)
    for thread in np.flatnonzero(m):
        at, wanted, there = (int(np.broadcast_to(x, m.shape)[thread]) for x in (index, value, inside))
        if not there:
            _no_counter(b, m, team, site)
        b.world.until(lambda: True)  # others may come first
        out[thread] = holds(int(b.world.arrays[rank][name][at]), wanted)
        if out[thread]:
            b.world.acquire(b, int(thread), (rank, name, at))
    return out


def _system(kind: str) -> Callable[..., Any]:
    """An atomic update at the scope of the system, by one thread after the other."""

    def run(b: Block, m: Any, pointer: Pointer, value: Any) -> Any:
        rank, name = b.world.place(b.task, pointer.memory)
        data = b.world.arrays[rank][name]
        dtype = str(data.dtype)
        out = np.zeros(m.shape, numerics.compute(dtype))
        for thread in np.flatnonzero(m):
            at, given = (np.broadcast_to(x, m.shape)[thread] for x in (pointer.index, value))
            key = (rank, name, int(at))
            b.world.until(lambda: True)  # others may come first
            out[thread] = before = numerics.decode(data[at], dtype)
            data[at] = numerics.encode(
                updated(before, given if dtype in numerics.FLOATS else int(given), kind, dtype), dtype
            )
            if kind == "store":
                b.world.clocks.pop(key, None)
            else:
                b.world.acquire(b, int(thread), key)
            if kind != "load":
                b.world.tell(b, int(thread), key)
        return out

    return run


def _barrier(device: bool) -> Callable[..., None]:
    def run(b: Block, m: Any, team: Any, executors: Any, site: Any) -> None:
        each = b.world.blocks * scalar(executors, m)
        key = ("device",) if device else ("grid", b.task.rank)
        b.world.meet(b, _one(m, "a barrier"), key, each * (len(b.world.arrays) if device else 1))

    return run


def _team_sync(b: Block, m: Any, team: Any, lane: Any, site: Any) -> None:
    """Lanes of one warp, each of which tells some ranks what it knows, and acquires as much."""
    lanes = np.flatnonzero(m)
    if not np.array_equal(np.broadcast_to(lane, m.shape)[m], np.arange(b.wave)):
        raise EmulationError(f"a meeting of ranks by {len(lanes)} threads")
    require_entry(b, m, slice(None))
    b.world.meet(b, int(lanes[0]), ("team", b.task.block), len(b.world.arrays))


def _range_of_ranks(b: Block, m: Any, first: Any, count: Any, step: Any) -> tuple[int, ...]:
    start, n, by = (scalar(x, m) for x in (first, count, step))
    return _there(b, [start + k * by for k in range(n)])


def _list_of_ranks(b: Block, m: Any, *ranks: Any) -> tuple[int, ...]:
    return _there(b, [rank for x in ranks if (rank := scalar(x, m)) >= 0])


def _there(b: Block, ranks: list[int]) -> tuple[int, ...]:
    """Those who meet, in the order of the launch's ranks: by it those who expect one another find each
    other."""
    if any(not 0 <= rank < len(b.world.arrays) for rank in ranks):
        raise EmulationError(f"a team of ranks {ranks}, of which some are not there")
    return tuple(sorted(ranks))


def _barrier_among(b: Block, m: Any, team: Any, executors: Any, site: Any, ranks: tuple[int, ...]) -> None:
    each = b.world.blocks * scalar(executors, m)
    b.world.meet(b, _one(m, "a barrier"), ("device", ranks), each * len(ranks))


def _team_sync_among(b: Block, m: Any, team: Any, site: Any, ranks: tuple[int, ...]) -> None:
    b.world.meet(b, _one(m, "a meeting of ranks"), ("team", b.task.block, ranks), len(ranks))


def _no_counter(b: Block, m: Any, team: Any, site: Any) -> None:
    raise EmulationError("an index of a signal lies outside")


# ---- packets: 64-bit words, each whole, whose order says nothing


def _launch_of_packets(b: Block, m: Any, box: Pointer) -> Any:
    rank, name = b.world.place(b.task, box.memory)
    return np.full(m.shape, (int(b.world.arrays[rank][name][0]) >> SHIFT) + 1, np.int32)


def _count_packets(b: Block, m: Any, box: Pointer) -> None:
    _one(m, "a block that ends")
    rank, name = b.world.place(b.task, box.memory)
    blocks = b.world.blocks
    b.world.until(lambda: True)  # others may come first
    b.world.arrays[rank][name][0] += 1 if b.task.block else (1 << SHIFT) - (blocks - 1)


def _put_packet(b: Block, m: Any, to: Pointer, data: Any, number: Any) -> None:
    rank, name = b.world.place(b.task, to.memory)
    words = b.world.arrays[rank][name].view(np.uint64)
    at, value, mark = (np.broadcast_to(x, m.shape) for x in (to.index, data, number))
    b.world.until(lambda: True)  # others may come first
    for thread in np.flatnonzero(m):
        high = np.uint64(int(mark[thread]) << SHIFT)
        for k, part in enumerate(value[thread : thread + 1].astype(np.int64).view(np.uint32)):
            word = int(at[thread]) + k
            if words[word] >> np.uint64(SHIFT) == high >> np.uint64(SHIFT):
                raise EmulationError(f"word {word} of {name} of rank {rank} is put twice in one launch")
            words[word] = high | np.uint64(part)


def _get_packet(b: Block, m: Any, team: Any, at: Pointer, number: Any, site: Any) -> Any:
    rank, name = b.world.place(b.task, at.memory)
    words = b.world.arrays[rank][name].view(np.uint64)
    index, mark = (np.broadcast_to(x, m.shape)[m].astype(np.int64) for x in (at.index, number))
    both = np.stack([index, index + 1], -1)
    b.world.until(lambda: bool((words[both] >> np.uint64(SHIFT) == mark[:, None].astype(np.uint64)).all()))
    out = np.zeros(m.shape, np.int64)
    out[m] = np.ascontiguousarray(words[both].astype(np.uint32)).view(np.int64)[:, 0]
    return out


def _look_for_packet(b: Block, m: Any, at: Pointer, number: Any, late: Pointer) -> Any:
    rank, name = b.world.place(b.task, at.memory)
    words, lanes = b.world.arrays[rank][name].view(np.uint64), np.flatnonzero(m)
    index, mark = (np.broadcast_to(x, m.shape)[lanes].astype(np.int64) for x in (at.index, number))
    both = np.stack([index, index + 1], -1)

    def there() -> Any:
        return (words[both] >> np.uint64(SHIFT) == mark[:, None].astype(np.uint64)).all(-1)

    if not (came := there()).all():
        late.memory.data[lanes[~came], np.broadcast_to(late.index, m.shape)[lanes[~came]]] = 1
        b.task.late.append(lambda: bool(there().all()))
    out = np.zeros(m.shape, np.int64)
    out[lanes] = np.ascontiguousarray(words[both].astype(np.uint32)).view(np.int64)[:, 0]
    return out


def _put_dense(b: Block, m: Any, to: Pointer, *data: Any) -> None:
    """Neighbours, each into an empty place."""
    rank, name = b.world.place(b.task, to.memory)
    words, at = b.world.arrays[rank][name], np.broadcast_to(to.index, m.shape)
    for k, given in enumerate(data):
        b.world.until(lambda: True)  # others may come first
        value = ~np.broadcast_to(given, m.shape).astype(np.int64)
        for thread in np.flatnonzero(m):
            word = int(at[thread]) + k
            if words[word] != EMPTY:
                raise EmulationError(f"word {word} of {name} of rank {rank} is put where a packet lies")
            words[word] = value[thread] or 1


def _seen_dense(b: Block, m: Any, at: Pointer, late: Pointer, count: int) -> Any:
    """What lies in so many neighbours, (thread, neighbour), and whether any is late."""
    rank, name = b.world.place(b.task, at.memory)
    words, lanes = b.world.arrays[rank][name], np.flatnonzero(m)
    index = np.broadcast_to(at.index, m.shape)[lanes].astype(np.int64)[:, None] + np.arange(count)

    def there() -> Any:
        return (words[index] != EMPTY).all(-1)

    if not (came := there()).all():
        late.memory.data[lanes[~came], np.broadcast_to(late.index, m.shape)[lanes[~came]]] = 1
        b.task.late.append(lambda: bool(there().all()))
    return ~words[index]


def _look_for_dense(b: Block, m: Any, at: Pointer, late: Pointer) -> Any:
    out = np.zeros(m.shape, np.int64)
    out[m] = _seen_dense(b, m, at, late, 1)[:, 0]
    return out


def _look_for_two_dense(b: Block, m: Any, at: Pointer, late: Pointer, data: Pointer) -> None:
    seen, lanes = _seen_dense(b, m, at, late, 2), np.flatnonzero(m)
    for k in range(2):
        data.memory.data[lanes, np.broadcast_to(data.index, m.shape)[lanes] + k] = seen[:, k]


def _empty_dense(count: int) -> Callable[..., None]:
    def run(b: Block, m: Any, at: Pointer) -> None:
        rank, name = b.world.place(b.task, at.memory)
        index = np.broadcast_to(at.index, m.shape)[m].astype(np.int64)[:, None] + np.arange(count)
        b.world.until(lambda: True)  # others may come first
        words = b.world.arrays[rank][name]
        if (words[index] == EMPTY).any():
            raise EmulationError(f"{name} of rank {rank}: a place is emptied that is empty")
        words[index] = EMPTY

    return run


def _await_packets(b: Block, m: Any, team: Any, late: Pointer, since: Pointer, number: Any, site: Any) -> Any:
    """Whether to look again; what has not come is awaited here, so that nobody looks in vain for ever."""
    lanes = np.flatnonzero(m)
    index = np.broadcast_to(late.index, m.shape)[lanes]
    out = np.zeros(m.shape, bool)
    out[lanes] = late.memory.data[lanes, index] != 0
    late.memory.data[lanes, index] = 0
    awaited, b.task.late = b.task.late, []
    b.world.until(lambda: all(there() for there in awaited))
    return out


def _begin_launch(b: Block, m: Any, team: Any, thread: Any) -> None:
    """A rank has entered when its first block has begun."""
    if b.world is not None and b.task.block == 0:
        b.world.entered.add(b.task.rank)


def _end_launch(b: Block, m: Any, team: Any, thread: Any) -> None:
    """Flags at a launch's end are not run: counters are left as they are then. (What launches that are
    ``awaited`` promise instead is judged by the simulator, sim/awaited.py.)"""
    if b.world is not None and b.task.flights:
        raise EmulationError(nvshmem.LEFT)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    **nvshmem.FUNCTIONS,
    "ts::begin_launch": _begin_launch,
    "ts::end_launch": _end_launch,
    "ts::peer": _address(await_entry),
    "ts::twin": _address(require_entry),
    "ts::team_sync": _team_sync,
    "ts::team_sync_among": _team_sync_among,
    "ts::barrier_among": _barrier_among,
    "ts::range_of_ranks": _range_of_ranks,
    "ts::list_of_ranks": _list_of_ranks,
    "ts::no_counter": _no_counter,
    "ts::launch_of_packets": _launch_of_packets,
    "ts::count_packets": _count_packets,
    "ts::put_packet": _put_packet,
    "ts::get_packet": _get_packet,
    "ts::look_for_packet": _look_for_packet,
    "ts::await_packets": _await_packets,
    "ts::put_dense": _put_dense,
    "ts::put_two_dense": _put_dense,
    "ts::look_for_dense": _look_for_dense,
    "ts::look_for_two_dense": _look_for_two_dense,
    "ts::empty_dense": _empty_dense(1),
    "ts::empty_two_dense": _empty_dense(2),
    "ts::barrier<true>": _barrier(True),
    "ts::barrier<false>": _barrier(False),
    **{f"ts::signal_{op}<{scope}>": _signal(op) for op in OPS for scope in ("true", "false")},
    **{f"ts::system_{kind}": _system(kind) for kind in KINDS},
    **{f"ts::wait<{scope}>": _wait for scope in ("true", "false")},
    **{f"ts::test<{scope}>": _test for scope in ("true", "false")},
}
