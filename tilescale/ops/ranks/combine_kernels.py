"""The tile programs that bring back what experts made of tokens: rows of pairs are added up where they are,
times their weights, and again on the ranks of their tokens (expert_kernels.py says what pairs and rows
are)."""

from __future__ import annotations

from typing import Any

import tilescale.language as T
from tilescale.ops.ranks.expert_kernels import AWAY
from tilescale.ops.ranks.flat_kernels import added_as

#: rows that a warp reads at once: few, of which each has more bytes under way; tokens have few experts on a
#: rank
NEAR = 3

#: rows of pairs that lie in a stage of a warp's ring: few tokens have more experts on a rank
STAGED = 4


def looking(K: int) -> Any:
    """A macro that finds a row's pairs."""

    @T.macro
    def look(meta, row, place, weight):
        """A row's pairs, and their weights: once a row, since what is read streams through the L1 cache."""
        for k in range(K):
            place[k] = meta[row, 0, k]
            weight[k] = T.reinterpret(meta[row, 1, k], "float32")

    return look


def pair_added(wide: int, weighted: bool) -> Any:
    """A macro that adds a pair's row."""

    @T.macro
    def plus(part, weight, acc):
        """acc += w · part"""
        factor = T.cast(weight, acc.dtype)
        for j in T.Parallel(wide):
            x = T.cast(part[j], acc.dtype)
            acc[j] += factor * x if weighted else x

    return plus


def adding(K: int, wide: int, weighted: bool) -> Any:
    """A macro that adds up rows of pairs."""
    plus = pair_added(wide, weighted)

    @T.macro
    def add(Y, at, parts, place, weight, acc):
        """acc += Σ w · Y of a row's pairs, of which `NEAR` are read at once."""
        for first in range(0, K, NEAR):
            near = range(first, min(K, first + NEAR))
            for k in near:
                if place[k] >= 0:
                    T.copy(Y[place[k], at], parts[k - first])
            for k in near:
                if place[k] >= 0:
                    plus(parts[k - first], weight[k], acc)

    return add


def sums(
    H: int, K: int, wide: int, steps: int, cut: int, blocks: int, threads: int, dtype: str, weighted: bool
) -> Any:
    """C (t, H): of each token the sum of its pairs' rows of Y (P, H), times its weights, in the order of its
    ``pairs`` (t, K); −1 is none. A warp takes a token, or one of ``cut`` parts of it."""
    t, P, add = T.dynamic("t"), T.dynamic("P"), adding(K, wide, weighted)

    @T.prim_func
    def moe_unpermute(
        Y: T.Tensor((P, H), dtype),
        pairs: T.Tensor((t, K), "int32"),
        weights: T.Tensor((t, K), "float32"),
        C: T.Tensor((t, H), dtype),
    ):
        with T.Kernel(blocks, threads=threads) as b, T.Scale("warp") as (w, of):
            parts = [T.alloc_fragment((wide,), dtype) for _ in range(min(NEAR, K))]
            acc = T.alloc_fragment((wide,), added_as(dtype))
            place, weight = T.alloc_local((K,), "int32"), T.alloc_local((K,), "float32")
            for unit in T.serial(w * blocks + b, t * cut, step=of * blocks):
                for k in range(K):
                    place[k] = pairs[unit // cut, k]
                    weight[k] = weights[unit // cut, k]
                for h in T.serial(steps):
                    at = (unit % cut * steps + h) * wide
                    T.clear(acc)
                    add(Y, at, parts, place, weight, acc)
                    T.copy(acc, C[unit // cut, at])

    return moe_unpermute


def bringing(
    K: int, world: int, wide: int, steps: int, cut: int, group: int, givers: int, dtype: str, weighted: bool,
    stages: int = 0,
) -> Any:  # fmt: skip
    """What brings rows back, as `combine` says, by ``blocks`` blocks of which this is number ``block``: a
    macro over the columns from ``column`` on, ``cut`` parts of ``steps`` times ``wide``, whose signals are
    those from ``counter`` on, one for ``group`` rows or a part of them. ``givers``: so many warps of a block
    put, the others take; 0: all put, then take. ``stages``: those who put, of one row at a time, have rings
    of so many."""
    look, plus = looking(K), pair_added(wide, weighted)
    add, others, staged = adding(K, wide, weighted), max(1, world - 1), min(STAGED, K)

    @T.macro
    def told(starts, arrived, item, counter, rank):
        """Releases a part of a row, if its owner has that row."""
        unit, owner = item // others, (rank + 1 + item % others) % world
        if unit // cut < starts[owner + 1] - starts[owner]:
            T.signal(arrived[rank, counter + unit], dst=owner)

    @T.macro
    def sent(Y, meta, starts, back, arrived, held, first, stop, many, column, counter, rank):
        """What `give` does, through a ring of each warp's: copies of pairs' rows run ahead of their sum, and
        TMA puts that from a tile of the warp's."""
        place, weight, parts, acc = held
        near = [T.alloc_shared((wide,), dtype) for _ in range(staged)]
        done = T.alloc_shared((wide,), dtype)
        rounds = T.max(0, T.ceildiv(stop * (world - 1) - first, many)) * steps
        for r in T.Pipelined(rounds, num_stages=stages):
            item, h = first + r // steps * many, r % steps
            unit, owner = item // others, (rank + 1 + item % others) % world
            row = starts[owner] + unit // cut
            there = row < starts[owner + 1]
            at = column + (unit % cut * steps + h) * wide
            for k in range(staged):  # no row is number -1: nothing is read of it
                T.copy(Y[T.if_then_else(there, meta[row, 0, k], -1), at], near[k])
            if (r >= steps) & (h == 0):
                # the row before this one has had a round's time to arrive
                told(starts, arrived, item - many, counter, rank)
            if there:
                if h == 0:
                    look(meta, row, place, weight)
                T.clear(acc)
                for k in range(staged):
                    if place[k] >= 0:
                        plus(near[k], weight[k], acc)
                for k in range(staged, K):
                    if place[k] >= 0:
                        T.copy(Y[place[k], at], parts[0])
                        plus(parts[0], weight[k], acc)
                T.copy(acc, done)
                T.copy(done, back[rank, unit // cut, at], dst=owner, **AWAY)
        if rounds > 0:
            told(starts, arrived, first + (rounds // steps - 1) * many, counter, rank)

    @T.macro
    def give(Y, meta, starts, back, arrived, held, first, stop, many, column, counter, rank):
        """Adds up others' rows, of each owner ``stop`` units, every ``many``-th from ``first`` on, and puts
        them."""
        place, weight, parts, acc = held
        for item in T.serial(first, stop * (world - 1), step=many):
            # neighbours serve one owner each, so that all receivers are served at once
            unit, owner = item // others, (rank + 1 + item % others) % world
            low, part = unit // cut * group, unit % cut
            rows = starts[owner + 1] - starts[owner]
            if low < rows:
                for i in T.serial(low, T.min(low + group, rows)):
                    look(meta, starts[owner] + i, place, weight)
                    for h in T.serial(steps):
                        at = column + (part * steps + h) * wide
                        T.clear(acc)
                        add(Y, at, parts, place, weight, acc)
                        # rounded apart from the store, or nvcc (13.0) spills, and stores words of 4 bytes
                        T.copy(acc, parts[0])
                        T.copy(parts[0], back[rank, i, at], dst=owner)
                # releases this warp's part of the rows
                T.signal(arrived[rank, counter + unit], dst=owner)

    @T.macro
    def bring(Y, meta, starts, slots, back, arrived, C, block, blocks, column, counter):
        t = C.shape[0]
        with T.Scale("device") as (rank, n), T.Scale("warp") as (w, of):
            parts = [T.alloc_fragment((wide,), dtype) for _ in range(min(NEAR, max(K, world)))]
            acc = T.alloc_fragment((wide,), added_as(dtype))
            place, weight = T.alloc_local((K,), "int32"), T.alloc_local((K,), "float32")
            slot = T.alloc_local((world,), "int32")
            most = T.alloc_var("int32", 0)  # of all owners' rows
            for d in range(world):
                most = T.max(most, starts[d + 1] - starts[d])
            units = T.ceildiv(most, group) * cut
            if givers == 0 or w < givers:
                held, many = (place, weight, parts, acc), (givers if givers else of) * blocks
                first = w * blocks + block
                put = sent if stages else give
                put(Y, meta, starts, back, arrived, held, first, units, many, column, counter, rank)
            if w >= givers:
                takes = of - givers
                for unit in T.serial(
                    (w - givers) * blocks + block, T.ceildiv(t, group) * cut, step=takes * blocks
                ):
                    for i in T.serial(unit // cut * group, T.min(unit // cut * group + group, t)):
                        for d in range(world):
                            slot[d] = slots[i, d]
                            if d != rank and slot[d] >= 0:
                                # acquires the part of the row that d's warp put
                                T.wait(arrived[d, counter + slot[d] // group * cut + unit % cut])
                        own = slots[i, rank]
                        for j in range(K):
                            place[j] = -1
                        if own >= 0:
                            look(meta, starts[rank] + own, place, weight)
                        for h in T.serial(steps):
                            at = column + (unit % cut * steps + h) * wide
                            T.clear(acc)
                            add(Y, at, parts, place, weight, acc)
                            for begin in range(0, world, NEAR):
                                near = range(begin, min(world, begin + NEAR))
                                for d in near:
                                    if d != rank and slot[d] >= 0:
                                        T.copy(back[d, slot[d], at], parts[d - begin])
                                for d in near:
                                    if d != rank and slot[d] >= 0:
                                        for j in T.Parallel(wide):
                                            acc[j] += T.cast(parts[d - begin][j], acc.dtype)
                            T.copy(acc, parts[0])
                            T.copy(parts[0], C[i, at])

    return bring


def combine(
    H: int,
    K: int,
    world: int,
    wide: int,
    steps: int,
    cut: int,
    givers: int,
    stages: int,
    blocks: int,
    threads: int,
    dtype: str,
    weighted: bool,
) -> Any:
    """C (t, H): the sum of what each rank makes of a token, this rank first, then the others in their order:
    the sum over the token's experts there, in its router's order, of their rows of Y (P, H), times its
    weights.

    A warp's unit is a row, or one of its ``cut`` parts. ``givers`` warps of each block add up units of other
    ranks' rows, put them into ``back`` (world, q, H) there and signal once each. The others add what comes of
    units of the own tokens: of the own rank's experts, without rounding them in between, and of other ranks.
    With 0 givers all do one, then the other: then there is less to do than warps. With ``stages`` givers have
    rings of so many, which copies of pairs' rows fill ahead.

    Nobody waits for ever: whoever puts waits for nobody, and puts all before it takes anything. All blocks
    are resident.
    """
    t, R, P, q, u = (T.dynamic(x) for x in ("t", "R", "P", "q", "u"))
    bring = bringing(K, world, wide, steps, cut, 1, givers, dtype, weighted, stages)

    @T.prim_func
    def moe_combine(
        Y: T.Tensor((P, H), dtype),
        meta: T.Tensor((R, 2, K), "int32"),
        starts: T.Tensor((world + 1,), "int32"),
        slots: T.Tensor((t, world), "int32"),
        back: T.SymmTensor((world, q, H), dtype),
        arrived: T.Signal((world, u)),
        C: T.Tensor((t, H), dtype),
    ):
        with T.Kernel(blocks, threads=threads, awaited=True) as b:
            bring(Y, meta, starts, slots, back, arrived, C, b, blocks, 0, 0)

    return moe_combine
