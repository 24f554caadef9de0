"""``flash_attention(q, k, v)``: softmax(scale · q·kᵀ)·v, without ever holding the matrix of scores (Dao,
"FlashAttention-2", 2023, §3.1).

A block has BM queries of one head and walks over the keys, BN at a time, with the greatest score, the sum of
exponentials and the output so far; where a score exceeds those before by much, what was summed shrinks. The
walk goes from the last tile of keys to the first: with a causal mask the block's own keys come first, and
only the first rounds hide anything. Blocks of one head stand side by side, so that its keys and values stay
in the L2 cache, those with the longest walk first. Blocks that stay take tiles in an order that gives each as
much to do.

Powers of two are one instruction, and so the scores are scaled by log2(e) on top. T.__exp2 is ex2.approx, off
by 2 units of float32's last place, 2⁻²² of the result; the exponentials are rounded to the inputs' dtype
before they are multiplied, by 2⁻⁹ or 2⁻¹².
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

import tilescale.language as T
from tilescale.errors import TileTypeError, TileValueError
from tilescale.ops import host
from tilescale.ops.attention_shapes import (
    DTYPES,
    LOG2_E,
    Shape,
    by_tokens,
    folded,
    hidden,
    rows_of_head,
    sequences,
)
from tilescale.ops.case import ROUNDING, Case, Expected, Op, expected, generator, normal, summed

FULL_ROW = T.GemmWarpPolicy.FullRow
#: exponents of two are counted from a score that was greatest once, as long as none exceeds it by more: the
#: exponentials stay below 2^8
SLACK = 8.0
#: below every score that is a number
LEAST = -3.0e38


# ---- the kernel


@dataclass(frozen=True)
class Tile:
    """Queries and keys of a tile, the block's threads, how many tiles of keys and of values are under way;
    with ``blocks`` so many blocks share all tiles of queries, and copy what the next one needs while they
    finish the one before."""

    BM: int
    BN: int
    threads: int
    stages: int = 2
    blocks: int = 0

    @property
    def hiding(self) -> int:
        """In how many of the first rounds a causal mask hides keys: those whose tile reaches beyond the
        block's first query."""
        starts = range(0, self.BM * self.BN, self.BM)
        return max(
            sum((t + 1) * self.BN - 1 > m for t in range(-(-(m + self.BM) // self.BN))) for m in starts
        )


def share_of(tiles: Any, part: Any, parts: int) -> tuple[Any, Any]:
    """Where a part of the tiles of keys begins, and where it ends."""
    each = T.ceildiv(tiles, parts)
    return T.min(part * each, tiles), T.min((part + 1) * each, tiles)


@T.macro
def begun(o, top, base, total):
    """Nothing summed yet."""
    T.fill(top, -T.infinity("float32"))
    T.fill(base, LEAST)
    T.clear(total)
    T.clear(o)


@T.macro
def exponentials(score, p, o, top, base, shrink, total, factor):
    """A round's scores times ``factor`` as powers of two, rounded into p and added to ``total``; what was
    summed before shrinks where a score exceeds those before by much."""
    rows, keys = score.shape
    T.reduce_max(score, top, dim=1, clear=False, nan_propagate=True)
    for i in T.Parallel(rows):
        exceeds = top[i] * factor > base[i] + SLACK
        shrink[i] = T.if_then_else(exceeds, T.__exp2(base[i] - top[i] * factor), 1.0)
        base[i] = T.if_then_else(exceeds, top[i] * factor, base[i])
        total[i] *= shrink[i]
    for i, j in T.Parallel(rows, keys):
        score[i, j] = T.__exp2(score[i, j] * factor - base[i])
    T.reduce_sum(score, total, dim=1, clear=False)
    for i, j in T.Parallel(*o.shape):
        if shrink[i] != 1.0:
            o[i, j] *= shrink[i]
    T.copy(score, p)


@T.macro
def divided(o, top, base, total):
    """The output from what was summed, and in ``top`` its log-sum-exps."""
    for i in T.Parallel(o.shape[0]):
        top[i] = (base[i] + T.log2(total[i])) / LOG2_E
        total[i] = T.if_then_else(total[i] == 0.0, 0.0, 1.0 / total[i])
    for i, j in T.Parallel(*o.shape):
        o[i, j] *= total[i]


def turns(count: Any, block: Any, blocks: Any) -> Any:
    """How many of ``count`` tiles a block that stays takes, of ``blocks``."""
    whole = count // blocks
    last = T.if_then_else(whole % 2 == 0, block, blocks - 1 - block) < count - blocks * whole
    return whole + T.if_then_else(last, 1, 0)


def turn(n: Any, block: Any, blocks: Any, each: Any, heads: Any, side: Any) -> tuple[Any, Any]:
    """The ``n``th of those, of ``each`` a head: its place among the head's, and the head. The first tiles of
    ``side`` heads first, then the next heads; every other round of blocks from the end."""
    at = n * blocks + T.if_then_else(n % 2 == 0, block, blocks - 1 - block)
    first = at // (side * each) * side
    k, beside = at - first * each, T.min(side, heads - first)
    return k // beside, first + k % beside


def attention(
    heads: int,
    kv_heads: int,
    dim: int,
    packed: bool,
    dtype: str,
    scale: float,
    causal: bool,
    tile: Tile,
    parts: int = 1,
    by_token: bool = False,
) -> Any:
    """O and the log-sum-exps of the scores for queries, keys and values as `Shape` describes them; of
    ``parts`` of the keys one behind the other, for all sequences each, and float32."""
    s, low = Shape(heads, kv_heads, dim, packed, by_token=by_token), -T.infinity("float32")
    BM, BN, factor, wide = tile.BM, tile.BN, scale * LOG2_E, s.wide

    @T.macro
    def queries(Q, K, V, O, Lse, q_starts, k_starts, tiles_of_queries, x, h, b, to):
        """One tile of queries of a head for O[to], the ``x``th but one to the last with a causal mask: the
        longest walk comes first."""
        q, k, v = (
            T.alloc_shared((BM, wide), dtype),
            T.alloc_shared((BN, wide), dtype),
            T.alloc_shared((BN, wide), dtype),
        )
        score, p, o = (
            T.alloc_fragment((BM, BN), "float32"),
            T.alloc_fragment((BM, BN), dtype),
            T.alloc_fragment((BM, wide), "float32"),
        )
        top, base, shrink, total = (T.alloc_fragment((BM,), "float32") for _ in range(4))
        q_first, q_count = s.span(q_starts, b, s.queries)
        k_first, k_count = s.span(k_starts, b, s.keys)
        row = (tiles_of_queries - 1 - x if causal else x) * BM
        seen = T.min(row + BM, k_count) if causal else k_count
        tiles = T.ceildiv(T.if_then_else(row < q_count, seen, 0) if packed else seen, BN)
        begin, tiles = share_of(tiles, to // s.batch, parts) if parts > 1 else (0, tiles)
        T.copy(s.tile(Q, b, h, q_first + row, BM), q)
        begun(o, top, base, total)
        for t in T.Pipelined(tiles - begin if parts > 1 else tiles, num_stages=tile.stages):
            at = (tiles - 1 - t) * BN
            T.copy(s.tile(K, b, h // (heads // kv_heads), k_first + at, BN), k)
            T.copy(s.tile(V, b, h // (heads // kv_heads), k_first + at, BN), v)
            T.gemm(q, k, score, transpose_B=True, clear_accum=True, policy=FULL_ROW)
            if t < tile.hiding if causal else t < 1 and k_count % BN != 0:
                for i, j in T.Parallel(BM, BN):
                    last = T.min(row + i, k_count - 1) if causal else k_count - 1
                    score[i, j] = T.if_then_else(at + j <= last, score[i, j], low)
            exponentials(score, p, o, top, base, shrink, total, factor)
            T.gemm(p, v, o, policy=FULL_ROW)
        divided(o, top, base, total)
        if packed:
            for i, j in T.Parallel(BM, dim):
                if row + i < q_count:
                    O[q_first + row + i, h, j] = T.cast(o[i, j], dtype)
            for i in T.Parallel(BM):
                if row + i < q_count:
                    Lse[h, q_first + row + i] = top[i]
        else:
            T.copy(o, s.of_token(O, to, h, row, BM))
            T.copy(top, Lse[to, h, row])

    rows, keys, sums = (
        s.rows(s.queries, heads),
        s.rows(s.keys, kv_heads),
        (heads, s.queries) if packed else (s.batch, heads, s.queries),
    )
    results, kind = s.of_tokens(heads), dtype
    if parts > 1:
        results, kind, sums = (made := T.dynamic("made"), *rows[1:]), "float32", (made, *sums[1:])

    @T.prim_func
    def flash_attention(
        Q: T.Tensor(rows, dtype),
        K: T.Tensor(keys, dtype),
        V: T.Tensor(keys, dtype),
        O: T.Tensor(results, kind),
        Lse: T.Tensor(sums, "float32"),
        side: T.int32,
    ):
        each, every = T.ceildiv(s.queries, BM), heads * s.batch
        if not tile.blocks:
            with T.Kernel(each, heads, s.batch * parts, threads=tile.threads) as (x, h, to):
                queries(Q, K, V, O, Lse, None, None, each, x, h, to % s.batch if parts > 1 else to, to)
        else:
            with T.Kernel(T.min(tile.blocks, each * every), threads=tile.threads) as block:
                blocks = T.min(tile.blocks, each * every)
                for n in T.serial(turns(each * every, block, blocks)):
                    x, head = turn(n, block, blocks, each, every, side)
                    b = head // heads
                    queries(Q, K, V, O, Lse, None, None, each, x, head % heads, b, b)

    @T.prim_func
    def packed_flash_attention(
        Q: T.Tensor(rows, dtype),
        K: T.Tensor(keys, dtype),
        V: T.Tensor(keys, dtype),
        O: T.Tensor(rows, dtype),
        Lse: T.Tensor(sums, "float32"),
        Starts: T.Tensor((s.ends,), "int32"),
        Begins: T.Tensor((s.ends,), "int32"),
        most: T.int32,
    ):
        with T.Kernel(T.ceildiv(most, BM), heads, s.batch, threads=tile.threads) as (x, h, b):
            queries(Q, K, V, O, Lse, Starts, Begins, T.ceildiv(most, BM), x, h, b, b)

    return packed_flash_attention if packed else flash_attention


def joined(dim: int, dtype: str, parts: int, rows: int = 8, threads: int = 128, pdl: bool = True) -> Any:
    """The results of all keys from those of ``parts`` parts of them, each weighted by its sum of
    exponentials; parts without keys have none."""
    count, low = T.dynamic("count"), -T.infinity("float32")

    @T.prim_func
    def joined_attention(
        P: T.Tensor((parts, count, dim), "float32"),
        L: T.Tensor((parts, count), "float32"),
        O: T.Tensor((count, dim), dtype),
        Lse: T.Tensor((count,), "float32"),
    ):
        with T.Kernel(T.ceildiv(count, rows), threads=threads, pdl=pdl) as bx:
            top, total = T.alloc_fragment((rows,), "float32"), T.alloc_fragment((rows,), "float32")
            o = T.alloc_fragment((rows, dim), "float32")
            T.fill(top, low)
            T.clear(total)
            T.clear(o)
            for i in T.Parallel(rows):
                for p in range(parts):
                    top[i] = T.max(top[i], L[p, bx * rows + i])
            for i in T.Parallel(rows):
                for p in range(parts):
                    total[i] += T.if_then_else(top[i] == low, 0.0, T.exp(L[p, bx * rows + i] - top[i]))
            for i, j in T.Parallel(rows, dim):
                for p in range(parts):
                    o[i, j] += P[p, bx * rows + i, j] * T.if_then_else(
                        top[i] == low, 0.0, T.exp(L[p, bx * rows + i] - top[i])
                    )
            for i, j in T.Parallel(rows, dim):
                O[bx * rows + i, j] = T.cast(T.if_then_else(total[i] == 0.0, 0.0, o[i, j] / total[i]), dtype)
            for i in T.Parallel(rows):
                Lse[bx * rows + i] = top[i] + T.log(total[i])

    return joined_attention


# ---- what people call


#: tiles of queries a head up to which blocks stay under a causal mask; of more the longest first, as they
#: come, balance better
FEW = 64


#: keys in as many parts as fill the GPU, at most
PARTS = 16


def parts_of(queries: int, keys: int, heads: int, tile: Tile, units: int) -> int:
    """In how many parts of the keys blocks share the work where tiles of queries are too few for ``units``
    multiprocessors."""
    return max(1, min(units // (-(-queries // tile.BM) * heads), -(-keys // tile.BN) // 2, PARTS))


#: keys up to which tiles of few rows are better than shares of the keys, which a second kernel joins
SHORT = 2048
#: what a round costs beside the products of its keys: as much as so many more
ROUND = 32


def keys_of_tile(most: int, keys: int) -> int:
    """How many keys a tile has, of ``most``, 64 and, for a handful, 16: few rounds, and few keys that are
    none."""
    return min((most, 64, 16), key=lambda n: -(-keys // n) * (n + ROUND))


@functools.lru_cache(maxsize=4096)
def tile_of(
    dim: int,
    causal: bool = False,
    each: int = 0,
    blocks: int = 0,
    queries: int = 1 << 30,
    keys: int = 1 << 30,
    heads: int = 1 << 30,
    units: int = 132,
    packed: bool = False,
) -> Tile:
    """The tile for a head dimension, as registers and shared memory have room: a warpgroup has 64 rows of o,
    of the scores and of p. Blocks of one warpgroup, of which several fit side by side, where 64 rows hold all
    queries, where packed sequences are too short to fill 128, where keys are one round, and where tiles of
    128 are too few for the GPU under a causal mask or with short walks.

    Args:
        each: tiles of 128 queries that a head has. blocks: how many may stay; 0: none do. Where o has 256
            columns and a causal mask ends in the second round, registers do not suffice for blocks that stay.
        queries, keys: the most of a sequence. heads: of all sequences together. units: multiprocessors.
    """
    few = (causal or keys <= SHORT) and 2 * -(-queries // 128) * heads <= units
    if queries <= 64 or keys <= 64 or few or packed and queries <= 128:
        BN = keys_of_tile(128 if dim <= 128 and not (packed and queries > 64) else 64, keys)
        if keys <= BN == 16 and dim > 192:
            return Tile(64, BN, 128, 0)  # a producer's warp would keep a second block off the multiprocessor
        return Tile(64, BN, 128, 1 if keys <= BN else 2)
    if dim <= 64:
        return Tile(192, 128, 384, blocks=0 if causal and each > FEW else blocks)
    if dim <= 128:
        return Tile(128, 128, 256, blocks=0 if causal and each > FEW else blocks)
    # a causal mask's last round is the shorter, the fewer keys it has: what that saves is more than what
    # fewer rounds do
    most = 64 if causal or dim > 192 else 112 if dim <= 160 else 96 if dim <= 176 else 80
    return Tile(128, keys_of_tile(most, keys), 256, blocks=0 if causal else blocks)


#: bytes of keys and values that stay in the L2 cache while other blocks read them
NEAR = 32 << 20


@functools.cache
def beside(heads: int, queries: int, keys: int, dim: int, tile: Tile) -> int:
    """How many heads' tiles blocks that stay go through together under a causal mask, the longest walks
    first: so many that what falls to a block is as much as what falls to any other, few enough that their
    keys and values stay near."""
    each = -(-queries // tile.BM)
    at, best = torch.arange(heads * each), (float("inf"), 1)
    blocks = min(tile.blocks, len(at))
    for side in range(1, max(1, min(heads, NEAR // (4 * dim * keys + 1))) + 1):
        first = at // (side * each) * side
        row = (each - 1 - (at - first * each) // (heads - first).clamp(max=side)) * tile.BM
        walk = (row + tile.BM).clamp(
            max=keys
        ) / tile.BN + 1  # beginning and end of a tile take as long as a round
        rounds = torch.nn.functional.pad(walk, (0, -len(at) % blocks)).reshape(-1, blocks)
        rounds[1::2] = rounds[1::2].flip(1)
        best = min(best, (float(rounds.sum(0).max()), side))
    return best[1]


@host.checked
def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    q_starts: torch.Tensor | None = None,
    k_starts: torch.Tensor | None = None,
    longest: int | None = None,
    tile: Tile | None = None,
    by_token: bool = False,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale · q·kᵀ)·v of the inputs' dtype, and the logarithms of the sums of exp(scale · scores),
    float32, which the gradients need (`attention_gradients` computes them; torch's autograd does not know
    this function). A query that sees no key gives zeros and -inf.

    Args:
        q: (batch, heads, queries, dim) of bfloat16 or float16. k, v: (batch, kv_heads, keys, dim); each of
            them serves heads / kv_heads neighbouring heads. dim is a multiple of 8, 256 at most.
        causal: query i sees the keys up to its own place i.
        scale: of the scores, positive; dim ** -0.5 without. q_starts, k_starts: sequences of different
        lengths, packed: q is (tokens, heads, dim), k and v (tokens, kv_heads, dim), the second
            result (heads, tokens), and starts (batch + 1,) int32 say where each sequence begins and the last
            ends. longest: the most queries of a sequence. What a sequence's neighbours hold must be finite:
            it is multiplied by zero.
        tile: another tile than the one for the head dimension.
        by_token: the first result is (batch, queries, heads, dim), rows of tokens as a product takes them;
            few queries do not share the work by parts of the keys then. Packed ones are so anyway.
        out: takes the results.

    Raises:
        TileValueError, TileTypeError: shapes or dtypes that do not fit.
    """
    packed, dtype = q_starts is not None, host.dtype_name(q)
    if dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        dtypes = f"flash_attention of {dtype}, {host.dtype_name(k)}, {host.dtype_name(v)}"
        raise TileTypeError(dtypes, expected="one of " + ", ".join(DTYPES))

    def shapes() -> str:
        return f"flash_attention of q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"

    if (
        q.dim() != (3 if packed else 4)
        or k.dim() != q.dim()
        or k.shape != v.shape
        or q.shape[-1] != k.shape[-1]
    ):
        raise TileValueError(shapes(), expected="k and v alike, with q's number of axes and head dimension")
    heads, kv_heads, dim = q.shape[1], k.shape[1], q.shape[-1]
    if heads % kv_heads or dim % 8 or dim > 256 or not packed and q.shape[0] != k.shape[0]:
        raise TileValueError(
            shapes(),
            expected="heads a multiple of k's, a head dimension that is a multiple of 8 up to 256, one batch",
        )
    if packed and (
        k_starts is None or longest is None or q_starts is None or k_starts.shape != q_starts.shape
    ):
        raise TileValueError(
            "packed sequences need q_starts, k_starts and longest",
            expected="starts of one shape, (batch + 1,) int32",
        )
    if packed and by_token:
        raise TileValueError("by_token of packed sequences", expected="one of the two: those are by token")
    if scale is not None and not scale > 0:
        raise TileValueError(f"scale={scale}", expected="a positive number")
    if not all(t.is_contiguous() for t in (q, k, v)):
        raise TileValueError("a tensor is not contiguous", expected="contiguous tensors")
    numbers = (heads, q.shape[0]) if packed else tuple(q.shape[:3])
    to = out or (None, None)
    o, lse = (
        host.result(to[0], by_tokens(q.shape) if by_token else tuple(q.shape), q.dtype, q),
        host.result(to[1], numbers, torch.float32, q, "lse"),
    )
    given, units = (o, lse), host.multiprocessors(q.device)
    if not packed and not by_token:
        heads, kv_heads, (q, o, lse), (k, v) = folded(causal, (q, o, lse), (k, v))
    what = {
        "heads": heads,
        "kv_heads": kv_heads,
        "dim": dim,
        "packed": packed,
        "dtype": dtype,
        "causal": causal,
    }
    what["scale"] = float(scale or dim**-0.5)
    stay = 0 if packed or q.device.type != "cuda" else units
    queries, keys = longest if longest is not None else q.shape[-2], k.shape[-2]
    every = (len(q_starts) - 1 if q_starts is not None else len(q)) * heads
    # packed keys: nobody says how many the longest has; of as many tokens as the queries' they are the
    # queries' own
    most = min(len(k), queries) if packed and len(q) == len(k) else len(k) if packed else keys
    asked, tile = (
        tile,
        tile or tile_of(dim, causal, -(-queries // 128), stay, queries, most, every, units, packed),
    )
    parts = (
        1 if packed or causal or asked or by_token else parts_of(queries, keys, len(q) * heads, tile, units)
    )
    if parts > 1:
        part = torch.empty(parts * len(q), *q.shape[1:], dtype=torch.float32, device=q.device)
        sums = torch.empty(parts * len(q), *lse.shape[1:], dtype=torch.float32, device=q.device)
        host.launch(attention, (q, k, v, part, sums, 1), **what, tile=replace(tile, blocks=0), parts=parts)
        all_parts = part.view(parts, -1, dim), sums.view(parts, -1), o.view(-1, dim), lse.view(-1)
        host.launch(joined, all_parts, dim=dim, dtype=dtype, parts=parts)
        return given
    side = 1 if packed or not causal or not tile.blocks else beside(len(q) * heads, queries, keys, dim, tile)
    more = (q_starts, k_starts, longest) if packed else (side,)
    host.launch(attention, (q, k, v, o, lse, *more), **what, tile=tile, by_token=by_token)
    return given


# ---- what is right, and what it is measured against


def draw(
    batch: int,
    heads: int,
    length: int,
    dim: int,
    kv_heads: int = 0,
    keys: int = 0,
    causal: bool = False,
    packed: bool = False,
    dtype: str = "bfloat16",
    tile: Tile | None = None,
    by_token: bool = False,
    device: Any = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Normal random inputs. Packed: lengths from one up to ``length`` and ``keys``, one sequence without
    keys."""
    g, kv_heads, keys = generator(device, seed), kv_heads or heads, keys or length
    if not packed:
        shape, other = (batch, heads, length, dim), (batch, kv_heads, keys, dim)
        asked: dict[str, Any] = {"tile": tile} if tile else {}
        asked |= {"by_token": True} if by_token else {}
        return {
            "q": normal(shape, dtype, g),
            "k": normal(other, dtype, g),
            "v": normal(other, dtype, g),
            "causal": causal,
            **asked,
        }
    counts = [sequences(length, batch, True, g), sequences(keys, batch, True, g)]
    counts[1][batch // 2] = 0
    q_starts, k_starts = (torch.tensor([0, *c], device=device).cumsum(0).to(torch.int32) for c in counts)
    q, (k, v) = (
        normal((sum(counts[0]), heads, dim), dtype, g),
        (normal((sum(counts[1]), kv_heads, dim), dtype, g) for _ in range(2)),
    )
    return {
        "q": q,
        "k": k,
        "v": v,
        "causal": causal,
        "q_starts": q_starts,
        "k_starts": k_starts,
        "longest": max(counts[0]),
    }


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, q_starts: torch.Tensor | None = None,
    k_starts: torch.Tensor | None = None, longest: int | None = None, tile: Tile | None = None,
    by_token: bool = False,
) -> tuple[Expected, ...]:  # fmt: skip
    """In float64. Scores are off as sums in float32 and by the roundings of their scale, exponentials by
    those and by ex2's, and are rounded to the inputs' dtype before they are multiplied, which adds up as a
    root."""
    unit, scale, group = ROUNDING[q.dtype], q.shape[-1] ** -0.5, q.shape[1] // k.shape[1]
    numbers = (q.shape[1], q.shape[0]) if q_starts is not None else q.shape[:3]
    o, off = (torch.zeros(q.shape, dtype=torch.float64, device=q.device) for _ in range(2))
    lse, lse_off = (torch.zeros(numbers, dtype=torch.float64, device=q.device) for _ in range(2))
    for b in range(len(q_starts) - 1 if q_starts is not None else q.shape[0]):
        for h in range(q.shape[1]):
            x = rows_of_head(q, q_starts, b, h).double()
            key, value = (rows_of_head(t, k_starts, b, h // group).double() for t in (k, v))
            s = x @ key.T * scale
            unseen = (
                hidden(s.shape[0], s.shape[1], q.device) if causal else torch.zeros_like(s, dtype=torch.bool)
            )
            rough = (summed(x.abs() @ key.abs().T * scale, x.shape[1]) + s.abs() * 2.0**-21).masked_fill(
                unseen, 0.0
            )
            s.masked_fill_(unseen, -torch.inf)
            total = s.logsumexp(-1)
            p = torch.where(unseen, 0.0, (s - total[:, None]).exp())
            most = rough.amax(-1) if s.shape[1] else total * 0
            noise = p * (rough + most[:, None] + 2.0**-19)
            rounded = unit * torch.minimum(p @ value.abs(), 8 * (p.square() @ value.square()).sqrt())
            rows_of_head(o, q_starts, b, h).copy_(p @ value)
            rows_of_head(off, q_starts, b, h).copy_(
                noise @ value.abs() + rounded + summed(p @ value.abs(), s.shape[1])
            )
            rows_of_head(lse, q_starts, b, h).copy_(total)
            rows_of_head(lse_off, q_starts, b, h).copy_(
                most + 2.0**-19 + total.nan_to_num(neginf=0.0).abs() * 2.0**-22
            )
    if by_token:
        o, off = o.transpose(1, 2), off.transpose(1, 2)
    return expected(o, q.dtype, noise=off), expected(lse, torch.float32, noise=lse_off)


def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, **_: Any) -> Callable[[], Any]:
    """cuDNN's, as torch calls it, with the log-sum-exps."""
    forward = torch.ops.aten._scaled_dot_product_cudnn_attention

    def run() -> Any:
        o, lse, *_ = forward(q, k, v, None, True, 0.0, causal, False)
        return o, lse.squeeze(-1)  # cuDNN has an axis of one behind the queries

    return run


def flops(
    batch: int, heads: int, length: int, dim: int, keys: int = 0, causal: bool = False, **_: Any
) -> float:
    """Of the two products, half of them where a query sees half of the keys."""
    return 4.0 * batch * heads * length * (keys or length) * dim * (0.5 if causal else 1.0)


def _cases() -> tuple[Case, ...]:
    small: list[dict[str, Any]] = [
        {"batch": 1, "heads": 2, "kv_heads": 1, "length": 40, "keys": 300, "dim": 64},
        {"batch": 2, "heads": 1, "length": 200, "dim": 32, "causal": True, "dtype": "float16"},
        {"batch": 1, "heads": 1, "length": 150, "keys": 70, "dim": 128, "causal": True},
        {"batch": 3, "heads": 2, "length": 140, "keys": 50, "dim": 16, "packed": True},
        {"batch": 3, "heads": 2, "kv_heads": 1, "length": 40, "dim": 16, "packed": True, "causal": True},
        {"batch": 1, "heads": 4, "kv_heads": 2, "length": 37, "keys": 150, "dim": 40},
        {"batch": 1, "heads": 4, "kv_heads": 2, "length": 3, "keys": 700, "dim": 24},
        {"batch": 2, "heads": 2, "kv_heads": 1, "length": 70, "dim": 24, "packed": True, "causal": True},
        {"batch": 3, "heads": 2, "length": 3, "dim": 40, "packed": True},
        {"batch": 2, "heads": 6, "kv_heads": 3, "length": 3, "dim": 24, "causal": True},
        {"batch": 2, "heads": 3, "length": 130, "keys": 4, "dim": 32},
        {"batch": 3, "heads": 1, "length": 1, "dim": 56, "causal": True},
        {"batch": 2, "heads": 4, "kv_heads": 2, "length": 150, "dim": 64, "causal": True, "by_token": True},
        {"batch": 2, "heads": 2, "length": 70, "keys": 200, "dim": 40, "by_token": True},
        {"batch": 1, "heads": 1, "length": 200, "dim": 168, "causal": True},
        {
            "batch": 1,
            "heads": 2,
            "length": 129,
            "dim": 184,
            "causal": True,
            "tile": tile_of(184, causal=True),
        },
    ]
    gpu: list[dict[str, Any]] = []
    for dim in (64, 128, 256):
        for causal in (False, True):
            for dtype in DTYPES:
                gpu.append(
                    {
                        "batch": 2,
                        "heads": 4,
                        "kv_heads": 2,
                        "length": 333,
                        "dim": dim,
                        "causal": causal,
                        "dtype": dtype,
                    }
                )
            gpu.append({"batch": 5, "heads": 2, "length": 500, "dim": dim, "causal": causal, "packed": True})
            gpu.append({"batch": 1, "heads": 2, "length": 1024, "dim": dim, "causal": causal})
            gpu.append({"batch": 1, "heads": 2, "length": 300, "keys": 700, "dim": dim, "causal": causal})
        gpu.append({"batch": 2, "heads": 2, "kv_heads": 1, "length": 1000, "keys": 77, "dim": dim})
    gpu += [
        {"batch": 1, "heads": 8, "kv_heads": 2, "length": n, "keys": 5000, "dim": d}
        for d in (64, 128, 248)
        for n in (1, 13, 100)
    ]
    gpu += [
        {"batch": 2, "heads": 4, "kv_heads": 2, "length": n, "dim": d, "causal": c, "by_token": True}
        for n, d, c in ((333, 64, True), (1024, 128, True), (500, 128, False), (333, 256, True))
    ]
    gpu += [
        {"batch": 3, "heads": 4, "kv_heads": 2, "length": 13, "dim": d, "causal": True}
        for d in (64, 128, 248)
    ]
    gpu += [
        {"batch": 1, "heads": 2, "length": 200, "dim": d, "causal": True} for d in (40, 72, 96, 184, 192, 248)
    ]
    gpu += [
        {"batch": 3, "heads": 4, "kv_heads": 2, "length": 200, "dim": d, "packed": True} for d in (56, 216)
    ]
    shapes = [
        (1, 32, 4096, 128),
        (1, 32, 16384, 128),
        (4, 32, 4096, 128),
        (1, 32, 4096, 64),
        (1, 32, 4096, 256),
        (16, 16, 1024, 128),
    ]
    bars = {128: (1.02, 1.06)}
    bench = [
        Case(
            {"batch": b, "heads": h, "length": n, "dim": d, "causal": c},
            bar=1.0 if n == 1024 else bars.get(d, (1.0, 1.0))[c],
        )
        for b, h, n, d in shapes
        for c in (False, True)
    ]
    return (*(Case(s, small=True) for s in small), *(Case(s) for s in gpu), *bench)


OP = Op(
    name="flash_attention",
    run=flash_attention,
    draw=draw,
    reference=reference,
    cases=_cases(),
    peers={"cuDNN": cudnn},
    flops=flops,
)
