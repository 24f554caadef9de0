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

#: how rows leave from rings: TMA puts them, and their warps go on
AWAY: dict[str, Any] = {"prefer_instruction": "tma", "blocking": False}

#: what a rank says that has no room for the pairs that come
TOO_MANY = (
    "more pairs come than there is room for: a token names an expert twice, or ranks have different numbers "
    "of rows, which rows= of an operation or a layer (tokens= of moe_dispatch), alike on all ranks, says"
)


def told(E: int, world: int, high: int = 0) -> int:
    """How many numbers a rank tells the others: its pairs of each expert and its rows for each rank, where
    `plan` also makes lists (``high``) its rows of each step, and what makes them a multiple of four."""
    return ceil_div(world * ceil_div(E, world) * (2 if high else 1) + world, 4) * 4


def goes(chosen: Any, i: Any, d: Any, K: int, local: int) -> Any:
    """Whether one of a token's experts is on rank d. An expert of −1 is on none."""
    return T.any_of(*(chosen[i, k] // local == d for k in range(K)))


def leads(chosen: Any, i: Any, k: Any, K: int, local: int) -> Any:
    """Whether a token's k-th choice, which is no −1, is the first expert of its rank that it goes to: that
    of the lowest number, and of several of that number the first."""
    e = chosen[i, k]
    return ~T.any_of(
        *(
            (chosen[i, j] // local == e // local) & ((chosen[i, j] < e) | ((chosen[i, j] == e) & (k > j)))
            for j in range(K)
        )
    )


def ones(masks: Any, at: Any, column: Any) -> Any:
    """How many bits of a column of masks (words, columns) are set in front of bit ``at``."""
    found = 0
    for w in range(masks.shape[0]):
        low = T.if_then_else(at // 32 > w, 0xFFFFFFFF, (T.cast(1, "uint32") << T.cast(at % 32, "uint32")) - 1)
        word = T.if_then_else(at // 32 >= w, masks[w, column] & T.cast(low, "uint32"), T.cast(0, "uint32"))
        found = found + T.cast(T.popcount(word), "int32")
    return found


def bit(at: Any) -> Any:
    """The bit of a number in its word."""
    return T.cast(1, "uint32") << T.cast(at % 32, "uint32")


def lists(K: int, local: int, W: int, chunk: int, high: int) -> tuple[Any, Any, Any, Any]:
    """What `plan` does for the lists of `dispatch_gemm`: macros that count rows of each step; that say where
    a block's rows of each begin, and what each step has; that write ``chunk`` tokens' rows; and that tell
    the ranks of their tokens."""
    marked, EP = marks_of(K, local), W * local
    FIRSTS = EP + W  # where counts of rows of each step begin

    @T.macro
    def counted(mine, chosen):
        for i, k in T.Parallel(chunk, K):
            if chosen[i, k] >= 0:
                if leads(chosen, i, k, K, local):
                    T.atomic_add(mine[FIRSTS + chosen[i, k]], 1)

    @T.macro
    def based(whole, every, before, total, base, begin, steps, rank, b):
        """base (W, local): of each rank's expert the first of this block's rows in the order of steps; begin
        (W,): this rank's first row at each rank."""
        sent, ended = T.alloc_shared((1, local), "int32"), T.alloc_shared((1, local), "int32")
        for o, e in T.Parallel(1, local):
            sent[o, e] = 0
            for d in T.serial(W):
                sent[o, e] += total[FIRSTS + d * local + e]
        T.cumsum(sent, ended, dim=1)
        for d, e in T.Parallel(W, local):
            base[d, e] = ended[0, e] - sent[0, e] + before[FIRSTS + d * local + e]
            for f in T.serial(W):  # those that come before rank d, going round from this one's next
                nearer = (f - rank - 1 + W) % W < (d - rank - 1 + W) % W
                base[d, e] += T.if_then_else(nearer, total[FIRSTS + f * local + e], 0)
        for d in T.Parallel(W):
            begin[d] = 0
            for s in T.serial(W):
                begin[d] += T.if_then_else(s < rank, every[s, EP + d], 0)
        if b == 0:
            listed(whole, every, ended, steps, rank)

    @T.macro
    def listed(whole, every, ended, steps, rank):
        """What each step has, and what ends the last one."""
        each, until = T.alloc_shared((2, local), "int32"), T.alloc_shared((2, local), "int32")
        for e in T.Parallel(local):
            each[0, e] = whole[rank, e]
            each[1, e] = T.ceildiv(whole[rank, e], high)
        T.cumsum(each, until, dim=1)
        for e in T.Parallel(local + 1):
            last, come = T.max(e - 1, 0), T.alloc_var("int32", 0)
            for s in T.serial(W):
                come = come + T.if_then_else(e < local, every[s, FIRSTS + rank * local + e], 0)
            steps[e, 0] = T.if_then_else(e > 0, ended[0, last], 0)
            steps[e, 1] = T.if_then_else(e > 0, until[0, last], 0)
            steps[e, 2] = T.if_then_else(e > 0, until[1, last], 0)
            steps[e, 3] = come

    @T.macro
    def ordered(chosen, slots, base, begin, order, low):
        of_first = T.alloc_shared((ceil_div(chunk, 32), EP), "uint32")
        T.clear(of_first)
        for i, k in T.Parallel(chunk, K):
            if chosen[i, k] >= 0:
                if leads(chosen, i, k, K, local):
                    T.atomic_add(of_first[i // 32, chosen[i, k]], bit(i))
        for i, k in T.Parallel(chunk, K):
            if chosen[i, k] >= 0:
                if leads(chosen, i, k, K, local):
                    e = chosen[i, k]
                    at = base[e // local, e % local] + ones(of_first, i, e)
                    order[at, 0] = low + i
                    order[at, 1] = e // local
                    order[at, 2] = begin[e // local] + slots[low + i, e // local]
                    order[at, 3] = 0
        for d, e in T.Parallel(W, local):
            base[d, e] += ones(of_first, chunk, d * local + e)

    @T.macro
    def announced(ids, weights, pairs, slots, begin, meta, index, first, stop):
        with T.Scale("device") as (me, n), T.Scale("warp") as (w, of):
            mark = T.alloc_fragment((2, K), "int32")
            for i in T.serial(first + w, stop, step=of):
                for hop in T.serial(1, n + 1):
                    d = (me + hop) % n
                    if slots[i, d] >= 0:
                        marked(mark, ids, weights, pairs, i, d)
                        T.copy(mark, meta[begin[d] + slots[i, d], 0, 0], dst=d)
        with T.Scale("device"), T.Scale("thread") as (thread, count):
            for u in T.serial(first * K + thread, stop * K, step=count):
                i, k = u // K, u % K
                if pairs[i, k] >= 0:
                    there = ids[i, k] // local
                    T.put(begin[there] + slots[i, there], index[pairs[i, k]], dst=there)

    return counted, based, ordered, announced


def plan(K: int, E: int, world: int, chunk: int, blocks: int, threads: int, high: int = 0) -> Any:
    """Where each own token goes, from its experts ``ids`` (t, K), −1 for none: ``pairs`` (t, K), which of the
    pairs each one is at its rank; ``slots`` (t, world), which of this rank's rows there, −1 where it does not
    go; ``begins`` (world,), this rank's first row at each rank. And what comes: ``sizes``, this rank's pairs
    of each of its experts; ``starts`` (world + 1,), the first row of each rank.

    Each block counts its tokens'. Behind the rank's barrier each adds up what is before its own, the first
    one all, which it sends to everyone. ``counts`` is memory to work in. Then places are found for ``chunk``
    tokens at once: each choice is a bit of its expert's mask, in the order of tokens, and its place is how
    many bits are set in front of it.

    ``high``: also the lists of `dispatch_gemm`, whose tiles have so many rows. A rank's *step* e is what it
    does for expert e of every rank: it sends the tokens whose first expert there that is. ``order`` gets (own
    token, rank, row there, 0) of each row to send, in the order of steps, in each the next rank's first;
    ``steps`` (local + 1, 4) of each step where it begins in ``order``, its first pair, its first row of tiles
    where each expert begins one, and how many rows come to this rank in it. And what `dispatch` tells beside
    the rows is told here: ``meta`` and ``index``, both there when the launch ends.

    ``world`` 0: of one rank that needs no other, whose pairs and sizes are all that is asked for; ``index``
    (t · K,) gets the token of each pair, 0 behind the last one.
    """
    t, W, local = T.dynamic("t"), max(1, world), ceil_div(E, max(1, world))
    C, EP = told(E, W, high), W * local
    R, P, Q = (T.dynamic(x) for x in ("R", "P", "Q"))
    counted, based, ordered, announced = lists(K, local, W, chunk, high)

    @T.macro
    def body(ids, counts, box, pairs, slots, begins, sizes, starts, index, weights, order, steps, meta):
        with T.Kernel(blocks, threads=threads) as b:
            per = T.ceildiv(T.ceildiv(t, blocks), chunk) * chunk
            first = T.min(b * per, t)
            rounds = T.ceildiv(T.min(first + per, t) - first, chunk)
            mine, before, total = (T.alloc_shared((C,), "int32") for _ in range(3))
            chosen = T.alloc_shared((chunk, K), "int32")
            of_expert = T.alloc_shared((ceil_div(chunk * K, 32), EP), "uint32")
            of_rank = T.alloc_shared((ceil_div(chunk, 32), W), "uint32")
            T.clear(mine)
            beyond = T.alloc_shared((1,), "int32")
            T.clear(beyond)
            for c in T.serial(rounds):
                take(ids, first + c * chunk, t, chosen)
                tally(chosen, E, mine, beyond)
                if world:
                    for i, d in T.Parallel(chunk, W):
                        if goes(chosen, i, d, K, local):
                            T.atomic_add(mine[EP + d], 1)
                if high:
                    counted(mine, chosen)
            # once a block: an assertion in the loop takes registers that spill
            T.device_assert(beyond[0] == 0, "an expert's number is num_experts or larger, or less than -1")
            T.copy(mine, counts[b, 0:C])
            with T.Scale("grid"):
                T.barrier()  # releases what this block counted, acquires what the others did
            for j in T.Parallel(C):
                before[j] = 0
                total[j] = 0
                for c in T.serial(blocks):
                    before[j] += T.if_then_else(c < b, counts[c, j], 0)
                    total[j] += counts[c, j]
            rank, every = 0, T.alloc_shared((W, C), "int32")
            if world:
                rank = T.get_rank()
                with T.Scale("device"):
                    if b == 0:
                        T.put_packets(total, box[rank, 0:C])
                    T.get_packets(box[0:W, 0:C], every)
            else:
                T.copy(total, every[0, :])
            # of all ranks: the pairs of each expert; then this rank's first one, behind earlier experts'
            # and those of the ranks in front of it
            whole, pair = T.alloc_shared((W, local), "int32"), T.alloc_shared((W, local), "int32")
            for d, e in T.Parallel(W, local):
                whole[d, e] = 0
                for s in T.serial(W):
                    whole[d, e] += every[s, d * local + e]
            T.cumsum(whole, pair, dim=1)
            filled = T.alloc_var("int32", pair[rank, local - 1])
            for d, e in T.Parallel(W, local):
                pair[d, e] += before[d * local + e] - whole[d, e]
                for s in T.serial(W):
                    pair[d, e] += T.if_then_else(s < rank, every[s, d * local + e], 0)
            if b == 0:
                for e in T.Parallel(local):
                    sizes[e] = whole[rank, e]
                if world:
                    for s in T.Parallel(W + 1):
                        starts[s] = 0
                        for r in T.serial(W):
                            starts[s] += T.if_then_else(r < s, every[r, EP + rank], 0)
                    for d in T.Parallel(W):
                        begins[d] = 0
                        for s in T.serial(W):
                            begins[d] += T.if_then_else(s < rank, every[s, EP + d], 0)
            if high:
                base, begin = T.alloc_shared((W, local), "int32"), T.alloc_shared((W,), "int32")
                based(whole, every, before, total, base, begin, steps, rank, b)
            for c in T.serial(rounds):
                low = first + c * chunk
                take(ids, low, t, chosen)
                T.clear(of_expert)
                for i, k in T.Parallel(chunk, K):
                    if chosen[i, k] >= 0:  # each bit is added once, and so set
                        T.atomic_add(of_expert[(i * K + k) // 32, chosen[i, k]], bit(i * K + k))
                for i, k in T.Parallel(chunk, K):
                    if low + i < t:
                        e = chosen[i, k]
                        pairs[low + i, k] = -1
                        if e >= 0:
                            place = pair[e // local, e % local] + ones(of_expert, i * K + k, e)
                            pairs[low + i, k] = place
                            if not world:
                                index[place] = low + i
                for d, e in T.Parallel(W, local):
                    pair[d, e] += ones(of_expert, chunk * K, d * local + e)
                if world:
                    T.clear(of_rank)
                    for i, d in T.Parallel(chunk, W):
                        if goes(chosen, i, d, K, local):
                            T.atomic_add(of_rank[i // 32, d], bit(i))
                    for i, d in T.Parallel(chunk, W):
                        if low + i < t:
                            there, slot = (of_rank[i // 32, d] & bit(i)) != 0, ones(of_rank, i, d)
                            slots[low + i, d] = T.if_then_else(there, before[EP + d] + slot, -1)
                    for d in T.Parallel(W):
                        before[EP + d] += ones(of_rank, chunk, d)
                if high:
                    ordered(chosen, slots, base, begin, order, low)
            if high:
                announced(ids, weights, pairs, slots, begin, meta, index, first, T.min(first + per, t))
            if high or not world:
                stop = P if high else t * K
                for c in T.serial(b, T.ceildiv(stop - filled, 1024), step=blocks):
                    for i in T.Parallel(1024):
                        if filled + c * 1024 + i < stop:
                            index[filled + c * 1024 + i] = 0

    @T.prim_func
    def moe_plan_lists(
        ids: T.Tensor((t, K), "int32"),
        weights: T.Tensor((t, K), "float32"),
        counts: T.Tensor((blocks, C), "int32"),
        box: T.Packets((W, C), "int32"),
        pairs: T.Tensor((t, K), "int32"),
        slots: T.Tensor((t, W), "int32"),
        begins: T.Tensor((W,), "int32"),
        sizes: T.Tensor((local,), "int32"),
        starts: T.Tensor((W + 1,), "int32"),
        order: T.Tensor((Q, 4), "int32"),
        steps: T.Tensor((local + 1, 4), "int32"),
        meta: T.SymmTensor((R, 2, K), "int32"),
        index: T.SymmTensor((P,), "int32"),
    ):
        body(ids, counts, box, pairs, slots, begins, sizes, starts, index, weights, order, steps, meta)

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
        body(ids, counts, box, pairs, slots, begins, sizes, starts, *(None,) * 5)

    @T.prim_func
    def moe_places(
        ids: T.Tensor((t, K), "int32"),
        counts: T.Tensor((blocks, C), "int32"),
        pairs: T.Tensor((t, K), "int32"),
        sizes: T.Tensor((local,), "int32"),
        index: T.Tensor((t * K,), "int32"),
    ):
        body(ids, counts, None, pairs, None, None, sizes, None, index, *(None,) * 4)

    if high:
        return moe_plan_lists
    return moe_plan if world else moe_places


def marks_of(K: int, local: int) -> Any:
    """A macro that finds what a row's rank is told of it."""

    @T.macro
    def marked(mark, ids, weights, pairs, i, d):
        """mark (2, K): which pairs a token is at rank d, in the order of its router's choices, −1 behind the
        last one, and the bits of their weights."""
        for j, s in T.Parallel(2, K):
            found = T.alloc_var("int32", 0)
            mark[j, s] = -1
            for k in T.serial(K):
                if ids[i, k] // local == d:
                    if found == s:
                        weight = T.reinterpret(weights[i, k], "int32")
                        mark[j, s] = T.if_then_else(j == 0, pairs[i, k], weight)
                    found = found + 1

    return marked


@T.macro
def take(ids: Any, low: Any, t: Any, chosen: Any):
    """The experts of the tokens from ``low`` on."""
    for i, k in T.Parallel(*chosen.shape):
        chosen[i, k] = -1
        if low + i < t:
            chosen[i, k] = ids[low + i, k]


@T.macro
def tally(chosen: Any, E: int, mine: Any, beyond: Any):
    """Counts each of E experts in ``mine``, and says in ``beyond`` whether there are others. −1 is none."""
    for i, k in T.Parallel(*chosen.shape):
        if (chosen[i, k] >= E) | (chosen[i, k] < -1):
            T.atomic_max(beyond[0], 1)
        elif chosen[i, k] >= 0:
            T.atomic_add(mine[chosen[i, k]], 1)


def dispatch(
    H: int,
    K: int,
    E: int,
    S: int,
    world: int,
    wide: int,
    steps: int,
    cut: int,
    movers: int,
    stages: int,
    blocks: int,
    threads: int,
    dtype: str,
) -> Any:
    """Own tokens X (t, H), with the ``S`` numbers of each in Z, as `plan` says: into ``rows`` (R, H) and
    ``marks`` (R, S) of the ranks of their experts. There ``meta`` (R, 2, K) gets which pairs a row is, in the
    order of its router's choices, −1 behind the last one, and the bits of their ``weights``; ``index`` (P,)
    the row of each pair. Behind the pairs that come here it is 0.

    ``movers`` warps of a block take a token each, or one of ``cut`` parts of it, read ``wide`` columns at
    once and store them to one rank after another, beginning at the next one, so that no rank is everyone's
    first. The other warps tell of rows, of a row and rank at once, and of pairs. Nobody waits: the launch
    ends when everything has arrived.

    With ``stages`` rows go through a ring of so many parts of ``wide`` columns that each mover has in shared
    memory, and TMA puts them from there, to all ranks at once and beside the next ones' way in.
    """
    t, R, P, held = (T.dynamic(x) for x in ("t", "R", "P", "held"))
    local, tellers = ceil_div(E, world), threads // 32 - movers
    marked = marks_of(K, local)

    @T.macro
    def told_of(Z, z, ids, weights, pairs, slots, begins, marks, meta, mark, i, d):
        """Tells rank d of token i, if it goes there."""
        if slots[i, d] >= 0:
            at = begins[d] + slots[i, d]
            marked(mark, ids, weights, pairs, i, d)
            T.copy(mark, meta[at, 0, 0], dst=d)
            if S:
                T.copy(Z[i, 0], z)
                T.copy(z, marks[at, 0], dst=d)

    @T.macro
    def moved(X, slots, begins, rows, unit, x, rank, n):
        """Moves a part of a token, through registers."""
        i, part = unit // cut, unit % cut
        for h in T.serial(steps):
            T.copy(X[i, (part * steps + h) * wide], x)
            for hop in T.serial(1, n + 1):
                d = (rank + hop) % n
                slot = slots[i, d]
                if slot >= 0:
                    at = begins[d] + slot
                    T.copy(x, rows[at, (part * steps + h) * wide], dst=d)

    @T.macro
    def stored(X, slots, begins, rows, unit, x, rank, n):
        """The same of a part that lies in a ring, by TMA."""
        i, part = unit // cut, unit % cut
        T.copy(X[i, part * wide], x)
        for hop in T.serial(1, n + 1):
            d = (rank + hop) % n
            slot = slots[i, d]
            if slot >= 0:
                T.copy(x, rows[begins[d] + slot, part * wide], dst=d, **AWAY)

    @T.prim_func
    def moe_dispatch(
        X: T.Tensor((t, H), dtype),
        Z: T.Tensor((t if S else 1, max(S, 1)), "float32"),
        ids: T.Tensor((t, K), "int32"),
        weights: T.Tensor((t, K), "float32"),
        pairs: T.Tensor((t, K), "int32"),
        slots: T.Tensor((t, world), "int32"),
        begins: T.Tensor((world,), "int32"),
        sizes: T.Tensor((held,), "int32"),
        rows: T.SymmTensor((R, H), dtype),
        marks: T.SymmTensor((R if S else 1, max(S, 1)), "float32"),
        meta: T.SymmTensor((R, 2, K), "int32"),
        index: T.SymmTensor((P,), "int32"),
    ):
        with T.Kernel(blocks, threads=threads) as b, T.Scale("device") as (rank, n):
            with T.Scale("warp") as (w, of):
                if w < movers:
                    x = (T.alloc_shared if stages else T.alloc_fragment)((wide,), dtype)
                    first, step = w * blocks + b, movers * blocks
                    units = T.ceildiv(t * cut - first, step)
                    for r in T.Pipelined(units, num_stages=stages) if stages else T.serial(units):
                        if stages:
                            stored(X, slots, begins, rows, first + r * step, x, rank, n)
                        else:
                            moved(X, slots, begins, rows, first + r * step, x, rank, n)
                else:
                    z, mark = T.alloc_fragment((max(S, 1),), "float32"), T.alloc_fragment((2, K), "int32")
                    for unit in T.serial((w - movers) * blocks + b, t * world, step=tellers * blocks):
                        i, d = unit // world, (rank + 1 + unit % world) % world
                        told_of(Z, z, ids, weights, pairs, slots, begins, marks, meta, mark, i, d)
            with T.Scale("thread") as (thread, of):
                if thread >= 32 * movers:
                    filled = T.alloc_var("int32", 0)
                    for e in T.serial(held):
                        filled = filled + sizes[e]
                    T.device_assert(filled <= P, TOO_MANY)
                    first, step = b * 32 * tellers + thread - 32 * movers, blocks * 32 * tellers
                    for u in T.serial(first, t * K, step=step):
                        i, k = u // K, u % K
                        if pairs[i, k] >= 0:
                            there = ids[i, k] // local
                            T.put(begins[there] + slots[i, there], index[pairs[i, k]], dst=there)
                    for u in T.serial(filled + first, P, step=step):
                        index[u] = 0

    return moe_dispatch


def expand(H: int, wide: int, steps: int, blocks: int, threads: int, dtype: str) -> Any:
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
                for h in T.serial(steps):
                    T.copy(X[index[i], h * wide], x)
                    T.copy(x, Y[i, h * wide])

    return moe_expand


def choices(K: int, S: int, E: int, world: int, blocks: int, threads: int, dtype: str) -> Any:
    """Of each pair that came here which of its token's choices it is (``choice``, (P,)), and its ``weight``,
    from what `dispatch` left in ``meta`` and from the ``marks`` (R, S) of each row: its token's K experts, −1
    for none, then its K weights, and then, of float64, what float32 leaves of them.

    A row's pairs are those of its choices that are experts of this rank, in their order.
    """
    R, P, local = T.dynamic("R"), T.dynamic("P"), ceil_div(E, world)

    @T.prim_func
    def moe_choices(
        marks: T.Tensor((R, S), "float32"),
        meta: T.Tensor((R, 2, K), "int32"),
        starts: T.Tensor((world + 1,), "int32"),
        rank: T.int32,
        choice: T.Tensor((P,), "int32"),
        weight: T.Tensor((P,), dtype),
    ):
        with T.Kernel(blocks, threads=threads) as b:
            for c in T.serial(b, T.ceildiv(starts[world], threads), step=blocks):
                for i in T.Parallel(threads):
                    row = c * threads + i
                    if row < starts[world]:
                        found = T.alloc_var("int32", 0)
                        for k in T.serial(K):
                            if T.cast(marks[row, k], "int32") // local == rank:
                                told = T.cast(marks[row, K + k], dtype)
                                if S > 2 * K:
                                    told = told + T.cast(marks[row, 2 * K + k], dtype)
                                choice[meta[row, 0, found]] = k
                                weight[meta[row, 0, found]] = told
                                found = found + 1

    return moe_choices
