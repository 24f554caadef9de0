"""NVSHMEM's device calls on the emulated GPU (compiler/cuda/include/ts/nvshmem.cuh), as late as the library
may be: a put reads its source and writes its destination at any time up to the quiet of the thread that
issued it (or a quiet of all threads, in whatever warp the library issued it). Nobody knows of what it wrote
before that quiet, so a release without one leaves a race, which the records of who touched what find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilescale.compiler.emulator.copies import EmulationError
from tilescale.compiler.emulator.memory import Block, Memory, Pointer, load

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


def _scratch(b: Block, m: Any, team: Any, like: Pointer, size: Any, site: Any) -> Pointer:
    data = like.memory.data
    room = int(np.unique(np.broadcast_to(size, m.shape)[m])[0])
    count = room // data.dtype.itemsize
    key = (str(data.dtype), count)
    if b.task.flights:
        raise EmulationError(
            "scratch is used again while a put by NVSHMEM is under way: no quiet completes it"
        )
    if key not in b.task.scratch:
        b.task.scratch[key] = Memory("scratch", np.zeros(count, data.dtype), count)
    return Pointer(b.task.scratch[key], np.zeros(m.shape, np.int64))


def _cells(m: Any, pointer: Pointer, size: Any, lanes: Any) -> Any:
    """The elements of a row that a warp moves, the same for all its lanes."""
    first = np.unique(np.broadcast_to(pointer.index, m.shape)[lanes])
    length = np.unique(np.broadcast_to(size, m.shape)[lanes])
    if len(first) != 1 or len(length) != 1:
        raise EmulationError("lanes of a warp name different rows of a put or a get")
    return int(first[0]) + np.arange(max(0, int(length[0]) // pointer.memory.data.dtype.itemsize))


def _warp(b: Block, m: Any, row: Any, thread: Any, threads: Any) -> Any:
    """The lanes of the warp that a row belongs to; all threads of the executor come."""
    number = np.broadcast_to(thread, m.shape)
    total, at = (int(np.unique(np.broadcast_to(x, m.shape)[m])[0]) for x in (threads, row))
    if not np.array_equal(np.sort(number[m]), np.arange(total)):
        raise EmulationError(f"a put or a get by {total} threads is made by {int(m.sum())}")
    return np.flatnonzero(m & (number // b.wave == at % (total // b.wave)))


def _put(b: Block, m: Any, to: Pointer, frm: Pointer, size: Any, row: Any, thread: Any, threads: Any) -> None:
    lanes = _warp(b, m, row, thread, threads)
    there, here = _cells(m, to, size, lanes), _cells(m, frm, size, lanes)
    issuer, task, world = int(lanes[0]), b.task, b.world
    some = np.zeros(m.shape, bool)
    some[issuer] = True
    for cell in here:  # what the block's threads stored there and did not meet behind is a race
        load(b, some, frm.memory, np.full(m.shape, cell), 1)
    rank, name = world.place(task, to.memory)
    target = world.arrays[rank][name]

    def arrive() -> None:
        target[there] = frm.memory.data[here]

    put = Put(issuer, arrive, world.stored(b, issuer, to.memory, there))
    task.flights.append(put)
    world.interleaving.loads.append(put)
    world.until(lambda: True)  # it may be there at once, or late


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
    lanes = _warp(b, m, row, thread, threads)
    here, there = _cells(m, to, size, lanes), _cells(m, frm, size, lanes)
    issuer, world = int(lanes[0]), b.world
    world.until(lambda: True)
    world.touched(b, frm.memory, there, issuer, writes=False)
    rank, name = world.place(b.task, frm.memory)
    to.memory.data[here] = world.arrays[rank][name][there]


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "ts::scratch": _scratch,
    "ts::nvshmem_put": _put,
    "ts::nvshmem_get": _get,
    "ts::nvshmem_quiet": _quiet,
    "ts::nvshmem_staged": lambda b, m: None,
}
