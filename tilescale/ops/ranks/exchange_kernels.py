"""The tile programs of ``all_to_all``: rows X (t, H), the first ``sizes[0]`` of which go to rank 0, the next
``sizes[1]`` to rank 1, …, into Y (R, H) there, in the order of ranks; ``got`` (world,): how many came from
each.

Ranks tell each other their sizes in packets, so each block knows where all rows go.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tilescale.language as T
from tilescale.ops.gemm_kernels import ceil_div
from tilescale.ops.ranks.flat_kernels import shares


@T.macro
def places(sizes, box, got, b, rank, every, first, there, here, own, most):
    """``every`` (world, C): how many rows each rank has for each other one. ``first``: of X's ``own`` for
    each rank; ``there``: of this rank's at each one; ``here``: of each rank's in Y, which has ``most``."""
    C, W = every.shape[1], every.shape[0]
    mine = T.alloc_shared((C,), "int32")
    for j in T.Parallel(C):
        mine[j] = 0
        if j < W:
            # each, so that no sum of them is beyond 32 bits
            fits = (sizes[j] >= 0) & (sizes[j] <= own)
            T.device_assert(fits, "a size is negative, or of more rows than there are")
            mine[j] = sizes[j]
    if b == 0:
        T.put_packets(mine, box[rank, 0:C])
    T.get_packets(box[0:W, 0:C], every)
    for d in T.Parallel(W):
        first[d] = 0
        there[d] = 0
        here[d] = 0
        for s in T.serial(W):
            first[d] += T.if_then_else(s < d, every[rank, s], 0)
            there[d] += T.if_then_else(s < rank, every[s, d], 0)
            here[d] += T.if_then_else(s < d, every[s, rank], 0)
    if b == 0:
        for s in T.Parallel(W):
            got[s] = every[s, rank]
    T.device_assert(first[W - 1] + every[rank, W - 1] <= own, "sizes are of more rows than there are")
    T.device_assert(here[W - 1] + every[W - 1, rank] <= most, "more rows come than rows= says")


def pieces(rows: Any, group: int) -> list[tuple[int, Any, Any, Callable[[Any], Any]]]:
    """How a part is cut: pieces of ``group`` rows, then what is left row by row, numbered through. Of each
    sort the rows of a piece, the first number and the one behind the last, and where a number begins."""
    whole = rows // group
    if group == 1:
        return [(1, 0, rows, lambda p: p)]
    left = (1, whole, whole + rows % group, lambda p: whole * (group - 1) + p)
    return [(group, 0, whole, lambda p: p * group), left]


def first_from(low: Any, own: Any, of: int) -> Any:
    """The first number from ``low`` on that falls to worker ``own`` of ``of``."""
    return low + (own - low % of + of) % of


def exchange(H: int, world: int, group: int, blocks: int, threads: int, dtype: str, givers: int) -> Any:
    """By puts of ``group`` rows, and of what is left row by row, into ``landing``, from where they are copied
    on. ``givers``: see `flat_kernels.shares`."""
    t, R = T.dynamic("t"), T.dynamic("R")
    W, C = world, ceil_div(world, 4) * 4

    @T.prim_func
    def all_to_all(
        X: T.Tensor((t, H), dtype),
        sizes: T.Tensor((W,), "int32"),
        box: T.Packets((W, C), "int32"),
        landing: T.SymmTensor((R, H), dtype),
        arrived: T.Signal((W, givers or blocks)),
        Y: T.Tensor((R, H), dtype),
        got: T.Tensor((W,), "int32"),
    ):
        with T.Kernel(blocks, threads=threads, awaited=True) as b, T.Scale("device") as (rank, n):
            every = T.alloc_shared((W, C), "int32")
            first, there, here = (T.alloc_shared((W,), "int32") for _ in range(3))
            places(sizes, box, got, b, rank, every, first, there, here, t, R)
            put, puts, take, takes = shares(b, blocks, givers)
            if put < puts:
                for hop in T.serial(1, n):
                    d = (rank + hop) % n
                    rows = every[rank, d]
                    for size, low, high, place in pieces(rows, group):
                        for p in T.serial(first_from(low, put, puts), high, step=puts):
                            at = place(p)
                            begin, to = first[d] + at, there[d] + at
                            T.copy(
                                X[begin : begin + size, 0:H],
                                landing[to : to + size, 0:H],
                                dst=d,
                                signal=arrived[rank, put],
                                blocking=False,
                            )
            if take >= 0:
                for hop in T.serial(n):
                    s = (rank + n - hop) % n
                    rows = every[s, rank]
                    for size, low, high, place in pieces(rows, group):
                        for p in T.serial(first_from(low, take, takes), high, step=takes):
                            at = place(p)
                            begin, to = first[s] + at, here[s] + at
                            if s == rank:
                                T.copy(X[begin : begin + size, 0:H], Y[to : to + size, 0:H])
                            else:
                                # a block's puts to a rank signal in their order; acquires this piece
                                T.wait(arrived[s, p % puts], p // puts + 1)
                                T.copy(landing[to : to + size, 0:H], Y[to : to + size, 0:H])

    return all_to_all


def exchange_by_packets(
    H: int, world: int, wide: int, blocks: int, threads: int, dtype: str, room: int
) -> Any:  # fmt: skip
    """In packets, ``wide`` numbers of a row at once: no flags where a launch begins and ends, no signals, no
    landing. ``parts`` has ``room`` such pieces for each rank's part."""
    t, R = T.dynamic("t"), T.dynamic("R")
    W, C, steps = world, ceil_div(world, 4) * 4, ceil_div(H, wide)

    @T.prim_func
    def all_to_all(
        X: T.Tensor((t, H), dtype),
        sizes: T.Tensor((W,), "int32"),
        box: T.Packets((W, C), "int32"),
        parts: T.Packets((W, room * wide), dtype),
        Y: T.Tensor((R, H), dtype),
        got: T.Tensor((W,), "int32"),
    ):
        with T.Kernel(blocks, threads=threads) as b, T.Scale("device") as (rank, n):
            every = T.alloc_shared((W, C), "int32")
            first, there, here = (T.alloc_shared((W,), "int32") for _ in range(3))
            x = T.alloc_fragment((wide,), dtype)
            places(sizes, box, got, b, rank, every, first, there, here, t, R)
            for hop in T.serial(1, n):
                d = (rank + hop) % n
                for p in T.serial(b, every[rank, d] * steps, step=blocks):
                    T.copy(X[first[d] + p // steps, p % steps * wide], x)
                    T.put_packets(x, parts[rank, p * wide : (p + 1) * wide], dst=d)
            for p in T.serial(b, every[rank, rank] * steps, step=blocks):
                T.copy(X[first[rank] + p // steps, p % steps * wide], x)
                T.copy(x, Y[here[rank] + p // steps, p % steps * wide])
            for hop in T.serial(1, n):
                s = (rank + n - hop) % n
                for p in T.serial(b, every[s, rank] * steps, step=blocks):
                    T.get_packets(parts[s, p * wide : (p + 1) * wide], x)
                    T.copy(x, Y[here[s] + p // steps, p % steps * wide])

    return all_to_all
