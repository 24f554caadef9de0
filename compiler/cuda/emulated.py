"""The memory and registers of an emulated block, and who touched what: `emulate` looks for races by it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilescale.compiler.cuda.engines import EmulationError
from tilescale.compiler.sim import numerics

WARP, WARPGROUP = 32, 128

class Memory:
    """A flat array of elements, and who touched each *cell* (a byte of shared memory, an element of global memory) when."""

    def __init__(self, name: str, data: Any, cells: int):
        self.name, self.data, self.cells = name, data, cells
        self.clear()

    def clear(self) -> None:
        """A new block begins."""
        self.writer = np.full(self.cells, -1, np.int64)
        self.reader = np.full(self.cells, -1, np.int64)  # -2: several
        self.written = np.zeros((self.cells, 3), np.int64)
        self.read = np.zeros((self.cells, 3), np.int64)
        #: the thread whose write the asynchronous proxy does not see yet
        self.unfenced = np.full(self.cells, -1, np.int64)


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


@dataclass
class Block:
    """One block that runs."""

    threads: int
    values: dict[Any, Any]
    memory: dict[Any, Any]
    stamps: Any  # (threads, 3): how often the block, the thread's warpgroup and its warp have met
    draw: Any
    engines: Any
    failed: list[int] = field(default_factory=list)
    #: where several blocks run in turns: all ranks, and which block this is (`emulate_ranks`)
    world: Any = None
    task: Any = None

    def touch(self, mem: Memory, cells: Any, who: Any, writes: bool) -> None:
        """Records accesses of threads ``who`` to ``cells`` (same shape), and looks for races."""
        if self.world is not None:
            self.world.touched(self, mem, cells, who, writes)
        last = mem.writer[cells]
        bad = (last >= 0) & (last != who) & ~self._ordered(last, who, mem.written[cells])
        self._refuse(bad, mem, cells, last, who, "writes")
        if writes:
            last = mem.reader[cells]
            met = self._ordered(last, who, mem.read[cells])
            bad = ((last >= 0) & (last != who) & ~met) | ((last == -2) & (mem.read[cells][..., 0] == self.stamps[0, 0]))
            self._refuse(bad, mem, cells, last, who, "reads")
            mem.writer[cells], mem.written[cells] = who, self.stamps[who]
            mem.unfenced[cells] = who
            again = mem.writer[cells]
            self._refuse(again != who, mem, cells, again, who, "also writes")
        else:
            last = mem.reader[cells]
            fresh = mem.read[cells][..., 0] != self.stamps[0, 0]
            mem.reader[cells] = np.where((last == -1) | fresh | (last == who), who, -2)
            np.putmask(again := mem.reader[cells], again != who, -2)
            mem.reader[cells] = again
            mem.read[cells] = self.stamps[who]

    def _ordered(self, first: Any, second: Any, then: Any) -> Any:
        """Whether thread ``second`` has met ``first`` since the stamps ``then``."""
        now = self.stamps[second]
        same_group, same_warp = first // WARPGROUP == second // WARPGROUP, first // WARP == second // WARP
        met = (then[..., 0] != now[..., 0]) | (same_group & (then[..., 1] != now[..., 1])) | (same_warp & (then[..., 2] != now[..., 2]))
        return met

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
    if isinstance(mem, Tile):
        cells = mem.offset + at[:, :, None] * mem.size + np.arange(mem.size)
        b.engines.copies.touched(cells)
        b.touch(mem.arena, cells, np.broadcast_to(who[:, None, None], cells.shape), writes)
    else:
        b.touch(mem, at, np.broadcast_to(who[:, None], at.shape), writes)
