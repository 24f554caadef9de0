"""The tile programs of ring attention's gradients, as ring_kernels.py has the forward's.

``query_numbers`` leaves two numbers of each of the rank's queries in symmetric memory. ``query_gradients``
has a tile of the rank's queries and walks over all keys that they see. It pulls those as the forward does,
and behind them the queries that see the rank's keys, their gradients and numbers. ``key_gradients`` has a
tile of the rank's keys and walks over these.

Who releases and who acquires: for keys and values as in the forward. Pulls of queries signal a counter that
nobody awaits: the launch ends when its blocks have made them, and the next one on the stream reads what they
wrote. The launch is complete on a rank when everyone has pulled from it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tilescale.language as T
from tilescale.ops.attention import turn, turns
from tilescale.ops.attention_backward import scored_keys, summed_keys, summed_queries
from tilescale.ops.attention_shapes import LOG2_E, Shape, wide_of
from tilescale.ops.gemm_kernels import ceil_div
from tilescale.ops.ranks.ring_kernels import View, counter, pieces_of, pull_all, stored
from tilescale.ops.ranks.sequence import Chunks


def numbers_of(chunks: Chunks, heads: int, high: int, tile: int) -> tuple[int, ...]:
    """The shape of the table of queries' numbers: (chunks, heads, pieces, 2 · rows of a piece): of each piece
    the log-sum-exps times log2 e, infinite where there is no query, and behind them the deltas, both filled
    up to tiles."""
    wide = ceil_div(high, tile) * tile
    return (chunks.world * chunks.parts, heads, pieces_of(chunks, high), 2 * wide)


def turned(axes: Any, times: int) -> tuple[Any, ...]:
    """So many of the first axes behind the others: blocks start in the order of a grid's first axis."""
    return (*axes[times:], *axes[:times])


def unseen(here: Any) -> Callable[[Any, Any], Any]:
    """Of each chunk a counter that nobody awaits, behind those of its heads."""
    return lambda chunk, head: here[chunk, here.shape[1] - 1]


def of_rank(heads: int, dim: int, batch: int, packed: bool, dtype: str) -> tuple[Any, Any, Any]:
    """A rank's rows, (batch, heads, rows, dim), or, packed, (rows, heads, dim); their log-sum-exps; and what
    they see."""
    mine = T.dynamic("mine")
    shape = (mine, heads, dim) if packed else (batch, heads, mine, dim)
    sums = (heads, mine) if packed else (batch, heads, mine)
    return T.Tensor(shape, dtype), T.Tensor(sums, "float32"), T.Tensor((2, mine), "int32")


def query_numbers(
    heads: int, dim: int, batch: int, rows: int, world: int, parts: int, packed: bool, dtype: str, tile: int,
    high: int, threads: int = 128,
) -> Any:  # fmt: skip
    """``Numbers``, as `numbers_of` describes them, of the queries of ``rank``: lse · log2 e and delta =
    rowsum(dO ∘ O), in float32."""
    chunks = Chunks(rows, world, parts)
    view, each = View(chunks, False, packed), chunks.each
    shape = numbers_of(chunks, batch * heads, high, tile)
    pieces, wide = shape[2], shape[3] // 2
    tiles = wide // tile  # of a piece
    own, sums, _ = of_rank(heads, dim, batch, packed, dtype)

    @T.macro
    def body(O, dO, Lse, Numbers, rank):
        with T.Kernel(tiles * pieces * parts, heads, batch, threads=threads) as (x, h, b):
            product, total = T.alloc_fragment((tile, dim), "float32"), T.alloc_fragment((tile,), "float32")
            part, piece, within = x // (tiles * pieces), x // tiles % pieces, x % tiles * tile
            chunk = chunks.chunk(rank, part)
            row, held = piece * high + within, view.held(chunk)
            at, head = part * each + row, b * heads + h
            for i, j in T.Parallel(tile, dim):
                if packed:
                    product[i, j] = T.cast(O[at + i, h, j], "float32") * T.cast(dO[at + i, h, j], "float32")
                else:
                    product[i, j] = T.cast(O[b, h, at + i, j], "float32") * T.cast(
                        dO[b, h, at + i, j], "float32"
                    )
            T.reduce_sum(product, total, dim=1)
            for i in T.Parallel(tile):
                there = T.all_of(row + i < held, within + i < high)
                lse = Lse[h, at + i] if packed else Lse[b, h, at + i]
                Numbers[chunk, head, piece, within + i] = T.if_then_else(
                    there, lse * LOG2_E, T.infinity("float32")
                )
                Numbers[chunk, head, piece, wide + within + i] = T.if_then_else(there, total[i], 0.0)

    @T.prim_func
    def ring_query_numbers(O: own, dO: own, Lse: sums, Numbers: T.Tensor(shape, "float32"), rank: T.int32):
        body(O, dO, Lse, Numbers, rank)

    return ring_query_numbers


def key_gradients(
    heads: int, kv_heads: int, dim: int, batch: int, rows: int, world: int, parts: int, packed: bool,
    dtype: str, scale: float, causal: bool, BM: int, BN: int, threads: int, stages: int, ahead: int,
    high: int, longest_first: bool,
) -> Any:  # fmt: skip
    """dK and dV of the keys of ``rank`` over the queries of the whole sequence, which lie in Q, dO and
    Numbers as far as they see them. A block has BN keys and walks over the heads that share them, BM queries
    at a time, its own rank's first. ``ahead``, ``longest_first``: as `attention_backward.key_gradients` has
    them."""
    s, chunks = Shape(heads, kv_heads, dim, packed, BM, wide_of(dim, True)), Chunks(rows, world, parts)
    view, each, wide = View(chunks, causal, packed, by_key=True), chunks.each, s.wide
    group = heads // kv_heads
    factor, per = scale * LOG2_E, ceil_div(each, BN)
    table = numbers_of(chunks, batch * heads, high, BM)
    deltas, careful = table[3] // 2, parts > 1 and each % BN > 0
    # in how many of a chunk's first rounds queries may lie in front of a key; those of other chunks than the
    # own never do
    hiding = ceil_div(BN, BM) + (BN % BM > 0) if causal else 0
    own, _, bounds = of_rank(kv_heads, dim, batch, packed, dtype)
    everyone = T.Tensor((world * parts, batch * heads, each, dim), dtype)
    # where a warpgroup has half of the queries, p and ds are handed over through shared memory
    left = T.alloc_fragment if BN % (threads // 2) == 0 else T.alloc_shared

    @T.macro
    def body(Q, K, V, dO, Numbers, Bounds, dK, dV, rank):
        with T.Kernel(*turned((parts * per, kv_heads, batch), 2 * longest_first), threads=threads) as axes:
            x, h, b = turned(axes, longest_first)
            k, v = T.alloc_shared((BN, wide), dtype), T.alloc_shared((BN, wide), dtype)
            q, g = T.alloc_shared((BM, wide), dtype), T.alloc_shared((BM, wide), dtype)
            lse_in, delta_in = T.alloc_shared((BM,), "float32"), T.alloc_shared((BM,), "float32")
            lse = T.alloc_fragment((BM,), "float32") if ahead > 0 else lse_in
            delta = T.alloc_fragment((BM,), "float32") if ahead > 1 else delta_in
            p, ds = T.alloc_fragment((BN, BM), "float32"), T.alloc_fragment((BN, BM), "float32")
            p_left, ds_left = left((BN, BM), dtype), left((BN, BM), dtype)
            dk, dv = T.alloc_fragment((BN, wide), "float32"), T.alloc_fragment((BN, wide), "float32")
            part, row = x // per, x % per * BN
            mine = chunks.chunk(rank, part)
            held, at = view.held(mine), part * each + row
            first, firsts, lasts, stop = view.seen(Bounds, mine, part, row, BN)
            T.copy(s.tile(K, b, h, at, BN), k)
            T.copy(s.tile(V, b, h, at, BN), v)
            if packed:
                begins, ends = T.alloc_fragment((BN,), "int32"), T.alloc_fragment((BN,), "int32")
                T.copy(Bounds[0, at], begins)
                T.copy(Bounds[1, at], ends)
            T.clear(dk)
            T.clear(dv)
            for step in T.serial(group * world * parts):
                chunk = chunks.chunk((rank + step // parts) % world, step % parts)
                head = (b * kv_heads + h) * group + step // (world * parts)
                start, last = chunk * each, view.held(chunk)
                tiles = T.ceildiv(T.clamp(stop - start, 0, last), BM)
                begin = T.if_then_else(
                    first < start + last, T.min(T.max(first - start, 0) // BM, tiles), tiles
                )
                for t in T.Pipelined(tiles - begin, num_stages=stages):
                    place = (begin + t) * BM
                    T.copy(Q[chunk, head, place, 0], q)
                    T.copy(Numbers[chunk, head, place // high, place % high], lse_in)
                    T.copy(dO[chunk, head, place, 0], g)
                    T.copy(Numbers[chunk, head, place // high, deltas + place % high], delta_in)
                    scored_keys((k, v, q, g), p, ds, (lse_in, delta_in), (lse, delta), ahead, factor)
                    if packed:
                        if T.any_of(start + place < firsts, start + place + BM > lasts):
                            for i, j in T.Parallel(BN, BM):
                                seen = T.all_of(begins[i] <= start + place + j, start + place + j < ends[i])
                                p[i, j] = T.if_then_else(seen, p[i, j], 0.0)
                    elif t < hiding:
                        for i, j in T.Parallel(BN, BM):
                            seen = mine * each + row + i <= start + place + j
                            p[i, j] = T.if_then_else(seen, p[i, j], 0.0)
                    summed_keys((q, g), p, ds, delta, p_left, ds_left, dk, dv)
            stored(dk, dK, (b, h, at), row, held, packed, careful, dtype, scale)
            stored(dv, dV, (b, h, at), row, held, packed, careful, dtype)

    numbers = T.Tensor(table, "float32")

    @T.prim_func
    def ring_key_gradients(
        Q: everyone, K: own, V: own, dO: everyone, Numbers: numbers, dK: own, dV: own,
        rank: T.int32,
    ):  # fmt: skip
        body(Q, K, V, dO, Numbers, None, dK, dV, rank)

    @T.prim_func
    def packed_ring_key_gradients(
        Q: everyone, K: own, V: own, dO: everyone, Numbers: numbers, dK: own, dV: own,
        rank: T.int32, Bounds: bounds,
    ):  # fmt: skip
        body(Q, K, V, dO, Numbers, Bounds, dK, dV, rank)

    return packed_ring_key_gradients if packed else ring_key_gradients


def query_gradients(
    heads: int, kv_heads: int, dim: int, batch: int, rows: int, world: int, parts: int, packed: bool,
    dtype: str, scale: float, causal: bool, tile: int, BM: int, BN: int, threads: int, stages: int,
    blocks: int, high: int, side: int,
) -> Any:  # fmt: skip
    """dQ of a rank's queries over the keys of the whole sequence, which lie in K and V when the launch ends,
    as far as they are seen, and in Qs, dOs and Numbers the queries that see the rank's keys. A block has BM
    queries and walks over BN keys at a time. ``tile``: queries of a tile in the table of numbers."""
    s, chunks = Shape(heads, kv_heads, dim, packed), Chunks(rows, world, parts)
    view, each, group, wide = View(chunks, causal, packed), chunks.each, heads // kv_heads, s.wide
    factor, per, pieces = scale * LOG2_E, ceil_div(each, BM), 2 * pieces_of(chunks, high)
    table = numbers_of(chunks, batch * heads, high, tile)
    deltas, careful = table[3] // 2, parts > 1 and each % BM > 0
    # in every round or in none: two loops would take so many registers that ptxas lets products run one after
    # another (C7511)
    hiding = causal or each % BN > 0 or rows % each > 0
    own, _, bounds = of_rank(heads, dim, batch, packed, dtype)
    everyone = T.SymmTensor((world * parts, batch * kv_heads, each, dim), dtype)
    others = T.SymmTensor((world * parts, batch * heads, each, dim), dtype)

    @T.macro
    def queries(Q, K, V, dO, Numbers, Bounds, here, dQ, x, b, h, rank):
        """The ``x``th tile of a rank's queries of a head."""
        q, g = T.alloc_shared((BM, wide), dtype), T.alloc_shared((BM, wide), dtype)
        k, v = T.alloc_shared((BN, wide), dtype), T.alloc_shared((BN, wide), dtype)
        p, ds = T.alloc_fragment((BM, BN), "float32"), T.alloc_fragment((BM, BN), "float32")
        left, dq = T.alloc_fragment((BM, BN), dtype), T.alloc_fragment((BM, wide), "float32")
        lse, delta = T.alloc_fragment((BM,), "float32"), T.alloc_fragment((BM,), "float32")
        part, row, head = x // per, x % per * BM, b * kv_heads + h // group
        mine = chunks.chunk(rank, part)
        held, at = view.held(mine), part * each + row
        first, firsts, lasts, stop = view.seen(Bounds, mine, part, row, BM)
        T.copy(s.tile(Q, b, h, at, BM), q)
        T.copy(s.tile(dO, b, h, at, BM), g)
        for i in T.Parallel(BM):
            lse[i] = Numbers[mine, b * heads + h, (row + i) // high, (row + i) % high]
            delta[i] = Numbers[mine, b * heads + h, (row + i) // high, deltas + (row + i) % high]
        if packed:
            begins, ends = T.alloc_fragment((BM,), "int32"), T.alloc_fragment((BM,), "int32")
            T.copy(Bounds[0, at], begins)
            T.copy(Bounds[1, at], ends)
        T.clear(dq)
        for step in T.serial(world * parts):
            owner = (rank - step // parts + world) % world
            chunk = chunks.chunk(owner, step % parts)
            start, last = chunk * each, view.held(chunk)
            tiles = T.ceildiv(T.clamp(stop - start, 0, last), BN)
            begin = T.if_then_else(first < start + last, T.max(first - start, 0) // BN, tiles)
            if owner != rank and begin < tiles:
                with T.Scale("device"):
                    T.wait(here[chunk, head], pieces)
            for t in T.Pipelined(tiles - begin, num_stages=stages):
                place = (begin + t) * BN
                T.copy(K[chunk, head, place, 0], k)
                T.copy(V[chunk, head, place, 0], v)
                T.gemm(q, k, p, transpose_B=True, clear_accum=True)
                T.gemm(g, v, ds, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(BM, BN):
                    p[i, j] = T.__exp2(p[i, j] * factor - lse[i])
                if packed:
                    hidden = T.any_of(start + place < firsts, start + place + BN > lasts, place + BN > last)
                    if hidden:
                        for i, j in T.Parallel(BM, BN):
                            seen = T.all_of(begins[i] <= start + place + j, start + place + j < ends[i])
                            p[i, j] = T.if_then_else(T.all_of(seen, place + j < last), p[i, j], 0.0)
                elif hiding:
                    for i, j in T.Parallel(BM, BN):
                        seen = mine * each + row + i - start if causal else last - 1
                        p[i, j] = T.if_then_else(place + j <= T.min(seen, last - 1), p[i, j], 0.0)
                summed_queries(k, p, ds, delta, left, dq)
        stored(dq, dQ, (b, h, at), row, held, packed, careful, dtype, scale)

    @T.macro
    def body(Q, K, V, dO, Qs, dOs, Numbers, Bounds, Seen, here, dQ):
        with T.Kernel(blocks, threads=threads) as block:
            rank = T.get_rank()
            with T.Scale("device") as (_, n):
                needed = view.needed(Bounds, rank)
                pull_all((K, V), (), counter(here), chunks, high, -1, block, blocks, rank, n, needed)
                needed = View(chunks, causal, packed, by_key=True).needed(Seen, rank)
                pull_all((Qs, dOs), (Numbers,), unseen(here), chunks, high, 1, block, blocks, rank, n, needed)
            for r in T.serial(turns(parts * per * heads * batch, block, blocks)):
                x, head = turn(r, block, blocks, parts * per, heads * batch, side)
                x = parts * per - 1 - x if causal else x  # the longest walks first
                queries(Q, K, V, dO, Numbers, Bounds, here, dQ, x, head // heads, head % heads, rank)

    numbers, counters = T.SymmTensor(table, "float32"), T.Signal((world * parts, batch * kv_heads + 1))

    @T.prim_func
    def ring_query_gradients(
        Q: own, K: everyone, V: everyone, dO: own, Qs: others, dOs: others, Numbers: numbers,
        here: counters, dQ: own,
    ):  # fmt: skip
        body(Q, K, V, dO, Qs, dOs, Numbers, None, None, here, dQ)

    @T.prim_func
    def packed_ring_query_gradients(
        Q: own, K: everyone, V: everyone, dO: own, Qs: others, dOs: others, Numbers: numbers,
        here: counters, dQ: own, Bounds: bounds, Seen: bounds,
    ):  # fmt: skip
        body(Q, K, V, dO, Qs, dOs, Numbers, Bounds, Seen, here, dQ)

    return packed_ring_query_gradients if packed else ring_query_gradients
