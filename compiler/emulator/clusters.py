"""Blocks of an emulated cluster that reach each other, and executors of a block that wait for one another:
multicast copies, arrivals in other blocks, meetings, counters in shared memory (include/ts/cluster.cuh,
hopper.cuh)."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from tilescale.compiler.emulator.async_units import apart, arrived, barrier_wait, byte, one, synced, usable
from tilescale.compiler.emulator.copies import EmulationError
from tilescale.compiler.ir.scales import WARP
from tilescale.compiler.ir.signals import OPS

#: the comparisons of a wait, by number (`ops.sync.COMPARISONS`)
COMPARED = (operator.ge, operator.eq, operator.gt, operator.ne, operator.le, operator.lt)


def barrier_arrive_blocks(blocks: int) -> Callable[..., None]:
    """One arrival of a warp in each of several blocks, whose ranks the first lanes name."""

    def run(b: Any, m: Any, where: Any, rank: Any, when: Any) -> None:
        warps = m.reshape(-1, WARP)
        if not (warps.all(1) | ~warps.any(1)).all():
            raise EmulationError("an arrival of part of a warp")
        synced(b, warps)
        at, rank = byte(m, where), np.broadcast_to(rank, m.shape)
        for w in np.flatnonzero(warps.all(1)) if one(m, when) else []:
            for lane in range(blocks):
                arrived(usable(b, m, b.units.peer(int(rank[w * WARP + lane])).barrier(at)), b)

    return run


def barrier_arrive_at(b: Any, m: Any, where: Any, rank: Any) -> None:
    """One arrival of each thread at the barrier of another block, with release at the cluster's scope."""
    ranks = np.broadcast_to(rank, m.shape)
    for some, at in apart(m, where):
        for peer in np.unique(ranks[some]):
            these = some & (ranks == peer)
            made = usable(b, these, b.units.peer(int(peer)).barrier(at))
            made.release_far(b.clocks.release(np.flatnonzero(these) + b.first))
            made.arrive(int(these.sum()))
    b.units.yields()


def barrier_wait_cluster(b: Any, m: Any, where: Any, parity: Any) -> None:
    """A wait that also acquires what other blocks' arrivals released."""
    barrier_wait(b, m, where, parity)
    for some, at in apart(m, where):
        if (far := b.units.barrier(at).over_far) is not None:
            b.clocks.acquire(np.flatnonzero(some) + b.first, far)


def cluster_sync(b: Any, m: Any) -> None:
    """All threads of all blocks of the cluster meet."""

    def met() -> None:
        b.everyone[:, 3] += 1
        if b.clocks is not None:
            b.clocks.meet(np.arange(len(b.everyone)))

    b.units.interleaving.meet("cluster", len(b.everyone), int(m.sum()), met)


def cluster_arrive(b: Any, m: Any) -> None:
    """All threads of all blocks arrive, and go on. What is done behind an arrival and in front of
    the last one counts as done before the barrier; the simulator reports the races that this leaves out."""
    came = b.units.interleaving.meetings.setdefault("cluster", [0, 0])
    b.units.cluster_turn = came[1]
    b.units.interleaving.arrive("cluster", len(b.everyone), int(m.sum()))
    if came[1] > b.units.cluster_turn:
        b.everyone[:, 3] += 1
        if b.clocks is not None:
            b.clocks.meet(np.arange(len(b.everyone)))


def cluster_wait(b: Any, m: Any) -> None:
    """Until the phase is over in which the block's threads have arrived."""
    came, turn = b.units.interleaving.meetings["cluster"], b.units.cluster_turn
    b.units.interleaving.yields(lambda: came[1] > turn)


def peer_arena(b: Any, m: Any, rank: Any) -> Any:
    """The shared memory of another block of the cluster."""
    arena = b.units.peer(int(one(m, rank))).arena
    if arena is None:
        raise EmulationError("a block reaches into another that has not begun")
    return arena


def shared_signal(op: str) -> Callable[..., None]:
    """A counter in shared memory is added to, or set, by one thread, with release."""

    def run(b: Any, m: Any, where: Any, value: Any) -> None:
        tile, at = where.memory, int(one(m, where.index))
        for who in np.flatnonzero(m):
            amount = int(np.broadcast_to(value, m.shape)[who])
            tile.data[at] = OPS[op](int(tile.data[at]), amount)
            handed, key = (
                b.clocks.release(np.array([who + b.first])),
                (id(tile.arena), tile.offset + at * tile.size),
            )
            if b.world is not None:
                b.world.tell(b, int(who), key)
            before = b.units.interleaving.handed.get(key)
            b.units.interleaving.handed[key] = (
                handed if op == "set" or before is None else np.maximum(before, handed)
            )
        b.units.yields()

    return run


def shared_wait(b: Any, m: Any, where: Any, value: Any, compare: Any, record: Any) -> Any:
    """Waits until a counter compares with a value, with acquire."""
    tile, at, want = where.memory, int(one(m, where.index)), int(one(m, value))
    holds = COMPARED[int(one(m, compare))]
    b.units.yields(lambda: holds(int(tile.data[at]), want))
    key = (id(tile.arena), tile.offset + at * tile.size)
    handed = b.units.interleaving.handed.get(key)
    if handed is not None:
        b.clocks.acquire(np.flatnonzero(m) + b.first, handed)
    for who in np.flatnonzero(m) if b.world is not None else ():
        b.world.acquire(b, int(who), key)
    return np.ones(m.shape, bool)


def shared_test(b: Any, m: Any, where: Any, value: Any, compare: Any) -> Any:
    """Looks at a counter once, with acquire where it compares."""
    tile, at, want = where.memory, int(one(m, where.index)), int(one(m, value))
    b.units.yields()
    holds = COMPARED[int(one(m, compare))](int(tile.data[at]), want)
    handed = b.units.interleaving.handed.get((id(tile.arena), tile.offset + at * tile.size))
    if holds and handed is not None:
        b.clocks.acquire(np.flatnonzero(m) + b.first, handed)
    return np.full(m.shape, int(holds), np.int32)


def tma_load_multicast(b: Any, m: Any, to: Any, tmap: Any, where: Any, mask: Any, *coordinates: Any) -> None:
    if m.sum() != 1:
        raise EmulationError(f"{m.sum()} threads make one copy")
    b.late_enough(m)
    at, mask = [int(one(m, c)) for c in coordinates], int(one(m, mask))
    if not mask or mask >> len(b.units.cluster):
        raise EmulationError(f"a copy into the blocks {mask:b} of a cluster of {len(b.units.cluster)}")
    for rank in range(len(b.units.cluster)):
        if mask >> rank & 1:
            other = b.units.peer(rank)
            handed = _wrote(b, m, other, tmap.cells(byte(m, to))) if b.by_hand else None
            barrier = other.barrier(byte(m, where))
            other.load(byte(m, to), tmap, barrier, at, other is b.units, handed=handed)
    b.units.yields()


def _wrote(b: Any, m: Any, other: Any, cells: Any) -> Any:
    """A copy that the author's barriers order, as if its thread wrote the box in another block."""
    arena, who = other.arena, np.flatnonzero(m)
    if arena.looked is not None and arena.looked[:, cells].any():
        raise EmulationError(
            "TMA writes what threads of a block have read, and they have made no proxy fence since"
        )
    b.touch(arena, cells, np.full(cells.shape, who[0]), True)
    arena.unfenced[cells] = -1
    return b.clocks.release(who + b.first)


def find(name: str) -> Callable[..., Any] | None:
    """The instruction of a name, with its template's argument."""
    plain, _, number = name.rstrip(">").partition("<")
    if plain.startswith("ts::shared_signal_"):
        return shared_signal(plain.rpartition("_")[2])
    if plain == "ts::mbarrier_arrive_blocks":
        return barrier_arrive_blocks(int(number))
    ones: dict[str, Callable[..., Any]] = {
        "ts::shared_wait": shared_wait, "ts::shared_test": shared_test, "ts::cluster_sync": cluster_sync,
        "ts::cluster_arrive": cluster_arrive, "ts::cluster_arrive_relaxed": cluster_arrive,
        "ts::cluster_wait": cluster_wait, "ts::mbarrier_arrive_at": barrier_arrive_at,
        "ts::mbarrier_wait_cluster": barrier_wait_cluster,
        "ts::tma_load_multicast": tma_load_multicast, "ts::cluster_begins": cluster_sync,
    }  # fmt: skip
    return ones.get(plain)
