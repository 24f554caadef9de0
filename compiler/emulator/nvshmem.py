"""NVSHMEM's device calls on the emulated GPU (compiler/cuda/include/ts/nvshmem.cuh), as late as the library
may be: a put reads its source and writes its destination at any time up to the quiet of the thread that
issued it (or a quiet of all threads, in whatever warp the library issued it). Nobody knows of what it wrote
before that quiet, so a release without one leaves a race, which the records of who touched what find."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilescale.compiler.emulator.copies import EmulationError
from tilescale.compiler.emulator.memory import Block, Memory, Pointer, Several, inside, touched

LEFT = "a put by NVSHMEM is under way when its block ends: no quiet completes it"


@dataclass(eq=False)
class Put:
    """Elements on their way. ``done``: notes that they are there, for whom the thread tells."""

    thread: int
    arrive_: Callable[[], None]
    done: Callable[[], None]
    arrived: bool = False
    units: None = None  # it is no block's asynchronous unit, as others under way are

    def arrive(self) -> None:
        if not self.arrived:
            self.arrived = True
            self.arrive_()


def _scratch(b: Block, m: Any, team: Any, like: Pointer, size: Any, first: Any, site: Any) -> Pointer:
    """Each executor's part of what the block has. One that a put reads, which no quiet has completed, is not
    asked for again."""
    data = like.memory.data
    room = int(np.unique(np.broadcast_to(size, m.shape)[m])[0]) // data.dtype.itemsize
    begins = np.where(m, np.broadcast_to(first, m.shape) // data.dtype.itemsize, 0)
    if any(m[put.thread] for put in b.task.flights):
        raise EmulationError(
            "scratch is used again while a put by NVSHMEM is under way: no quiet completes it"
        )
    views = {}
    for begin in np.unique(begins[m]).tolist():
        key = (str(data.dtype), begin)
        if key not in b.task.scratch:
            b.task.scratch[key] = Memory("scratch", np.zeros(room, data.dtype), room)
        views[begin] = b.task.scratch[key]
    memory: Any = next(iter(views.values())) if len(views) == 1 else Several(begins, views)
    return Pointer(memory, np.zeros(m.shape, np.int64))


def _own(memory: Any, lanes: Any) -> Memory:
    """The memory that the lanes of a warp mean."""
    return memory.of_thread(int(lanes[0])) if isinstance(memory, Several) else memory


def _cells(m: Any, pointer: Pointer, size: Any, lanes: Any) -> Any:
    """The elements of a row that a warp moves, the same for all its lanes."""
    first = np.unique(np.broadcast_to(pointer.index, m.shape)[lanes])
    length = np.unique(np.broadcast_to(size, m.shape)[lanes])
    if len(first) != 1 or len(length) != 1:
        raise EmulationError("lanes of a warp name different rows of a put or a get")
    each = _own(pointer.memory, lanes).data.dtype.itemsize
    return int(first[0]) + np.arange(max(0, int(length[0]) // each))


def _movers(b: Block, m: Any, row: Any, thread: Any, threads: Any) -> Iterator[Any]:
    """Of each executor that comes the lanes of the warp that a row belongs to; all threads of it come."""
    number, at = np.broadcast_to(thread, m.shape), np.broadcast_to(row, m.shape)
    total = int(np.unique(np.broadcast_to(threads, m.shape)[m])[0])
    for begin in range(0, len(m), total):
        mine = np.zeros(m.shape, bool)
        mine[begin : begin + total] = m[begin : begin + total]
        if not mine.any():
            continue
        if not np.array_equal(number[mine], np.arange(total)):
            raise EmulationError(f"a put or a get by {total} threads is made by {int(mine.sum())}")
        warps = max(1, total // b.wave)
        yield np.flatnonzero(mine & (number // b.wave == at % warps))


def _put(b: Block, m: Any, to: Pointer, frm: Pointer, size: Any, row: Any, thread: Any, threads: Any) -> None:
    task, world = b.task, b.world
    for lanes in _movers(b, m, row, thread, threads):
        there, here = _cells(m, to, size, lanes), _cells(m, frm, size, lanes)
        issuer = int(lanes[0])
        target, source = _own(to.memory, lanes), _own(frm.memory, lanes)
        if len(here):  # what the executor's threads stored there and did not meet behind is a race
            inside(source, int(here[0]), int(here[-1]), 1)
            touched(b, source, here[:1], here[None], np.array([issuer]), writes=False)
        rank, name = world.place(task, target)
        arrive = functools.partial(_moved, world.arrays[rank][name], there, source.data, here)
        put = Put(issuer, arrive, world.stored(b, issuer, target, there))
        task.flights.append(put)
        world.interleaving.loads.append(put)
    world.until(lambda: True)  # they may be there at once, or late


def _moved(target: Any, there: Any, source: Any, here: Any) -> None:
    target[there] = source[here]


def _quiet(b: Block, m: Any) -> None:
    """Of each of these threads: completes what its warp issued where all of the warp come."""
    mine = [p for p in b.task.flights if m[p.thread]]
    for put in mine:
        put.arrive()
        put.done()
        b.task.flights.remove(put)
        if put in b.world.interleaving.loads:
            b.world.interleaving.loads.remove(put)


def _get(b: Block, m: Any, to: Pointer, frm: Pointer, size: Any, row: Any, thread: Any, threads: Any) -> None:
    world = b.world
    world.until(lambda: True)
    for lanes in _movers(b, m, row, thread, threads):
        here, there = _cells(m, to, size, lanes), _cells(m, frm, size, lanes)
        target, source = _own(to.memory, lanes), _own(frm.memory, lanes)
        rank, name = world.place(b.task, source)
        world.touched(b, source, there, int(lanes[0]), writes=False)
        target.data[here] = world.arrays[rank][name][there]


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "ts::scratch": _scratch,
    "ts::nvshmem_put": _put,
    "ts::nvshmem_get": _get,
    "ts::nvshmem_quiet": _quiet,
    "ts::nvshmem_staged": lambda b, m: None,
}
