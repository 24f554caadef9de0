"""What emulated threads do with one another: named barriers, shuffles, atomic updates."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from tilescale.compiler.emulator import async_units
from tilescale.compiler.emulator.copies import EmulationError
from tilescale.compiler.emulator.memory import Block, Pointer, decoded, load
from tilescale.compiler.ir.scales import WARP
from tilescale.compiler.ops.shuffle import EVERYONE, taken_from
from tilescale.compiler.ops.vote import VOTES, decided
from tilescale.compiler.sim import numerics


def named_barrier(b: Block, m: Any, number: Any, threads: Any) -> None:
    """Some of the block's threads meet, whole warps of them."""
    whole_warps(b, m, "a named barrier")
    count, which = int(np.asarray(threads).ravel()[0]), int(async_units.one(m, number))
    waiting, gone = b.units.named.setdefault(which, ([], []))
    waiting.append(m.copy())
    b.units.interleaving.meet((b.units, "named", which), count, int(m.sum()), partial(_met, b, waiting, gone))


def named_barrier_arrive(b: Block, m: Any, number: Any, threads: Any) -> None:
    """Comes there and goes on."""
    whole_warps(b, m, "a named barrier")
    count, which = int(np.asarray(threads).ravel()[0]), int(async_units.one(m, number))
    waiting, gone = b.units.named.setdefault(which, ([], []))
    gone.append(b.clocks.release(np.flatnonzero(m) + b.first))  # type: ignore[union-attr]
    met = b.units.interleaving.arrive((b.units, "named", which), count, int(m.sum()))
    if met:
        _met(b, waiting, gone)
    b.units.yields()


def _met(b: Block, waiting: list[Any], gone: list[Any]) -> None:
    """Who waits knows what all did; who has gone on knows nothing new."""
    who = np.flatnonzero(np.logical_or.reduce([np.zeros(b.threads, bool), *waiting])) + b.first
    b.clocks.meet(who)  # type: ignore[union-attr]
    for handed in gone:
        b.clocks.acquire(who, handed)  # type: ignore[union-attr]
    waiting.clear()
    gone.clear()


def uniform(b: Block, m: Any, value: Any) -> Any:
    """A value that the program says is the same in all lanes of a wave."""
    v = np.broadcast_to(value, m.shape)
    for w in range(0, b.threads, b.wave):
        here = m[w : w + b.wave]
        if here.any() and not here.all() or len(set(v[w : w + b.wave][here])) > 1:
            raise EmulationError("a value is not the same in all lanes of a warp")
    return value


def vote(b: Block, m: Any, test: Any) -> Any:
    """Whether one of a wave's lanes says so, all of which must be there."""
    said, found = np.broadcast_to(test, m.shape) & m, np.zeros(b.threads, bool)
    for w in whole_warps(b, m, "a vote"):
        found[w * b.wave : (w + 1) * b.wave] = said[w * b.wave : (w + 1) * b.wave].any()
    return found


def shuffle_xor(b: Block, m: Any, value: Any, mask: Any) -> Any:
    """A lane's partner must run it too. NVIDIA's instruction names all lanes of the warp: all that the block
    has must be there, partners or not."""
    lanes = np.arange(b.threads)
    waves = lanes // b.wave
    there = lanes ^ int(np.asarray(mask).ravel()[0])
    if there.max() >= b.threads or (there // b.wave != waves).any():
        raise EmulationError("a shuffle with a lane that there is not")
    if not m[np.isin(waves, waves[m]) if b.wave == WARP else there[m]].all():
        raise EmulationError("a shuffle in part of a warp")
    return np.broadcast_to(value, m.shape)[there]


def lane(kind: str) -> Callable[..., Any]:
    def run(b: Block, m: Any, value: Any, by: Any, width: Any, mask: Any = EVERYONE) -> Any:
        lanes = np.arange(b.threads)
        named_lanes(b, m, mask, "a shuffle")
        there = lanes // WARP * WARP + taken_from(
            kind, lanes % WARP, np.broadcast_to(by, m.shape), int(np.asarray(width).ravel()[0])
        )
        if (there[m] >= b.threads).any() or not m[there[m]].all():
            raise EmulationError("a shuffle asks for the value of a lane that does not come")
        return np.broadcast_to(value, m.shape)[np.where(m, there, lanes)]

    return run


def ballot(kind: str) -> Callable[..., Any]:
    """A vote of the author's, to which all lanes that the mask names come."""

    def run(b: Block, m: Any, test: Any = True, mask: Any = EVERYONE) -> Any:
        values = np.broadcast_to(test, m.shape)
        told = np.zeros(b.threads, np.int64)
        for first in named_lanes(b, m, mask, "a vote"):
            brought = {k: values[first + k] for k in range(WARP) if m[first + k]}
            for k in brought:
                told[first + k] = decided(kind, k, brought)
        return told.astype(VOTES[kind][1])

    return run


def block_vote(kind: str, meet: Callable[..., None]) -> Callable[..., Any]:
    """``meet``: the barrier, by its number and its threads. What came of a vote of which some threads come
    later is theirs, too."""

    def run(b: Block, m: Any, test: Any, number: Any, threads: Any) -> Any:
        count, said = int(np.asarray(threads).ravel()[0]), np.broadcast_to(test, m.shape) & m
        votes = b.units.votes
        if not votes or votes[-1][0] == count:
            votes.append([0, 0])
        vote = votes[-1]
        vote[0], vote[1] = vote[0] + int(m.sum()), vote[1] + int(said.sum())
        meet(b, m, number, threads)
        return np.full(
            m.shape, {"count": vote[1], "and": vote[1] == count, "or": vote[1] > 0}[kind], np.int32
        )

    return run


def named_lanes(b: Block, m: Any, mask: Any, what: str) -> list[int]:
    """The first threads of the warps that come, each with the lanes of the mask, and these alone."""
    lanes = np.arange(b.threads)
    named = int(np.asarray(mask).ravel()[0]) >> (lanes % WARP) & 1 > 0
    if not (m == (named & np.isin(lanes // WARP, lanes[m] // WARP))).all():
        where = "in part of a warp" if named.all() else "not of the lanes of its mask"
        raise EmulationError(f"{what} {where}")
    return [int(w) * WARP for w in np.unique(lanes[m] // WARP)]


def whole_warps(b: Block, m: Any, what: str) -> list[int]:
    warps = m.reshape(-1, b.wave) if b.threads % b.wave == 0 else np.zeros((0, b.wave), bool)
    if not (warps.all(1) | ~warps.any(1)).all() or not len(warps):
        raise EmulationError(f"{what} in part of a warp")
    return [w for w in range(len(warps)) if warps[w].all()]


def red_add(count: int, dtype: str) -> Callable[..., None]:
    def run(b: Block, m: Any, where: Pointer, values: Pointer) -> None:
        if (where.index[m] % count).any():
            raise EmulationError(
                f"{where.memory.name}: {count} elements are added from one on that is no multiple of {count}"
            )
        added, one = decoded(load(b, m, values.memory, values.index, count), dtype), atomic("add")
        for k in range(count):
            one(b, m, Pointer(where.memory, where.index + k), added[:, k])

    return run


def remote_add(count: int) -> Callable[..., None]:
    """Neighbours in another rank's memory, each added atomically among all ranks."""

    def run(b: Block, m: Any, where: Pointer, values: Any) -> None:
        lanes, dtype = np.flatnonzero(m), str(where.memory.data.dtype)
        if (where.index[m] % count).any():
            raise EmulationError(
                f"{where.memory.name}: {count} elements are added from one on that is no multiple of {count}"
            )
        given = (
            decoded(load(b, m, values.memory, values.index, count), dtype)
            if isinstance(values, Pointer)
            else np.broadcast_to(values, m.shape)[:, None]
        )
        b.world.until(lambda: True)  # others may come first
        for k in range(count):
            cells = where.index + k
            b.world.touched(b, where.memory, cells[lanes], lanes, writes=True, adds=True)
            atomic("add")(b, m, Pointer(where.memory, cells), given[:, k])

    return run


def atomic(kind: str) -> Callable[..., Any]:
    from tilescale.compiler.sim.tiles import updated

    def run(b: Block, m: Any, where: Pointer, value: Any) -> Any:
        mem = where.memory
        dtype = str(mem.data.dtype)
        value = np.broadcast_to(value, m.shape)
        out = np.zeros(m.shape, numerics.compute(dtype))
        for t in b.draw.permutation(np.flatnonzero(m)):
            before = numerics.decode(mem.data[where.index[t]], dtype)
            out[t] = before
            operand = value[t] if dtype in numerics.FLOATS else int(value[t])
            mem.data[where.index[t]] = numerics.encode(updated(before, operand, kind, dtype), dtype)
        return out

    return run
