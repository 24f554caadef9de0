"""The memory and registers of an emulated block, and who touched what: the emulator looks for races by it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilescale.compiler.emulator.copies import EmulationError
from tilescale.compiler.ir.scales import WARP, WARPGROUP
from tilescale.compiler.sim import numerics

#: readers of a cell: several threads of more than one block
OF_SEVERAL = -(1 << 20)
#: those of one unit (`Block._units`) are -2 - unit * UNIT - its number
UNIT = 1 << 16


class Memory:
    """A flat array of elements, and who touched each *cell* (a byte of shared memory, an element of global
    memory) when."""

    def __init__(self, name: str, data: Any, cells: int):
        self.name, self.data, self.cells = name, data, cells
        #: whether engines write here by themselves, and must know who looked (``looked``)
        self.watched = False
        self.clear()

    def clear(self) -> None:
        """A new block begins."""
        self.writer = np.full(self.cells, -1, np.int32)
        self.reader = np.full(self.cells, -1, np.int32)  # below -1: several
        #: the moments (`Moments`) of the last write and of the last read
        self.written = np.zeros(self.cells, np.int32)
        self.read = np.zeros(self.cells, np.int32)
        #: where clocks are kept: when each warp read it last
        self.by_warp: Any = None
        #: the thread whose write the asynchronous proxy does not see yet
        self.unfenced = np.full(self.cells, -1, np.int32)
        #: the warpgroups, as bits, that have made a proxy fence behind a write that they have met
        self.seen = np.zeros(self.cells, np.uint32)
        #: (warp, cell): read by threads of the warp, which have not made a proxy fence since
        self.looked: Any = None

    def times(self, warps: int) -> Any:
        """When each warp read each cell last; 0: never."""
        if self.by_warp is None:
            self.by_warp = np.zeros((self.cells, warps), np.int64)
        return self.by_warp


@dataclass
class Pointer:
    """An address: memory (or a thread's registers) and an index for each lane."""

    memory: Any
    index: Any


class Registers:
    """An array of each thread's registers, (threads, extent)."""

    def __init__(self, name: str, data: Any):
        self.name, self.data = name, data


class Tile:
    """A typed window of the arena."""

    def __init__(self, name: str, arena: Memory, offset: int, dtype: str):
        self.name, self.arena, self.offset = name, arena, offset
        self.size = np.dtype(numerics.storage(dtype)).itemsize
        self.data = arena.data[offset : offset + (len(arena.data) - offset) // self.size * self.size].view(
            numerics.storage(dtype)
        )


class Several:
    """Memory that warps name each for itself: twins of one tensor on several ranks."""

    def __init__(self, of: Any, memories: dict[int, Memory]):
        self.of, self.memories = of, memories

    def parts(self, m: Any) -> list[tuple[Any, Memory]]:
        """Which of the threads ``m`` mean which memory."""
        found = [(m & (self.of == key), memory) for key, memory in self.memories.items()]
        return [(who, memory) for who, memory in found if who.any()]

    def of_thread(self, thread: int) -> Memory:
        return self.memories[int(self.of[thread])]


class Moments:
    """The stamps that accesses were made at. ``everyone``: (threads of the cluster, 5), how often the
    thread's block, its warpgroup, its warp and its cluster have met, and its time. Threads that have met are
    often at the same stamps: a cell remembers their number, a moment, not the five of them."""

    def __init__(self, everyone: Any):
        self.everyone = everyone
        self.known = np.full_like(everyone, -1)
        self.count = 0
        #: (5, moments): one of the five of many moments is what is asked for
        self.stamps = np.zeros((5, 64), np.int64)
        self.of = np.zeros(len(everyone), np.int32)

    def now(self) -> Any:
        """The moment of each thread of the cluster."""
        if not np.array_equal(self.known, self.everyone):
            self.known = self.everyone.copy()
            # Neighbours are mostly at the same stamps.
            begins = np.append(True, (self.known[1:] != self.known[:-1]).any(1))
            self.of = (self.count - 1 + begins.cumsum()).astype(np.int32)
            first, self.count = self.count, self.count + int(begins.sum())
            if self.count > self.stamps.shape[1]:
                self.stamps = np.concatenate([self.stamps, np.zeros((5, self.count), np.int64)], axis=1)
            self.stamps[:, first : self.count] = self.known[begins].T
        return self.of


class Clocks:
    """What each thread of a cluster knows of each other's accesses, where threads order them by more than
    meetings: vector clocks. A time counts releases and meetings of the whole cluster."""

    OWN = 1 << 60

    def __init__(self, time: Any):
        self.time, self.now = time, 1
        self.known = np.zeros((len(time), len(time)), np.int64)
        np.fill_diagonal(self.known, self.OWN)
        time[:] = 1

    def release(self, who: Any) -> Any:
        """What threads that do the same at once hand on; what they do behind it is later."""
        made = self.known[who].max(0)
        made[who] = self.time[who]
        self.now += 1
        self.time[who] = self.now
        return made

    def acquire(self, who: Any, handed: Any) -> None:
        self.known[who] = np.maximum(self.known[who], handed)

    def meet(self, who: Any) -> None:
        self.acquire(who, self.release(who))

    def before(self, who: Any, then: Any) -> Any:
        """Whether all that warps did until the times ``then``, (…, warps), 0: nothing, comes before what
        ``who`` does."""
        least = np.minimum.reduceat(self.known, np.arange(0, len(self.time), WARP), axis=1)
        return ((then == 0) | (least[who] >= then)).all(-1)


@dataclass
class Block:
    """One block that runs. ``moments``: of all threads of the cluster; this block's begin at ``first``.
    ``split``: its warps run each on its own."""

    threads: int
    #: by the variable's number (`Emulator.number`)
    values: dict[int, Any]
    memory: dict[int, Any]
    moments: Moments
    first: int
    draw: Any
    units: Any
    clocks: Clocks | None = None
    split: bool = False
    #: whether the author's barriers order copies into other blocks, and no ring's
    by_hand: bool = False
    #: the threads that have not awaited the launches in front yet; None where there are none
    early: Any = None
    failed: list[int] = field(default_factory=list)
    #: threads that run in step and give each other values
    wave: int = WARP
    #: where several blocks run in turns: all ranks, and which block this is (`ranks`)
    world: Any = None
    task: Any = None
    #: who of it this is, by whether it has a producer (`ranks.THREADS` and so on)
    actor: int = 0

    @property
    def everyone(self) -> Any:
        """The stamps of all threads of the cluster."""
        return self.moments.everyone

    @property
    def stamps(self) -> Any:
        """Those of this block's threads."""
        return self.everyone[self.first : self.first + self.threads]

    def late_enough(self, who: Any) -> None:
        """Threads touch global memory."""
        if self.early is not None and self.early[who].any():
            raise EmulationError("a tensor is touched before the launches in front have been awaited")

    def met(self, lanes: Any, column: int) -> None:
        """Threads have met."""
        self.stamps[lanes, column] += 1
        if self.clocks is not None:
            self.clocks.meet(np.flatnonzero(lanes) + self.first)

    def touch(self, mem: Memory, cells: Any, who: Any, writes: bool) -> None:
        """Records accesses of threads ``who`` to ``cells`` (same shape), and looks for races."""
        cells, who = np.ravel(cells), np.ravel(who)
        if self.world is not None:
            self.world.touched(self, mem, cells, who, writes)
        who = who + self.first
        now = self.moments.now()[who]
        last = mem.writer[cells]
        self._refuse(self._unordered(last, who, mem.written, cells), mem, cells, last, who, "writes")
        if writes:
            last = mem.reader[cells]
            bad = self._unordered(last, who, mem.read, cells)
            several = np.flatnonzero(last < -1)
            if len(several):
                several = several[~self._before(mem, cells[several], last[several], who[several])]
                bad = np.sort(np.concatenate([bad, several]))
            self._refuse(bad, mem, cells, last, who, "reads")
            mem.writer[cells], mem.written[cells] = who, now
            mem.unfenced[cells], mem.seen[cells] = who, 0
            again = mem.writer[cells]
            self._refuse(np.flatnonzero(again != who), mem, cells, again, who, "also writes")
        else:
            last, made = mem.reader[cells], who
            others = np.flatnonzero((last != -1) & (last != who))
            if len(others):
                others = others[~self._before(mem, cells[others], last[others], who[others])]
                made = who.copy()
                made[others] = self._several(last[others], who[others])
            mem.reader[cells], mem.read[cells] = made, now
            if self.clocks is not None:
                mem.times(-(-len(self.everyone) // WARP))[cells, who // WARP] = self.everyone[who, 4]

    def _units(self) -> list[tuple[int, int]]:
        """The parts of a block that may meet, the widest first: which of the stamps (`met`) counts it, and
        its threads."""
        return [
            (0, self.threads),
            *((unit, size) for unit, size in ((1, WARPGROUP), (2, WARP)) if size < self.threads),
        ]

    def _several(self, last: Any, who: Any) -> Any:
        """What stands for who has read a cell when ``who`` reads it behind ``last``: the narrowest unit that
        has them all."""
        made = np.full_like(who, OF_SEVERAL)
        for unit, size in self._units():
            made = np.where(self._unit_of(last, size) == who // size, -2 - unit * UNIT - who // size, made)
        return made

    def _unit_of(self, last: Any, size: int) -> Any:
        """The number of the unit of ``size`` threads that all lie in who have read a cell; -1 where there is
        none."""
        found = np.where(last >= 0, last // size, -1)
        for unit, inner in self._units():
            if inner <= size:
                number = -2 - unit * UNIT - last
                found = np.where((last < -1) & (number >= 0) & (number < UNIT), number * inner // size, found)
        return found

    def _unordered(self, first: Any, second: Any, moments: Any, cells: Any) -> Any:
        """Which accesses of threads ``second`` follow another thread's, ``first``, without a meeting of the
        two behind its moment."""
        others = np.flatnonzero((first >= 0) & (first != second))
        if not len(others):
            return others
        return others[~self.ordered(first[others], second[others], moments[cells[others]])]

    def _before(self, mem: Memory, cells: Any, last: Any, who: Any) -> Any:
        """Whether all who read a cell have met this block's threads since, or ``who`` knows of it."""
        then, stamps = mem.read[cells], self.moments.stamps
        met = stamps[3][then] != self.everyone[self.first][3]
        for unit, size in self._units():
            met |= (self._unit_of(last, size) == who // size) & (
                stamps[unit][then] != self.everyone[who, unit]
            )
        return (
            met
            if self.clocks is None
            else met | self.clocks.before(who, mem.times(-(-len(self.everyone) // WARP))[cells])
        )

    def ordered(self, first: Any, second: Any, then: Any) -> Any:
        """Whether thread ``second`` has met ``first`` since the moment ``then``."""
        now = self.moments.now()[second]
        stamps = self.moments.stamps  # with those of now
        met = (first // self.threads == second // self.threads) & (stamps[0][then] != stamps[0][now])
        if met.all():  # as a block, which most meetings are: nothing else need be looked at
            return met
        met |= stamps[3][then] != stamps[3][now]
        met |= (first // WARPGROUP == second // WARPGROUP) & (stamps[1][then] != stamps[1][now])
        met |= (first // WARP == second // WARP) & (stamps[2][then] != stamps[2][now])
        return met if self.clocks is None else met | (self.clocks.known[second, first] >= stamps[4][then])

    def _refuse(self, bad: Any, mem: Memory, cells: Any, first: Any, second: Any, verb: str) -> None:
        if len(bad):
            a, b, c = (x[bad[0]] for x in (first, second, cells))
            raise EmulationError(
                f"race in {mem.name} at {c}: thread {a} {verb} it, thread {b} touches it, and they have not "
                "met"
            )


def garbage(draw: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """What uninitialised memory might hold."""
    kind = numerics.storage(dtype)
    if dtype in numerics.FLOATS:
        return np.full(shape, np.nan, np.float64).astype(kind)
    return draw.integers(0, 2 if dtype == "bool" else 100, shape).astype(kind)


def encoded(value: Any, dtype: str) -> Any:
    return numerics.encode(np.asarray(value), dtype)


def decoded(stored: Any, dtype: str) -> Any:
    return numerics.decode(stored, dtype)


def spread(value: Any, m: Any) -> Any:
    """A value for each thread."""
    if getattr(value, "shape", None) == m.shape:
        return value
    one = np.asarray(value)
    if one.ndim or one.dtype.kind not in "biuf":
        return np.broadcast_to(value, m.shape)
    # np.broadcast_to of one number, which takes six times as long.
    made = np.ndarray(m.shape, one.dtype, one, 0, (0,) * m.ndim)
    made.flags.writeable = False
    return made


def load(b: Block, m: Any, mem: Any, index: Any, lanes: int) -> Any:
    """Elements as they lie in memory, (threads,) or (threads, lanes); zero where a lane does not run."""
    if isinstance(mem, Several):
        return sum(load(b, part, memory, index, lanes) for part, memory in mem.parts(m))
    who = np.flatnonzero(m)
    if len(who) == len(m):
        found = mem.data[_place(b, m, mem, index, who, lanes, False)]
        # A slice of registers would change with them.
        out = found.copy() if isinstance(mem, Registers) else found
    else:
        out = np.zeros((len(m), lanes), mem.data.dtype)
        if len(who):
            out[who] = mem.data[_place(b, m, mem, index, who, lanes, False)]
    return out[:, 0] if lanes == 1 else out


def store(b: Block, m: Any, mem: Any, index: Any, value: Any, lanes: int) -> None:
    if isinstance(mem, Several):
        for part, memory in mem.parts(m):
            store(b, part, memory, index, value, lanes)
        return
    who = np.flatnonzero(m)
    if len(who):
        made = value[:, None] if lanes == 1 else value
        mem.data[_place(b, m, mem, index, who, lanes, True)] = made if len(who) == len(m) else made[who]


def _place(b: Block, m: Any, mem: Any, index: Any, who: Any, lanes: int, writes: bool) -> Any:
    """What threads ``who`` access, which they may: (threads, lanes), as an index of the memory's elements or
    of the registers."""
    index = np.asarray(index)
    if isinstance(mem, Registers) and (
        index.size == 1 or index.strides == (0,)
    ):  # the same for all, as numbers of registers mostly are
        first = int(index.flat[0])
        inside(mem, first, first, lanes)
        return (slice(None) if len(who) == len(m) else who), slice(first, first + lanes)
    index = spread(index, m)[who]
    inside(mem, int(index.min()), int(index.max()), lanes)
    at = index[:, None] + np.arange(lanes)
    if isinstance(mem, Registers):
        return who[:, None], at
    if lanes > 1 and (index % lanes).any():
        raise EmulationError(f"{mem.name}: a vector of {lanes} elements that is not aligned")
    touched(b, mem, index, at, who, writes)
    return at


def inside(mem: Any, low: int, high: int, lanes: int) -> None:
    """Vectors of so many elements that begin at ``low`` to ``high``."""
    size = mem.data.shape[-1]
    if low < 0 or high + lanes > size:
        raise EmulationError(f"{mem.name}: an access at {low}…{high + lanes - 1} of {size} elements")


def touched(b: Block, mem: Any, index: Any, at: Any, who: Any, writes: bool) -> None:
    """Threads access elements ``at``, (threads, lanes), which begin at ``index``."""
    if not isinstance(mem, Tile):
        b.late_enough(who)
        b.touch(mem, at, np.repeat(who, at.shape[1]), writes)
        return
    bytes_ = at.shape[1] * mem.size
    cells = (mem.offset + index * mem.size)[:, None] + np.arange(bytes_)
    b.units.copies.touched(cells)
    for other in b.units.cluster:
        if writes and other.arena is mem.arena:
            other.overwritten(cells)
    b.touch(mem.arena, cells, np.repeat(who, bytes_), writes)
    if mem.arena.watched and not writes:
        if mem.arena.looked is None:
            mem.arena.looked = np.zeros((-(-len(b.everyone) // WARP), mem.arena.cells), bool)
        mem.arena.looked[(who[:, None] + b.first) // WARP, cells] = True
