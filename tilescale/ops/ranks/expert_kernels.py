"""The tile programs of experts on several ranks: tokens go to the ranks of the experts that their router
chose, and what those made of them comes back.

A *pair* is a token and one of its experts. A rank's pairs are numbered in the order of its experts, of the
ranks that the tokens come from, and of their tokens there. Its *rows* are the tokens that come, each once,
however many of its experts are here: in the order of ranks, and of their tokens. Both follow from the
routers' choices alone, so every run gives the same bits; and all sizes are found on the device.

Experts are split as rows are: rank r of n has ceil(E / n) from r times as many on, the last ones fewer.
"""

from __future__ import annotations

from typing import Any

import tilescale.language as T
from tilescale.ops.gemm_kernels import ceil_div

#: tokens whose places a block finds together
CHUNK = 32


def told(E: int, world: int) -> int:
    """How many numbers a rank tells the others: its pairs of each expert and its rows for each rank, and what
    makes them a multiple of four."""
    return ceil_div(world * ceil_div(E, world) + world, 4) * 4


def goes(ids: Any, token: Any, rank: Any, K: int, local: int) -> Any:
    """1 where one of a token's experts is on a rank, else 0. An expert of −1 is on none."""
    there = ids[token, 0] // local == rank
    for k in range(1, K):
        there = T.any_of(there, ids[token, k] // local == rank)
    return T.if_then_else(there, 1, 0)


def plan(K: int, E: int, world: int, blocks: int, threads: int) -> Any:
    """Where each own token goes, from its experts ``ids`` (t, K), −1 for none: ``pairs`` (t, K), which of the
    pairs each one is at its rank; ``slots`` (t, world), which of this rank's rows there, −1 where it does not
    go; ``begins`` (world,), this rank's first row at each rank. And what comes: ``sizes``, this rank's pairs
    of each of its experts; ``starts`` (world + 1,), the first row of each rank.

    Each block counts its tokens'. Behind the rank's barrier each adds up what is before its own, the first
    one all, which it sends to everyone. ``counts`` is memory to work in.
    """
    t, W, local, C = T.dynamic("t"), world, ceil_div(E, world), told(E, world)
    EP = W * local

    @T.prim_func
    def moe_plan(
        ids: T.Tensor((t, K), "int32"),
        counts: T.Tensor((blocks, C), "int32"),
        box: T.Packets((W, C), "int32"),
        pairs: T.Tensor((t, K), "int32"),
        slots: T.Tensor((t, W), "int32"),
        begins: T.Tensor((W,), "int32"),
        sizes: T.Tensor((local,), "int32"),
        starts: T.Tensor((W + 1,), "int32"),
    ):
        with T.Kernel(blocks, threads=threads) as b, T.Scale("device") as (rank, n):
            per = T.ceildiv(T.ceildiv(t, blocks), CHUNK) * CHUNK
            first = T.min(b * per, t)
            rounds = T.ceildiv(T.min(first + per, t) - first, CHUNK)
            mine, before, total = (T.alloc_shared((C,), "int32") for _ in range(3))
            chosen, to, place = (T.alloc_shared((CHUNK, x), "int32") for x in (K, W, W))
            T.clear(mine)
            for c in T.serial(rounds):
                take(ids, first + c * CHUNK, t, chosen, to, K, local)
                for i, k in T.Parallel(CHUNK, K):
                    if chosen[i, k] >= 0:
                        T.atomic_add(mine[chosen[i, k]], 1)
                for d in T.Parallel(W):
                    for i in T.serial(CHUNK):
                        mine[EP + d] += to[i, d]
            T.copy(mine, counts[b, 0:C])
            with T.Scale("grid"):
                T.barrier()  # releases what this block counted, acquires what the others did
            for j in T.Parallel(C):
                before[j] = 0
                total[j] = 0
                for c in T.serial(blocks):
                    before[j] += T.if_then_else(c < b, counts[c, j], 0)
                    total[j] += counts[c, j]
            every = T.alloc_shared((W, C), "int32")
            if b == 0:
                T.put_packets(total, box[rank, 0:C])
            T.get_packets(box[0:W, 0:C], every)
            # of all ranks: the pairs of each expert; then this rank's first one, behind earlier experts'
            # and those of the ranks in front of it
            whole, pair = T.alloc_shared((W, local), "int32"), T.alloc_shared((W, local), "int32")
            for d, e in T.Parallel(W, local):
                whole[d, e] = 0
                for s in T.serial(W):
                    whole[d, e] += every[s, d * local + e]
            T.cumsum(whole, pair, dim=1)
            for d, e in T.Parallel(W, local):
                pair[d, e] += before[d * local + e] - whole[d, e]
                for s in T.serial(W):
                    pair[d, e] += T.if_then_else(s < rank, every[s, d * local + e], 0)
            if b == 0:
                for e in T.Parallel(local):
                    sizes[e] = whole[rank, e]
                for s in T.Parallel(W + 1):
                    starts[s] = 0
                    for r in T.serial(W):
                        starts[s] += T.if_then_else(r < s, every[r, EP + rank], 0)
                for d in T.Parallel(W):
                    begins[d] = 0
                    for s in T.serial(W):
                        begins[d] += T.if_then_else(s < rank, every[s, EP + d], 0)
            for c in T.serial(rounds):
                low = first + c * CHUNK
                take(ids, low, t, chosen, to, K, local)
                T.cumsum(to, place, dim=0)
                for i, d in T.Parallel(CHUNK, W):
                    if low + i < t:
                        slots[low + i, d] = T.if_then_else(to[i, d] > 0, before[EP + d] + place[i, d] - 1, -1)
                for i, k in T.Parallel(CHUNK, K):
                    if low + i < t:
                        pairs[low + i, k] = -1
                        if chosen[i, k] >= 0:
                            earlier = T.alloc_var("int32", 0)
                            for p in T.serial(i * K + k):
                                if chosen[p // K, p % K] == chosen[i, k]:
                                    earlier = earlier + 1
                            pairs[low + i, k] = pair[chosen[i, k] // local, chosen[i, k] % local] + earlier
                for i, k in T.Parallel(CHUNK, K):
                    if chosen[i, k] >= 0:
                        T.atomic_add(pair[chosen[i, k] // local, chosen[i, k] % local], 1)
                for d in T.Parallel(W):
                    before[EP + d] += place[CHUNK - 1, d]

    return moe_plan


@T.macro
def take(ids: Any, low: Any, t: Any, chosen: Any, to: Any, K: int, local: int):
    """The experts of the tokens from ``low`` on, and the ranks that they go to."""
    for i, k in T.Parallel(CHUNK, K):
        chosen[i, k] = -1
        if low + i < t:
            chosen[i, k] = ids[low + i, k]
    for i, d in T.Parallel(*to.shape):
        to[i, d] = goes(chosen, i, d, K, local)


def dispatch(
    H: int, K: int, E: int, S: int, world: int, wide: int, blocks: int, threads: int, dtype: str
) -> Any:
    """Own tokens X (t, H), with the ``S`` numbers of each in Z, as `plan` says: into ``rows`` (R, H) and
    ``marks`` (R, S) of the ranks of their experts. There ``meta`` (R, 2, K) gets which pairs a row is, −1 for
    those of other ranks, and the bits of their ``weights``.

    A warp takes a token, reads it once and stores it to one rank after another, beginning at the next one, so
    that no rank is everyone's first. Nobody waits: the launch ends when everything has arrived.
    """
    t, R = T.dynamic("t"), T.dynamic("R")
    local = ceil_div(E, world)

    @T.prim_func
    def moe_dispatch(
        X: T.Tensor((t, H), dtype),
        Z: T.Tensor((t if S else 1, max(S, 1)), "float32"),
        ids: T.Tensor((t, K), "int32"),
        weights: T.Tensor((t, K), "float32"),
        pairs: T.Tensor((t, K), "int32"),
        slots: T.Tensor((t, world), "int32"),
        begins: T.Tensor((world,), "int32"),
        rows: T.SymmTensor((R, H), dtype),
        marks: T.SymmTensor((R if S else 1, max(S, 1)), "float32"),
        meta: T.SymmTensor((R, 2, K), "int32"),
    ):
        with (
            T.Kernel(blocks, threads=threads) as b,
            T.Scale("device") as (rank, n),
            T.Scale("warp") as (w, of),
        ):
            x, z = T.alloc_fragment((wide,), dtype), T.alloc_fragment((max(S, 1),), "float32")
            mark = T.alloc_fragment((2, K), "int32")
            for i in T.serial(w * blocks + b, t, step=of * blocks):
                for h in T.serial(ceil_div(H, wide)):
                    T.copy(X[i, h * wide], x)
                    for hop in T.serial(1, n + 1):
                        d = (rank + hop) % n
                        if slots[i, d] >= 0:
                            T.copy(x, rows[begins[d] + slots[i, d], h * wide], dst=d)
                if S:
                    T.copy(Z[i, 0], z)
                for hop in T.serial(1, n + 1):
                    d = (rank + hop) % n
                    if slots[i, d] >= 0:
                        at = begins[d] + slots[i, d]
                        for k in T.Parallel(K):
                            mark[0, k] = T.if_then_else(ids[i, k] // local == d, pairs[i, k], -1)
                            mark[1, k] = T.reinterpret(weights[i, k], "int32")
                        T.copy(mark, meta[at, 0, 0], dst=d)
                        if S:
                            T.copy(z, marks[at, 0], dst=d)

    return moe_dispatch


def arrange(K: int, world: int, blocks: int, threads: int) -> Any:
    """``index`` (P,): the row of each pair, from ``meta`` (R, 2, K); 0 behind the last pair."""
    R, P, local = T.dynamic("R"), T.dynamic("P"), T.dynamic("local")

    @T.prim_func
    def moe_arrange(
        meta: T.Tensor((R, 2, K), "int32"),
        starts: T.Tensor((world + 1,), "int32"),
        sizes: T.Tensor((local,), "int32"),
        index: T.Tensor((P,), "int32"),
    ):
        with T.Kernel(blocks, threads=threads) as b:
            filled = T.alloc_var("int32", 0)
            for e in T.serial(local):
                filled = filled + sizes[e]
            for c in T.serial(b, T.ceildiv(starts[world], CHUNK), step=blocks):
                for i, k in T.Parallel(CHUNK, K):
                    if c * CHUNK + i < starts[world] and meta[c * CHUNK + i, 0, k] >= 0:
                        index[meta[c * CHUNK + i, 0, k]] = c * CHUNK + i
            for c in T.serial(b, T.ceildiv(P - filled, 1024), step=blocks):
                for i in T.Parallel(1024):
                    if filled + c * 1024 + i < P:
                        index[filled + c * 1024 + i] = 0

    return moe_arrange


def expand(H: int, wide: int, blocks: int, threads: int, dtype: str) -> Any:
    """Y (P, H): the row of X (R, H) that ``index`` (P,) names, of each pair that ``sizes`` count; behind them
    nothing is written."""
    R, P, local = T.dynamic("R"), T.dynamic("P"), T.dynamic("local")

    @T.prim_func
    def moe_expand(
        X: T.Tensor((R, H), dtype),
        index: T.Tensor((P,), "int32"),
        sizes: T.Tensor((local,), "int32"),
        Y: T.Tensor((P, H), dtype),
    ):
        with T.Kernel(blocks, threads=threads) as b, T.Scale("warp") as (w, of):
            x = T.alloc_fragment((wide,), dtype)
            filled = T.alloc_var("int32", 0)
            for e in T.serial(local):
                filled = filled + sizes[e]
            for i in T.serial(w * blocks + b, T.min(filled, P), step=of * blocks):
                for h in T.serial(ceil_div(H, wide)):
                    T.copy(X[index[i], h * wide], x)
                    T.copy(x, Y[i, h * wide])

    return moe_expand


def combine(
    H: int, K: int, world: int, wide: int, group: int, blocks: int, threads: int, dtype: str, weighted: bool
) -> Any:
    """C (t, H): the sum, over the ranks that a token went to, in their order, of what each makes of it: the
    sum over the token's experts there, in its router's order, of their rows of Y (P, H), times its weights.

    A warp adds up ``group`` rows of one rank, one after another, puts them into ``back`` (world, q, H) there
    and signals once. Then, a warp a token, it adds what has come: of its own rank's experts, without rounding
    them in between, and of others.
    """
    t, R, P, q, u = (T.dynamic(x) for x in ("t", "R", "P", "q", "u"))

    @T.macro
    def add(Y, meta, row, at, part, acc):
        """acc += Σ w · Y of a row's pairs."""
        for k in T.serial(K):
            if meta[row, 0, k] >= 0:
                T.copy(Y[meta[row, 0, k], at], part)
                for j in T.Parallel(wide):
                    x = T.cast(part[j], "float32")
                    acc[j] += T.reinterpret(meta[row, 1, k], "float32") * x if weighted else x

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
        with (
            T.Kernel(blocks, threads=threads) as b,
            T.Scale("device") as (rank, n),
            T.Scale("warp") as (w, of),
        ):
            part, acc = T.alloc_fragment((wide,), dtype), T.alloc_fragment((wide,), "float32")
            for hop in T.serial(1, n):
                owner = (rank + hop) % n
                count = starts[owner + 1] - starts[owner]
                for g in T.serial(w * blocks + b, T.ceildiv(count, group), step=of * blocks):
                    for i in T.serial(g * group, T.min(g * group + group, count)):
                        for h in T.serial(ceil_div(H, wide)):
                            T.clear(acc)
                            add(Y, meta, starts[owner] + i, h * wide, part, acc)
                            T.copy(acc, back[rank, i, h * wide], dst=owner)
                    T.signal(arrived[rank, g], dst=owner)  # releases this warp's rows of the group
            for i in T.serial(w * blocks + b, t, step=of * blocks):
                for d in T.serial(n):
                    if d != rank and slots[i, d] >= 0:
                        T.wait(arrived[d, slots[i, d] // group])  # acquires the row that d's warp put
                for h in T.serial(ceil_div(H, wide)):
                    T.clear(acc)
                    for d in T.serial(n):
                        if slots[i, d] >= 0:
                            if d == rank:
                                add(Y, meta, starts[rank] + slots[i, d], h * wide, part, acc)
                            else:
                                T.copy(back[d, slots[i, d], h * wide], part)
                                for j in T.Parallel(wide):
                                    acc[j] += T.cast(part[j], "float32")
                    T.copy(acc, C[i, h * wide])

    return moe_combine


def exchange(H: int, world: int, wide: int, group: int, blocks: int, threads: int, dtype: str) -> Any:
    """Rows X (t, H), the first ``sizes[0]`` of which go to rank 0, the next ``sizes[1]`` to rank 1, …, into
    C (R, H) there, in the order of ranks; ``got`` (world,): how many came from each.

    Ranks tell each other their sizes by packets, so each block knows where its rows go. A warp puts ``group``
    rows, one after another, into ``landing`` (R, H) and signals once; what came it copies on.
    """
    t, R, u = (T.dynamic(x) for x in "tRu")
    W, C = world, ceil_div(world, 4) * 4

    @T.prim_func
    def all_to_all(
        X: T.Tensor((t, H), dtype),
        sizes: T.Tensor((W,), "int32"),
        box: T.Packets((W, C), "int32"),
        landing: T.SymmTensor((R, H), dtype),
        arrived: T.Signal((W, u)),
        Y: T.Tensor((R, H), dtype),
        got: T.Tensor((W,), "int32"),
    ):
        with T.Kernel(blocks, threads=threads) as b, T.Scale("device") as (rank, n):
            mine, every = T.alloc_shared((C,), "int32"), T.alloc_shared((W, C), "int32")
            first, there, here = (T.alloc_shared((W,), "int32") for _ in range(3))
            for j in T.Parallel(C):
                mine[j] = 0
                if j < W:
                    mine[j] = sizes[j]
            if b == 0:
                T.put_packets(mine, box[rank, 0:C])
            T.get_packets(box[0:W, 0:C], every)
            for d in T.Parallel(W):
                first[d] = 0
                there[d] = 0
                here[d] = 0
                for s in T.serial(W):
                    first[d] += T.if_then_else(s < d, every[rank, s], 0)  # of X's rows for d
                    there[d] += T.if_then_else(s < rank, every[s, d], 0)  # of this rank's rows at d
                    here[d] += T.if_then_else(s < d, every[s, rank], 0)  # of d's rows here
            if b == 0:
                for s in T.Parallel(W):
                    got[s] = every[s, rank]
            T.device_assert(here[W - 1] + every[W - 1, rank] <= R, "more rows come than rows= says")
            with T.Scale("warp") as (w, of):
                x = T.alloc_fragment((wide,), dtype)
                for hop in T.serial(1, n):
                    d = (rank + hop) % n
                    for g in T.serial(w * blocks + b, T.ceildiv(every[rank, d], group), step=of * blocks):
                        for i in T.serial(g * group, T.min(g * group + group, every[rank, d])):
                            for h in T.serial(ceil_div(H, wide)):
                                T.copy(X[first[d] + i, h * wide], x)
                                T.copy(x, landing[there[d] + i, h * wide], dst=d)
                        T.signal(arrived[rank, g], dst=d)  # releases this warp's rows of the group
                for hop in T.serial(n):
                    s = (rank + n - hop) % n
                    for g in T.serial(w * blocks + b, T.ceildiv(every[s, rank], group), step=of * blocks):
                        if s != rank:
                            T.wait(arrived[s, g])  # acquires the rows that s's warp put
                        for i in T.serial(g * group, T.min(g * group + group, every[s, rank])):
                            for h in T.serial(ceil_div(H, wide)):
                                if s == rank:
                                    T.copy(X[first[s] + i, h * wide], x)
                                else:
                                    T.copy(landing[here[s] + i, h * wide], x)
                                T.copy(x, Y[here[s] + i, h * wide])

    return all_to_all
