"""Rows that go to another rank's memory: by a communicator's warps (include/ts/put.cuh), and by TMA
(include/ts/peer_rows.cuh)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilescale.compiler.emulator import async_units
from tilescale.compiler.emulator.copies import EmulationError
from tilescale.compiler.emulator.maps import Row
from tilescale.compiler.emulator.memory import Block, Pointer, Several, load, store
from tilescale.compiler.emulator.ranks import scalar
from tilescale.compiler.ir.scales import WARPGROUP

#: what the communicator does to other ranks' memory
PUTS = {"ts::put_run", "ts::put_rows", "ts::put_zeros"}


def _put_rows(width: int, threads: int, depth: int = 1) -> Callable[..., None]:
    """Rows to another rank, by threads of which each copies vectors, one after another whatever the depth."""

    def run(
        b: Block,
        m: Any,
        to: Pointer,
        from_: Pointer | None,
        rows: Any,
        count: Any,
        to_pitch: Any,
        from_pitch: Any,
        thread: Any,
    ) -> None:
        number = np.broadcast_to(thread, m.shape)
        if not np.array_equal(np.sort(number[m]), np.arange(threads)):
            raise EmulationError(f"a put by {threads} threads is made by {int(m.sum())}")
        down, along, *pitches = (scalar(x, m) for x in (rows, count, to_pitch, from_pitch))
        starts = [np.broadcast_to(p.index, m.shape) for p in (to, from_) if p is not None]
        if any(x % width for x in (along, *pitches, *(int(s[m][0]) for s in starts))):
            raise EmulationError(f"{to.memory.name}: rows of a put are no vectors of {width} elements")
        each = along // width
        for first in range(0, max(0, down) * max(0, each), threads):
            b.world.until(lambda: True)  # others may come in between
            k = first + number
            some = m & (k < down * each)
            row, place = k // each, k % each * width
            if from_ is None:
                held = np.zeros((len(m), width), to.memory.data.dtype)[:, slice(None) if width > 1 else 0]
            else:
                held = load(b, some, from_.memory, starts[1] + row * pitches[1] + place, width)
            store(b, some, to.memory, starts[0] + row * pitches[0] + place, held, width)

    return run


def _by_tma(threads: int, ends: str, adds: bool) -> Callable[..., None]:
    """Rows of shared memory that TMA stores in another rank's memory, or adds to it: each thread of an
    executor starts some and awaits them, as far as ``ends`` says."""

    def run(
        b: Block,
        m: Any,
        to: Pointer,
        from_: Pointer,
        rows: Any,
        count: Any,
        to_pitch: Any,
        from_pitch: Any,
        thread: Any,
    ) -> None:
        lanes = np.flatnonzero(m)
        number, *sizes = (np.broadcast_to(x, m.shape) for x in (thread, rows, count, to_pitch, from_pitch))
        # the consumers of a block with roles come here warpgroup by warpgroup
        if len(lanes) % min(threads, WARPGROUP) or (number[lanes] != lanes % threads).any():
            raise EmulationError(f"rows of {threads} threads are copied by {len(lanes)}")
        starts = [np.broadcast_to(p.index, m.shape) for p in (to, from_)]
        arena, size = from_.memory.arena, from_.memory.size
        started = [int(k) for k in lanes if number[k] < sizes[0][k] and sizes[1][k] > 0]
        fences = np.zeros_like(m)
        fences[started] = True
        async_units.fence_global(b, fences)
        for who in started:
            down, along, far, near = (int(x[who]) for x in sizes)
            memory = to.memory.of_thread(who) if isinstance(to.memory, Several) else to.memory
            row = Row(memory.data, (along,), memory)
            for k in range(int(number[who]), down, threads):
                at = [int(starts[0][who]) + k * far]
                first = int(from_.memory.offset) + (int(starts[1][who]) + k * near) * size
                b.touch(arena, cells := row.cells(first), np.full(cells.shape, who), False)
                awaited = b.world.stored(b, who, memory, row.elements(at), adds="rank" if adds else "")
                b.units.store(first, row, at, who, "add" if adds else "", awaited)
        for who in started if ends != "ts::ROWS_BEGUN" else ():
            b.world.until(lambda: True)  # others may come in between
            b.units.commit_stores(who)
            b.units.await_stores(b, who, 0, ends != "ts::ROWS_READ")

    return run


def find(name: str) -> Callable[..., Any] | None:
    """What a function of these headers does; None where it is none of theirs."""
    function, _, given = name.removesuffix(">").partition("<")
    if function.startswith(("ts::store_r", "ts::add_r")):
        threads, _, ends = given.partition(", ")
        some = _by_tma(int(threads), ends, "add" in function)
        if "_rows" in function:
            return some
        return lambda b, m, to, from_, count, thread: some(b, m, to, from_, 1, count, 0, 0, thread)
    if function == "ts::rows_complete":
        return async_units.bulk_wait(0, True)
    if function not in PUTS:
        return None
    rows = _put_rows(*(int(x) for x in given.split(",")))
    if function == "ts::put_rows":
        return rows
    if function == "ts::put_zeros":
        return lambda b, m, to, down, count, pitch, thread: rows(
            b, m, to, None, down, count, pitch, 0, thread
        )
    return lambda b, m, to, from_, count, thread: rows(b, m, to, from_, 1, count, 0, 0, thread)
