"""The memory and registers of an emulated block, and who touched what: `emulate` looks for races by it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilescale.compiler.cuda.engines import EmulationError
from tilescale.compiler.ir.scales import WARP, WARPGROUP
from tilescale.compiler.sim import numerics

#: readers of a cell: several threads of more than one block (-2 - n: of block n alone)
OF_SEVERAL = -(1 << 20)


class Memory:
    """A flat array of elements, and who touched each *cell* (a byte of shared memory, an element of global memory) when."""

    def __init__(self, name: str, data: Any, cells: int):
        self.name, self.data, self.cells = name, data, cells
        self.clear()

    def clear(self) -> None:
        """A new block begins."""
        self.writer = np.full(self.cells, -1, np.int64)
        self.reader = np.full(self.cells, -1, np.int64)  # below -1: several
        self.written = np.zeros((self.cells, 5), np.int64)
        self.read = np.zeros((self.cells, 5), np.int64)
        #: where clocks are kept: when each warp read it last
        self.by_warp: Any = None
        #: the thread whose write the asynchronous proxy does not see yet
        self.unfenced = np.full(self.cells, -1, np.int64)
        #: (cell, warp): read by threads of the warp, which have not made a proxy fence since; made where somebody asks
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
        self.data = arena.data[offset : offset + (len(arena.data) - offset) // self.size * self.size].view(numerics.storage(dtype))


class Clocks:
    """What each thread of a cluster knows of each other's accesses, where threads order them by more than meetings: vector clocks. A time
    counts releases and meetings of the whole cluster."""

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
        """Whether all that warps did until the times ``then``, (…, warps), 0: nothing, comes before what ``who`` does."""
        least = np.minimum.reduceat(self.known, np.arange(0, len(self.time), WARP), axis=1)
        return ((then == 0) | (least[who] >= then)).all(-1)


@dataclass
class Block:
    """One block that runs. ``everyone``: (threads of the cluster, 5), how often the thread's block, its warpgroup, its warp and its cluster
    have met, and its time; this block's threads begin at ``first``. ``split``: its warps run each on its own."""

    threads: int
    values: dict[Any, Any]
    memory: dict[Any, Any]
    everyone: Any
    first: int
    draw: Any
    engines: Any
    clocks: Clocks | None = None
    split: bool = False
    #: the threads that have not awaited the launches in front yet; None where there are none
    early: Any = None
    failed: list[int] = field(default_factory=list)
    #: where several blocks run in turns: all ranks, and which block this is (`emulate_ranks`)
    world: Any = None
    task: Any = None

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
        if self.world is not None:
            self.world.touched(self, mem, cells, who, writes)
        who = who + self.first
        last = mem.writer[cells]
        bad = (last >= 0) & (last != who) & ~self.ordered(last, who, mem.written[cells])
        self._refuse(bad, mem, cells, last, who, "writes")
        if writes:
            last, then = mem.reader[cells], mem.read[cells]
            bad = ((last >= 0) & (last != who) & ~self.ordered(last, who, then)) | ((last < -1) & ~self._before(mem, cells, last, who))
            self._refuse(bad, mem, cells, last, who, "reads")
            mem.writer[cells], mem.written[cells] = who, self.everyone[who]
            mem.unfenced[cells] = who
            again = mem.writer[cells]
            self._refuse(again != who, mem, cells, again, who, "also writes")
        else:
            last, own = mem.reader[cells], -2 - self.first // self.threads
            alone = (last == -1) | (last == who) | self._before(mem, cells, last, who)
            several = np.where(np.where(last >= 0, -2 - last // self.threads, last) == own, own, OF_SEVERAL)
            mem.reader[cells] = np.where(alone, who, several)
            np.putmask(again := mem.reader[cells], (again != who) & (again >= 0), own)
            mem.reader[cells] = again
            mem.read[cells] = self.everyone[who]
            if self.clocks is not None:
                mem.times(-(-len(self.everyone) // WARP))[cells, who // WARP] = self.everyone[who, 4]

    def _before(self, mem: Memory, cells: Any, last: Any, who: Any) -> Any:
        """Whether all who read a cell have met this block's threads since, or ``who`` knows of it."""
        then = mem.read[cells]
        now, own = self.everyone[self.first], self.first // self.threads
        block = np.where(last >= 0, last // self.threads, -2 - last)
        met = (then[..., 3] != now[3]) | ((block == own) & (then[..., 0] != now[0]))
        return met if self.clocks is None else met | self.clocks.before(who, mem.times(-(-len(self.everyone) // WARP))[cells])

    def ordered(self, first: Any, second: Any, then: Any) -> Any:
        """Whether thread ``second`` has met ``first`` since the stamps ``then``."""
        now = self.everyone[second]
        same_block = first // self.threads == second // self.threads
        same_group, same_warp = first // WARPGROUP == second // WARPGROUP, first // WARP == second // WARP
        met = (same_block & (then[..., 0] != now[..., 0])) | (then[..., 3] != now[..., 3])
        met = met | (same_group & (then[..., 1] != now[..., 1])) | (same_warp & (then[..., 2] != now[..., 2]))
        return met if self.clocks is None else met | (self.clocks.known[second, first] >= then[..., 4])

    def _refuse(self, bad: Any, mem: Memory, cells: Any, first: Any, second: Any, verb: str) -> None:
        if bad.any():
            at = tuple(np.argwhere(bad)[0])
            a, b, c = (np.broadcast_to(x, bad.shape)[at] for x in (first, second, cells))
            raise EmulationError(f"race in {mem.name} at {c}: thread {a} {verb} it, thread {b} touches it, and they have not met")


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


def load(b: Block, m: Any, mem: Any, index: Any, lanes: int) -> Any:
    """Elements as they lie in memory, (threads,) or (threads, lanes); zero where a lane does not run."""
    index = np.broadcast_to(index, m.shape)
    who = np.flatnonzero(m)
    at = index[who][:, None] + np.arange(lanes)
    out = np.zeros((len(m), lanes), mem.data.dtype)
    if len(who):
        inside(mem, at, lanes)
        if isinstance(mem, Registers):
            out[who] = mem.data[who[:, None], at]
        else:
            touched(b, mem, at, who, False)
            out[who] = mem.data[at]
    return out[:, 0] if lanes == 1 else out


def store(b: Block, m: Any, mem: Any, index: Any, value: Any, lanes: int) -> None:
    index = np.broadcast_to(index, m.shape)
    who = np.flatnonzero(m)
    at = index[who][:, None] + np.arange(lanes)
    if not len(who):
        return
    inside(mem, at, lanes)
    made = (value[:, None] if lanes == 1 else value)[who]
    if isinstance(mem, Registers):
        mem.data[who[:, None], at] = made
    else:
        touched(b, mem, at, who, True)
        mem.data[at] = made


def inside(mem: Any, at: Any, lanes: int) -> None:
    size = mem.data.shape[-1]
    if at.min() < 0 or at.max() >= size:
        raise EmulationError(f"{mem.name}: an access at {at.min()}…{at.max()} of {size} elements")
    if lanes > 1 and not isinstance(mem, Registers) and (at[:, 0] % lanes).any():
        raise EmulationError(f"{mem.name}: a vector of {lanes} elements that is not aligned")


def touched(b: Block, mem: Any, at: Any, who: Any, writes: bool) -> None:
    if not isinstance(mem, Tile):
        b.late_enough(who)
    if isinstance(mem, Tile):
        cells = mem.offset + at[:, :, None] * mem.size + np.arange(mem.size)
        b.engines.copies.touched(cells)
        if writes:
            for other in b.engines.cluster:
                if other.arena is mem.arena:
                    other.overwritten(cells)
        if any(np.intersect1d(cells, p.cells).size for other in b.engines.cluster for p in other.coming if p.engines.arena is mem.arena):
            raise EmulationError("shared memory is touched while a copy into it is under way")
        b.touch(mem.arena, cells, np.broadcast_to(who[:, None, None], cells.shape), writes)
        if not writes:
            if mem.arena.looked is None:
                mem.arena.looked = np.zeros((mem.arena.cells, -(-len(b.everyone) // WARP)), bool)
            mem.arena.looked[cells, (who[:, None, None] + b.first) // WARP] = True
    else:
        b.touch(mem, at, np.broadcast_to(who[:, None], at.shape), writes)
