"""The tile program of ring attention, and what its gradients' programs share with it.

Symmetric tensors hold chunks of the whole sequence, (chunks, heads, rows of a chunk, columns); a rank has its
own when the launch begins. Blocks begin to pull the others' in the order in which they will walk over them,
and have a counter for each chunk and head.

Who releases and who acquires: a rank's own chunks are written by its stream in front of the launch, whose
entry flag releases them; whoever pulls has awaited that flag. A pull's signal releases what arrived to the
own rank, and the wait in front of a chunk's first tile acquires all of its pieces. Nobody writes a chunk
while a launch runs, and the launch is complete on a rank when everyone has pulled from it: so its stream may
write the next ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tilescale.language as T
from tilescale.ops.attention import FULL_ROW, LOG2_E, Tile, begun, divided, exponentials, turn, turns
from tilescale.ops.attention_shapes import Shape
from tilescale.ops.gemm_kernels import ceil_div
from tilescale.ops.ranks.sequence import Chunks


def pieces_of(chunks: Chunks, high: int) -> int:
    """Into how many pieces of ``high`` rows a chunk of a head is cut."""
    return ceil_div(chunks.each, high)


def counter(here: Any) -> Callable[[Any, Any], Any]:
    """A counter for each chunk and head."""
    return lambda chunk, head: here[chunk, head]


@T.macro
def pull(X, at, rows, src, signal):
    """``rows`` rows of a head's chunk, from the same place at another rank."""
    chunk, head, row = at
    theirs = X[chunk, head, row : row + rows, 0 : X.shape[3]]
    T.copy(theirs, theirs, src=src, signal=signal, blocking=False)


@T.macro
def pull_all(
    Xs: Any, by_piece: Any, counter: Callable[[Any, Any], Any], chunks: Chunks, high: int, step: int,
    block: Any, blocks: int, rank: Any, n: Any, needed: Callable[[Any], Any],
):  # fmt: skip
    """This block's pieces of the others' chunks that are ``needed``: one head's chunks behind another's, the
    next rank's first (``step`` ranks further), then those behind it. ``by_piece``: tensors with one row for
    each piece. ``counter``: which one a pull of a chunk and head signals."""
    each, heads, parts, world = chunks.each, Xs[0].shape[1], chunks.parts, chunks.world
    pieces = pieces_of(chunks, high)
    of_rank = parts * pieces
    of_head = (world - 1) * of_rank
    for k in T.serial(ceil_div(heads * of_head, blocks)):
        piece = k * blocks + block
        hop, row = piece % of_head // of_rank + 1, piece % pieces * high
        owner = (rank + hop * step + world) % world
        chunk = chunks.chunk(owner, piece % of_rank // pieces)
        head = piece // of_head
        if piece < heads * of_head and needed(chunk):
            for X in by_piece:
                pull(X, (chunk, head, piece % pieces), 1, owner % n, counter(chunk, head))
            # bounds that show that a pull ends inside: spare warps make those alone
            if row + high <= each:
                for X in Xs:
                    pull(X, (chunk, head, row), high, owner % n, counter(chunk, head))
            if each % high and row + high > each:
                for X in Xs:
                    pull(X, (chunk, head, row), each % high, owner % n, counter(chunk, head))


@dataclass(frozen=True)
class View:
    """Which keys a rank's queries see, or, with ``by_key``, which queries see a rank's keys: in places of the
    sequence, of several rows together. Packed, ``Bounds`` has for each row of the rank the first place, and
    the one behind the last."""

    chunks: Chunks
    causal: bool
    packed: bool
    by_key: bool = False

    def held(self, chunk: Any) -> Any:
        """How many rows a chunk has."""
        c = self.chunks
        if c.rows == c.each * c.world * c.parts:
            return c.each
        return T.max(0, T.min(c.each, c.rows - chunk * c.each))

    def seen(self, Bounds: Any, chunk: Any, part: Any, row: Any, count: int) -> tuple[Any, ...]:
        """Of ``count`` rows from ``row`` of the rank's chunk on: the first and the last of their first
        places, the first and the last of the places behind their last ones, which is 0 where no such row
        is."""
        c = self.chunks
        at, rows = chunk * c.each + row, self.held(chunk)
        end = chunk * c.each + T.min(row + count, rows)
        if self.packed:
            low, high = part * c.each + row, part * c.each + T.min(row + count, rows) - 1
            most = T.if_then_else(row < rows, Bounds[1, high], 0)
            return Bounds[0, low], Bounds[0, high], Bounds[1, low], most
        if self.by_key:
            most = T.if_then_else(row < rows, c.rows, 0)
            return (at, end - 1, c.rows, most) if self.causal else (0, 0, c.rows, most)
        least, most = (at + 1, end) if self.causal else (c.rows, c.rows)
        return 0, 0, least, T.if_then_else(row < rows, most, 0)

    def needed(self, Bounds: Any, rank: Any) -> Callable[[Any], Any]:
        """Whether any of the rank's rows sees a chunk, or is seen by it."""
        c = self.chunks
        if not (self.causal or self.packed):
            return lambda chunk: self.held(chunk) > 0
        spans = [self.seen(Bounds, c.chunk(rank, p), p, 0, c.each) for p in range(c.parts)]

        def needed(chunk: Any) -> Any:
            first = chunk * c.each
            return T.any_of(*(T.all_of(first < s[3], first + c.each > s[0]) for s in spans))

        return needed


@T.macro
def stored(x, To, at, row, held, packed, careful, dtype, times=1.0):
    """Rows of a fragment, so many times, to the rank's rows of a sequence and head ``at``, as far as ``row``
    and those behind it are the chunk's. ``careful``: another chunk's rows may begin in this tile."""
    b, h, first = at
    rows, dim = x.shape[0], To.shape[-1]
    if times != 1.0:
        for i, j in T.Parallel(*x.shape):
            x[i, j] *= times
    if packed:
        for i, j in T.Parallel(rows, dim):
            if row + i < held:
                To[first + i, h, j] = T.cast(x[i, j], dtype)
    elif careful:
        for i, j in T.Parallel(rows, dim):
            if row + i < held:
                To[b, h, first + i, j] = T.cast(x[i, j], dtype)
    else:
        T.copy(x, To[b, h, first, 0])


def ring(
    heads: int, kv_heads: int, dim: int, batch: int, rows: int, world: int, parts: int, packed: bool,
    dtype: str, scale: float, causal: bool, BM: int, BN: int, threads: int, stages: int, blocks: int,
    high: int, side: int,
) -> Any:  # fmt: skip
    """O and the log-sum-exps of a rank's queries over the keys of the whole sequence, which lie in K and V
    when the launch ends, as far as they are seen."""
    s, chunks = Shape(heads, kv_heads, dim, packed), Chunks(rows, world, parts)
    view, each, wide = View(chunks, causal, packed), chunks.each, s.wide
    factor, low = scale * LOG2_E, -T.infinity("float32")
    per, pieces = ceil_div(each, BM), 2 * pieces_of(chunks, high)
    # in how many of a chunk's first rounds keys are hidden; those of other chunks than the own never are
    hiding = Tile(BM, BN, threads).hiding if causal else int(each % BN > 0 or rows % each > 0)
    mine = T.dynamic("mine")
    q_shape = (mine, heads, dim) if packed else (batch, heads, mine, dim)
    sums = (heads, mine) if packed else (batch, heads, mine)
    keys = T.SymmTensor((world * parts, batch * kv_heads, each, dim), dtype)

    @T.macro
    def queries(Q, K, V, Bounds, here, O, Lse, x, b, h, rank):
        """The ``x``th tile of a rank's queries of a head."""
        q, k, v = (T.alloc_shared((n, wide), dtype) for n in (BM, BN, BN))
        score, p, o = (
            T.alloc_fragment((BM, BN), "float32"),
            T.alloc_fragment((BM, BN), dtype),
            T.alloc_fragment((BM, wide), "float32"),
        )
        top, base, shrink, total = (T.alloc_fragment((BM,), "float32") for _ in range(4))
        part, row, head = x // per, x % per * BM, b * kv_heads + h // (heads // kv_heads)
        mine = chunks.chunk(rank, part)
        held, at = view.held(mine), part * each + row
        first, firsts, lasts, stop = view.seen(Bounds, mine, part, row, BM)
        T.copy(s.tile(Q, b, h, at, BM), q)
        if packed:
            begins, ends = T.alloc_fragment((BM,), "int32"), T.alloc_fragment((BM,), "int32")
            T.copy(Bounds[0, at], begins)
            T.copy(Bounds[1, at], ends)
        begun(o, top, base, total)
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
                place = (tiles - 1 - t) * BN
                T.copy(K[chunk, head, place, 0], k)
                T.copy(V[chunk, head, place, 0], v)
                T.gemm(q, k, score, transpose_B=True, clear_accum=True, policy=FULL_ROW)
                if packed:
                    hidden = T.any_of(start + place < firsts, start + place + BN > lasts, place + BN > last)
                    if hidden:
                        for i, j in T.Parallel(BM, BN):
                            seen = T.all_of(begins[i] <= start + place + j, start + place + j < ends[i])
                            score[i, j] = T.if_then_else(T.all_of(seen, place + j < last), score[i, j], low)
                elif t < hiding:
                    for i, j in T.Parallel(BM, BN):
                        seen = mine * each + row + i - start if causal else last - 1
                        score[i, j] = T.if_then_else(place + j <= T.min(seen, last - 1), score[i, j], low)
                exponentials(score, p, o, top, base, shrink, total, factor)
                T.gemm(p, v, o, policy=FULL_ROW)
        divided(o, top, base, total)
        careful = parts > 1 and each % BM > 0
        stored(o, O, (b, h, at), row, held, packed, careful, dtype)
        if packed:
            for i in T.Parallel(BM):
                if row + i < held:
                    Lse[h, at + i] = top[i]
        elif careful:
            for i in T.Parallel(BM):
                if row + i < held:
                    Lse[b, h, at + i] = top[i]
        else:
            T.copy(top, Lse[b, h, at])

    @T.macro
    def body(Q, K, V, Bounds, here, O, Lse):
        with T.Kernel(blocks, threads=threads) as block:
            rank = T.get_rank()
            with T.Scale("device") as (_, n):
                needed = view.needed(Bounds, rank)
                pull_all((K, V), (), counter(here), chunks, high, -1, block, blocks, rank, n, needed)
            for r in T.serial(turns(parts * per * heads * batch, block, blocks)):
                x, head = turn(r, block, blocks, parts * per, heads * batch, side)
                x = parts * per - 1 - x if causal else x  # the longest walks first
                queries(Q, K, V, Bounds, here, O, Lse, x, head // heads, head % heads, rank)

    counters = T.Signal((world * parts, batch * kv_heads))

    @T.prim_func
    def ring_attention(
        Q: T.Tensor(q_shape, dtype), K: keys, V: keys, here: counters, O: T.Tensor(q_shape, dtype),
        Lse: T.Tensor(sums, "float32"),
    ):  # fmt: skip
        body(Q, K, V, None, here, O, Lse)

    @T.prim_func
    def packed_ring_attention(
        Q: T.Tensor(q_shape, dtype), K: keys, V: keys, here: counters, O: T.Tensor(q_shape, dtype),
        Lse: T.Tensor(sums, "float32"), Bounds: T.Tensor((2, mine), "int32"),
    ):  # fmt: skip
        body(Q, K, V, Bounds, here, O, Lse)

    return packed_ring_attention if packed else ring_attention
