"""``attention_gradients(do, q, k, v, o, lse)``: the gradients of attention (Dao, "FlashAttention-2", 2023,
§3.1). With p = softmax(scale · q·kᵀ) and g the gradient of o = p·v,

    dv = pᵀ·g,   dp = g·vᵀ,   ds = p ∘ (dp - delta),   delta = rowsum(g ∘ o),   dq = scale · ds·k,   dk =
    scale · dsᵀ·q.

p is computed again from the forward's log-sum-exp. ``key_gradients`` has a tile of keys and walks over the
queries, ``query_gradients`` the other way round: each gradient is summed by one block, in one order, at the
price of computing p and dp twice. Where the order need not be fixed, ``key_gradients`` adds each tile's part
of dq to a float32 tensor, and ``rounded`` makes dq of that. Where one tile has all keys it writes dq itself,
in a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable
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
    wide_of,
)
from tilescale.ops.case import ROUNDING, Case, Expected, Op, expected, generator, normal, summed

# ---- kernels


@T.macro
def stored(s, x, To, at, first, count, dtype, times=1.0):
    """Rows of a fragment, so many times, to the sequence, head and row ``at``, as far as the sequence
    goes."""
    b, h, row = at
    rows = x.shape[0]
    if times != 1.0:
        for i, j in T.Parallel(rows, s.dim):
            x[i, j] *= times
    if s.packed:
        for i, j in T.Parallel(rows, s.dim):
            if row + i < count:
                To[first + row + i, h, j] = T.cast(x[i, j], dtype)
    else:
        T.copy(x, s.tile(To, b, h, row, rows))


@T.macro
def handed_over(s, dq, dQ, at, first, count, dtype, scale, whole):
    """A tile's dQ: written where it is the ``whole``, else dQ / scale added to what lies there."""
    if whole:
        stored(s, dq, dQ, at, first, count, dtype, scale)
    else:
        T.atomic_add(s.tile(dQ, at[0], at[1], first + at[2], dq.shape[0]), dq)


@T.macro
def scored_keys(tiles, p, ds, given, near, ahead, factor):
    """p = exp(scale · k·qᵀ - lse) and dp = v·gᵀ of a tile of keys and one of queries. ``given``: the queries'
    numbers in shared memory, of which ``ahead`` are copied ``near`` before a product is awaited."""
    k, v, q, g = tiles
    T.gemm(k, q, p, transpose_B=True, clear_accum=True)
    if ahead > 0:
        T.copy(given[0], near[0])
    T.gemm(v, g, ds, transpose_B=True, clear_accum=True)
    if ahead > 1:
        T.copy(given[1], near[1])
    for i, j in T.Parallel(*p.shape):
        p[i, j] = T.__exp2(p[i, j] * factor - near[0][j])


@T.macro
def summed_keys(tiles, p, ds, delta, p_left, ds_left, dk, dv, ds_whole=None):
    """What a tile of queries adds to dk / scale and dv. ``ds_whole``: takes ds besides, where it is another
    tile than the left operand."""
    q, g = tiles
    T.copy(p, p_left)
    T.gemm(p_left, g, dv)
    for i, j in T.Parallel(*p.shape):
        ds[i, j] = p[i, j] * (ds[i, j] - delta[j])
    T.copy(ds, ds_left)
    if ds_whole is not None and ds_whole is not ds_left:
        T.copy(ds_left, ds_whole)
    T.gemm(ds_left, q, dk)


@T.macro
def summed_queries(k, p, ds, delta, left, dq):
    """What a tile of keys adds to dq / scale."""
    for i, j in T.Parallel(*p.shape):
        ds[i, j] = p[i, j] * (ds[i, j] - delta[i])
    T.copy(ds, left)
    T.gemm(left, k, dq)


def _turned(axes: Any, times: int) -> tuple[Any, ...]:
    """So many of the first axes behind the others: blocks start in the order of a grid's first axis."""
    return (*axes[times:], *axes[:times])


def query_numbers(
    heads: int, kv_heads: int, dim: int, packed: bool, dtype: str, TILE: int, threads: int = 128,
    by_token: bool = False,
) -> Any:  # fmt: skip
    """``Numbers``: lse · log2 e and delta = rowsum(dO ∘ O) of every query, in float32."""
    s = Shape(heads, kv_heads, dim, packed, TILE, by_token=by_token)
    kind, numbers = T.Tensor(s.of_tokens(heads), dtype), s.numbers

    @T.macro
    def body(O, dO, Lse, Numbers, starts):
        with T.Kernel(s.blocks, heads, s.batch, threads=threads) as (bx, h, b):
            first, count = s.span(starts, b, s.queries)
            product, total = T.alloc_fragment((TILE, dim), "float32"), T.alloc_fragment((TILE,), "float32")
            for i, j in T.Parallel(TILE, dim):
                at = first + bx * TILE + i
                if packed:
                    product[i, j] = T.cast(O[at, h, j], "float32") * T.cast(dO[at, h, j], "float32")
                elif by_token:
                    product[i, j] = T.cast(O[b, at, h, j], "float32") * T.cast(dO[b, at, h, j], "float32")
                else:
                    product[i, j] = T.cast(O[b, h, at, j], "float32") * T.cast(dO[b, h, at, j], "float32")
            T.reduce_sum(product, total, dim=1)
            for i in T.Parallel(TILE):
                at = bx * TILE + i
                lse = Lse[h, first + at] if packed else Lse[b, h, at]
                Numbers[b, h, 0, bx, i] = T.if_then_else(at < count, lse * LOG2_E, T.infinity("float32"))
                # rows of no sequence need not be numbers
                Numbers[b, h, 1, bx, i] = T.if_then_else(at < count, total[i], 0)

    @T.prim_func
    def attention_query_numbers(
        O: kind, dO: kind, Lse: T.Tensor((s.batch, heads, s.queries), "float32"), Numbers: numbers
    ):
        body(O, dO, Lse, Numbers, None)

    @T.prim_func
    def packed_attention_query_numbers(
        O: kind,
        dO: kind,
        Lse: T.Tensor((heads, s.queries), "float32"),
        Starts: T.Tensor((s.ends,), "int32"),
        Numbers: numbers,
    ):
        body(O, dO, Lse, Numbers, Starts)

    return packed_attention_query_numbers if packed else attention_query_numbers


def key_gradients(
    heads: int,
    kv_heads: int,
    dim: int,
    packed: bool,
    dtype: str,
    scale: float,
    causal: bool,
    BM: int,
    BN: int,
    threads: int = 256,
    stages: int = 2,
    ahead: int = 0,
    added: bool = False,
    ragged: bool = True,
    whole: bool = False,
    longest_first: bool = False,
    by_token: bool = False,
) -> Any:
    """dK and dV: a block has BN keys of one head and walks over all queries of the heads that share it, BM at
    a time, in their order. Scores are computed transposed, (keys, queries), as left operands of the products
    that sum. A query that is none has p = 0. ahead: how many of a query's two numbers threads have in
    registers before they wait for a product, as there is room. added: dQ / scale too, which blocks add to a
    float32 tensor as they come; ``whole``: they write dQ, since one tile has all keys of a sequence. ragged:
    the last keys may fill a tile in part. longest_first: all heads' first tiles before the second ones, whose
    walk under a causal mask is shorter."""
    s, factor, group = (
        Shape(heads, kv_heads, dim, packed, BM, wide := wide_of(dim, True), by_token),
        scale * LOG2_E,
        heads // kv_heads,
    )
    # two warpgroups have half of dq's columns each, where those are whole rows of the widest swizzle; else
    # all of it is the first one's
    policy = T.GemmWarpPolicy.Square if wide % 128 == 0 else T.GemmWarpPolicy.FullRow
    # where a warpgroup has half of the queries, p and ds are handed over through shared memory
    in_registers = BN % (threads // 2) == 0
    left = T.alloc_fragment if in_registers else T.alloc_shared

    @T.macro
    def body(Q, K, V, dO, Numbers, dK, dV, dQ, q_starts, k_starts, most):
        with T.Kernel(
            *_turned((T.ceildiv(most, BN), kv_heads, s.batch), longest_first), threads=threads
        ) as at:
            bx, h, b = _turned(at, 2 * longest_first)
            q_first, q_count = s.span(q_starts, b, s.queries)
            k_first, k_count = s.span(k_starts, b, s.keys)
            k, v = T.alloc_shared((BN, wide), dtype), T.alloc_shared((BN, wide), dtype)
            q, g = T.alloc_shared((BM, wide), dtype), T.alloc_shared((BM, wide), dtype)
            lse_in, delta_in = T.alloc_shared((BM,), "float32"), T.alloc_shared((BM,), "float32")
            lse = T.alloc_fragment((BM,), "float32") if ahead > 0 else lse_in
            delta = T.alloc_fragment((BM,), "float32") if ahead > 1 else delta_in
            p, ds = T.alloc_fragment((BN, BM), "float32"), T.alloc_fragment((BN, BM), "float32")
            p_left, ds_left = left((BN, BM), dtype), left((BN, BM), dtype)
            dk, dv = T.alloc_fragment((BN, wide), "float32"), T.alloc_fragment((BN, wide), "float32")
            ds_whole = None
            if added:
                dq = T.alloc_fragment((BM, wide), "float32")
                ds_whole = T.alloc_shared((BN, BM), dtype) if in_registers else ds_left
            T.copy(s.tile(K, b, h, k_first + bx * BN, BN), k)
            T.copy(s.tile(V, b, h, k_first + bx * BN, BN), v)
            T.clear(dk)
            T.clear(dv)
            tiles = T.max(T.ceildiv(q_count, BM) - (start := bx * BN // BM if causal else 0), 0)
            for r in T.serial(group) if group > 1 else (0,):
                head = h * group + r
                for t in T.Pipelined(tiles, num_stages=stages):
                    m = start + t
                    T.copy(s.tile(Q, b, head, q_first + m * BM, BM), q)
                    T.copy(Numbers[b, head, 0, m, 0], lse_in)
                    T.copy(s.of_token(dO, b, head, q_first + m * BM, BM), g)
                    T.copy(Numbers[b, head, 1, m, 0], delta_in)
                    scored_keys((k, v, q, g), p, ds, (lse_in, delta_in), (lse, delta), ahead, factor)
                    if causal and t < T.ceildiv(BN, BM):  # later queries see all of these keys
                        for i, j in T.Parallel(BN, BM):
                            p[i, j] = T.if_then_else(bx * BN + i <= m * BM + j, p[i, j], 0.0)
                    if added and ragged:  # to dq, keys that are none would count
                        for i, j in T.Parallel(BN, BM):
                            p[i, j] = T.if_then_else(bx * BN + i < k_count, p[i, j], 0.0)
                    summed_keys((q, g), p, ds, delta, p_left, ds_left, dk, dv, ds_whole)
                    if added:
                        T.gemm(ds_whole, k, dq, transpose_A=True, policy=policy, clear_accum=True)
                        handed_over(s, dq, dQ, (b, head, m * BM), q_first, q_count, dtype, scale, whole)
            stored(s, dk, dK, (b, h, bx * BN), k_first, k_count, dtype, scale)
            stored(s, dv, dV, (b, h, bx * BN), k_first, k_count, dtype)

    q, g, k, numbers = (
        T.Tensor(s.rows(s.queries, heads), dtype),
        T.Tensor(s.of_tokens(heads), dtype),
        T.Tensor(s.rows(s.keys, kv_heads), dtype),
        s.numbers,
    )
    starts, sums = (
        T.Tensor((s.ends,), "int32"),
        q if whole else T.Tensor(s.rows(s.queries, heads, wide), "float32"),
    )

    @T.prim_func
    def attention_key_gradients(Q: q, K: k, V: k, dO: g, Numbers: numbers, dK: k, dV: k):
        body(Q, K, V, dO, Numbers, dK, dV, None, None, None, s.keys)

    @T.prim_func
    def packed_attention_key_gradients(
        Q: q,
        K: k,
        V: k,
        dO: g,
        Numbers: numbers,
        dK: k,
        dV: k,
        QStarts: starts,
        KStarts: starts,
        most: T.int32,
    ):
        body(Q, K, V, dO, Numbers, dK, dV, None, QStarts, KStarts, most)

    @T.prim_func
    def attention_added_gradients(Q: q, K: k, V: k, dO: g, Numbers: numbers, dK: k, dV: k, dQ: sums):
        body(Q, K, V, dO, Numbers, dK, dV, dQ, None, None, s.keys)

    @T.prim_func
    def packed_attention_added_gradients(
        Q: q,
        K: k,
        V: k,
        dO: g,
        Numbers: numbers,
        dK: k,
        dV: k,
        dQ: sums,
        QStarts: starts,
        KStarts: starts,
        most: T.int32,
    ):
        body(Q, K, V, dO, Numbers, dK, dV, dQ, QStarts, KStarts, most)

    if added:
        return packed_attention_added_gradients if packed else attention_added_gradients
    return packed_attention_key_gradients if packed else attention_key_gradients


def query_gradients(
    heads: int,
    kv_heads: int,
    dim: int,
    packed: bool,
    dtype: str,
    scale: float,
    causal: bool,
    TILE: int,
    BM: int,
    BN: int,
    threads: int = 256,
    stages: int = 2,
    longest_first: bool = False,
    by_token: bool = False,
) -> Any:
    """dQ: a block has BM queries of one head and walks over the keys that they see, BN at a time. With three
    stages the last product of a round runs beside the first ones of the next. longest_first: the last tiles
    of all heads before the others."""
    s = Shape(heads, kv_heads, dim, packed, TILE, by_token=by_token)
    factor, group, wide = scale * LOG2_E, heads // kv_heads, s.wide

    @T.macro
    def body(Q, K, V, dO, Numbers, dQ, q_starts, k_starts, most):
        with T.Kernel(*_turned((T.ceildiv(most, BM), heads, s.batch), longest_first), threads=threads) as at:
            x, h, b = _turned(at, 2 * longest_first)
            bx = T.ceildiv(most, BM) - 1 - x if causal else x  # those with the longest walk first
            q_first, q_count = s.span(q_starts, b, s.queries)
            k_first, k_count = s.span(k_starts, b, s.keys)
            q, g = T.alloc_shared((BM, wide), dtype), T.alloc_shared((BM, wide), dtype)
            k, v = T.alloc_shared((BN, wide), dtype), T.alloc_shared((BN, wide), dtype)
            p, ds = T.alloc_fragment((BM, BN), "float32"), T.alloc_fragment((BM, BN), "float32")
            left, dq = T.alloc_fragment((BM, BN), dtype), T.alloc_fragment((BM, wide), "float32")
            lse, delta = T.alloc_fragment((BM,), "float32"), T.alloc_fragment((BM,), "float32")
            T.copy(s.tile(Q, b, h, q_first + bx * BM, BM), q)
            T.copy(s.of_token(dO, b, h, q_first + bx * BM, BM), g)
            for i in T.Parallel(BM):
                row = bx * BM + i
                lse[i] = Numbers[b, h, 0, row // TILE, row % TILE]
                delta[i] = Numbers[b, h, 1, row // TILE, row % TILE]
            T.clear(dq)
            tiles = T.ceildiv(k_count, BN)
            if causal:
                tiles = T.min(T.ceildiv((bx + 1) * BM, BN), tiles)
            for t in T.Pipelined(tiles, num_stages=stages):
                T.copy(s.tile(K, b, h // group, k_first + t * BN, BN), k)
                T.copy(s.tile(V, b, h // group, k_first + t * BN, BN), v)
                T.gemm(q, k, p, transpose_B=True, clear_accum=True)
                T.gemm(g, v, ds, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(BM, BN):
                    seen = t * BN + j < k_count
                    if causal:
                        seen = seen and t * BN + j <= bx * BM + i
                    p[i, j] = T.if_then_else(seen, T.__exp2(p[i, j] * factor - lse[i]), 0.0)
                summed_queries(k, p, ds, delta, left, dq)
            stored(s, dq, dQ, (b, h, bx * BM), q_first, q_count, dtype, scale)

    q, g, k, numbers = (
        T.Tensor(s.rows(s.queries, heads), dtype),
        T.Tensor(s.of_tokens(heads), dtype),
        T.Tensor(s.rows(s.keys, kv_heads), dtype),
        s.numbers,
    )
    starts = T.Tensor((s.ends,), "int32")

    @T.prim_func
    def attention_query_gradients(Q: q, K: k, V: k, dO: g, Numbers: numbers, dQ: q):
        body(Q, K, V, dO, Numbers, dQ, None, None, s.queries)

    @T.prim_func
    def packed_attention_query_gradients(
        Q: q, K: k, V: k, dO: g, Numbers: numbers, dQ: q, QStarts: starts, KStarts: starts, most: T.int32
    ):
        body(Q, K, V, dO, Numbers, dQ, QStarts, KStarts, most)

    return packed_attention_query_gradients if packed else attention_query_gradients


def rounded(dim: int, dtype: str, scale: float, rows: int = 64, threads: int = 128) -> Any:
    """``To``: From · scale, of another dtype, without what lies behind its columns."""
    count = T.dynamic("count")

    @T.prim_func
    def attention_rounded_gradients(
        From: T.Tensor((count, wide_of(dim)), "float32"), To: T.Tensor((count, dim), dtype)
    ):
        with T.Kernel(T.ceildiv(count, rows), threads=threads) as bx:
            for i, j in T.Parallel(rows, dim):
                To[bx * rows + i, j] = T.cast(From[bx * rows + i, j] * scale, dtype)

    return attention_rounded_gradients


# ---- what people call


def key_tiles(dim: int, added: bool) -> dict[str, int]:
    """What `key_gradients` takes, as registers and shared memory have room."""
    if dim <= 128:
        return {
            "BM": 64,
            "BN": 128,
            "stages": 3 if added else 2,
            "ahead": 2 if dim <= 64 else 0 if added else 1,
        }
    return {"BM": 64, "BN": 64, "stages": 2, "ahead": 2}


def query_tiles(dim: int, queries: int, heads: int, units: int) -> dict[str, int]:
    """What `query_gradients` takes: products of two rounds at once where there are registers for them; of
    large dimensions tiles of 64 rows where those of 128 leave multiprocessors idle."""
    if dim <= 128:
        return {"BM": 128, "BN": 64, "stages": 3}
    if -(-queries // 128) * heads < units:
        return {"BM": 64, "BN": 64 if dim <= 192 else 32, "stages": 2, "threads": 128}
    return {"BM": 128, "BN": 32, "stages": 2}


#: head dimensions up to which a block with all keys of a sequence has registers for all three gradients,
#: without and with a causal mask
WHOLE = (128, 112)
#: rounds of blocks on the GPU's multiprocessors up to which the last ones decide how long a causal mask's
#: tiles take
FEW_WAVES = 4


def is_longest_first(causal: bool, tiles: int, heads: int, units: int) -> bool:
    """Whether blocks take the longest walks of all heads first: of few that fill the GPU a few times a long
    one would come last. Of many each head's blocks stand side by side, so that what they read stays in the L2
    cache."""
    return causal and 1 < tiles < 65536 and tiles * heads <= FEW_WAVES * units


@host.checked
def attention_gradients(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    q_starts: torch.Tensor | None = None,
    k_starts: torch.Tensor | None = None,
    longest: tuple[int, int] | None = None,
    by_token: bool = False,
    out: tuple[torch.Tensor, ...] | None = None,
    deterministic: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv of the inputs' dtype; dk and dv, and unless ``deterministic`` is False dq, the same bits
    from run to run.

    Args:
        q, o, do: (batch, heads, queries, dim) of bfloat16 or float16. k, v: (batch, kv_heads, keys, dim);
            each of them serves heads / kv_heads neighbouring heads. dim is a multiple of 8, 256 at most.
        lse: (batch, heads, queries) float32, ln of the sum of exp(scale · scores): what the forward left.
        causal: query i has seen the keys up to its own place i.
        scale: of the scores; dim ** -0.5 without. q_starts, k_starts: sequences of different lengths, packed:
        q, o and do are (tokens, heads, dim), k and v (tokens, kv_heads,
            dim), lse (heads, tokens), and starts (batch + 1,) int32 say where each sequence begins and the
            last ends. longest: the most queries and the most keys of a sequence.
        by_token: o and do are (batch, queries, heads, dim), as `flash_attention` gives o.
        deterministic: False: dq need not have the same bits. Up to a dim of 128 blocks add to it in float32,
            in the order in which they come, which takes five products instead of seven; beyond, the fixed
            order is the faster one and stays.

    Raises:
        TileValueError, TileTypeError: shapes or dtypes that do not fit.
    """
    packed, dtype = q_starts is not None, host.dtype_name(q)
    if any(t.dtype != q.dtype for t in (do, k, v, o)) or dtype not in DTYPES or lse.dtype != torch.float32:
        raise TileTypeError(
            f"attention_gradients of {dtype}",
            expected="one of " + ", ".join(DTYPES) + " for all but lse: float32",
        )
    axes = 3 if packed else 4
    h = 1  # the axis of heads, in both orders

    def shapes() -> str:
        named = {"q": q, "k": k, "v": v, "o": o, "do": do, "lse": lse}
        return "attention_gradients of " + ", ".join(f"{n} {tuple(t.shape)}" for n, t in named.items())

    if (
        q.dim() != axes
        or k.dim() != axes
        or tuple(o.shape) != (by_tokens(q.shape) if by_token and not packed else tuple(q.shape))
        or o.shape != do.shape
        or k.shape != v.shape
        or q.shape[-1] != k.shape[-1]
    ):
        alike = "(batch, queries, heads, dim) o and do" if by_token else "q, o and do alike"
        raise TileValueError(shapes(), expected=f"{alike}, k and v alike")
    if packed and by_token:
        raise TileValueError("by_token of packed sequences", expected="one of the two: those are by token")
    heads, kv_heads, dim = q.shape[h], k.shape[h], q.shape[-1]
    numbers = (heads, q.shape[0]) if packed else tuple(q.shape[:3])
    if (
        heads % kv_heads
        or dim % 8
        or dim > 256
        or tuple(lse.shape) != numbers
        or not packed
        and q.shape[0] != k.shape[0]
    ):
        raise TileValueError(
            shapes(),
            expected="heads a multiple of k's, dim of 8 and at most 256, one batch",
        )
    if q_starts is not None and (k_starts is None or longest is None or k_starts.shape != q_starts.shape):
        raise TileValueError(
            "packed sequences need q_starts, k_starts and longest",
            expected="starts of one shape, (batch + 1,) int32",
        )
    if 0 in (*q.shape, *k.shape):
        raise TileValueError(shapes(), expected="extents of 1 at least")
    if not all(t.is_contiguous() for t in (do, q, k, v, o, lse)):
        raise TileValueError("a tensor is not contiguous", expected="contiguous tensors")
    named = zip(out or (None,) * 3, (q, k, v), ("dq", "dk", "dv"), strict=True)
    dq, dk, dv = (host.result(x, tuple(t.shape), t.dtype, t, n) for x, t, n in named)
    results = dq, dk, dv
    if not packed and not by_token:
        heads, kv_heads, (q, o, do, dq, lse), (k, v, dk, dv) = folded(
            causal, (q, o, do, dq, lse), (k, v, dk, dv)
        )
    what = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "packed": packed, "dtype": dtype}
    what["by_token"] = by_token
    more = {**what, "scale": float(scale or dim**-0.5), "causal": causal}
    batch, queries, keys = q.shape[0], q.shape[2], k.shape[2]
    if q_starts is not None and longest is not None:
        batch, (queries, keys) = len(q_starts) - 1, longest
    # where one tile has all keys, one kernel sums everything in a fixed order
    whole = keys <= key_tiles(dim, True)["BN"] and dim <= WHOLE[causal]
    added = whole or not deterministic and dim <= 128
    tiles: dict[str, Any] = key_tiles(dim, added)
    units = host.multiprocessors(q.device)
    tiles["longest_first"] = is_longest_first(causal, -(-keys // tiles["BN"]), batch * kv_heads, units)
    rows = tiles["BM"]
    sums = torch.empty(batch, heads, 2, -(-queries // rows), rows, dtype=torch.float32, device=q.device)
    starts: tuple[Any, ...] = (q_starts, k_starts) if packed else ()
    most: tuple[Any, ...] = tuple((n,) for n in longest) if longest is not None and packed else ((), ())
    host.launch(query_numbers, (o, do, lse, *starts[:1], sums), **what, TILE=rows)
    if whole:
        given = (q, k, v, do, sums, dk, dv, dq, *starts, *most[1])
        host.launch(key_gradients, given, **more, **tiles, added=True, whole=True)
        return results
    if added:
        parts = torch.zeros(*q.shape[:-1], wide_of(dim), dtype=torch.float32, device=q.device)
        ragged = packed or keys % tiles["BN"] != 0
        given = (q, k, v, do, sums, dk, dv, parts, *starts, *most[1])
        host.launch(key_gradients, given, **more, **tiles, added=True, ragged=ragged)
        host.launch(
            rounded,
            (parts.view(-1, wide_of(dim)), dq.view(-1, dim)),
            dim=dim,
            dtype=dtype,
            scale=more["scale"],
        )
        return results
    host.launch(key_gradients, (q, k, v, do, sums, dk, dv, *starts, *most[1]), **more, **tiles)
    by_query: dict[str, Any] = query_tiles(dim, queries, batch * heads, units)
    by_query["longest_first"] = is_longest_first(causal, -(-queries // by_query["BM"]), batch * heads, units)
    host.launch(query_gradients, (q, k, v, do, sums, dq, *starts, *most[0]), **more, TILE=rows, **by_query)
    return results


# ---- what is right, and what it is measured against


def draw(
    batch: int, heads: int, length: int, dim: int, kv_heads: int = 0, keys: int = 0, causal: bool = False,
    packed: bool = False, deterministic: bool = True, dtype: str = "bfloat16", by_token: bool = False,
    device: Any = "cpu", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Normal random inputs, and o and lse of the forward, computed head by head in float32. Packed: of
    lengths up to ``length`` and ``keys``."""
    g, kv_heads, keys = generator(device, seed), kv_heads or heads, keys or length
    q_shape: tuple[int, ...] = (batch, heads, length, dim)
    k_shape: tuple[int, ...] = (batch, kv_heads, keys, dim)
    if packed:
        counts = [sequences(length, batch, True, g), sequences(keys, batch, True, g)]
        if causal:
            counts[1] = counts[0]
        q_starts, k_starts = (torch.tensor([0, *c], device=device).cumsum(0).to(torch.int32) for c in counts)
        q_shape, k_shape = (sum(counts[0]), heads, dim), (sum(counts[1]), kv_heads, dim)
    else:
        q_starts = k_starts = None
    q, k, v = normal(q_shape, dtype, g), normal(k_shape, dtype, g), normal(k_shape, dtype, g)
    o = torch.empty_like(q)
    lse = torch.empty((heads, q_shape[0]) if packed else q_shape[:3], dtype=torch.float32, device=device)
    for b in range(batch):
        for h in range(heads):
            x, (y, z) = (
                rows_of_head(q, q_starts, b, h),
                (rows_of_head(t, k_starts, b, h * kv_heads // heads) for t in (k, v)),
            )
            s = x.float() @ y.float().T * dim**-0.5
            if causal:
                s.masked_fill_(hidden(s.shape[0], s.shape[1], device), -torch.inf)
            total = s.logsumexp(-1)
            rows_of_head(lse, q_starts, b, h).copy_(total)
            rows_of_head(o, q_starts, b, h).copy_(s.sub_(total[:, None]).exp_() @ z.float())
    made: dict[str, Any] = {"do": normal(q_shape, dtype, g), "q": q, "k": k, "v": v, "o": o, "lse": lse}
    made |= {"causal": causal, "deterministic": deterministic}
    if by_token:
        made |= {n: made[n].transpose(1, 2).contiguous() for n in ("do", "o")} | {"by_token": True}
    return (
        {**made, "q_starts": q_starts, "k_starts": k_starts, "longest": (max(counts[0]), max(counts[1]))}
        if packed
        else made
    )


def reference(
    do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor,
    causal: bool, q_starts: torch.Tensor | None = None, k_starts: torch.Tensor | None = None,
    longest: tuple[int, int] | None = None, by_token: bool = False, **_: Any,
) -> tuple[Expected, ...]:  # fmt: skip
    """The same formulas in float64, from the same o and lse. p and ds are rounded to the inputs' dtype before
    they are multiplied, which adds up as a root; sums are off by their roundings, and exponentials by those
    of their arguments."""
    unit, scale = ROUNDING[q.dtype], q.shape[-1] ** -0.5
    if by_token:
        do, o = do.transpose(1, 2), o.transpose(1, 2)
    grads = {
        n: torch.zeros(t.shape, dtype=torch.float64, device=q.device)
        for n, t in (("q", q), ("k", k), ("v", v))
    }
    off = {n: torch.zeros_like(t) for n, t in grads.items()}
    group = q.shape[1] // k.shape[1]
    for b in range(len(q_starts) - 1 if q_starts is not None else q.shape[0]):
        for h in range(q.shape[1]):
            x, g, y = (rows_of_head(t, q_starts, b, h).double() for t in (q, do, o))
            key, value = (rows_of_head(t, k_starts, b, h // group).double() for t in (k, v))
            sums = rows_of_head(lse, q_starts, b, h).double()[:, None]
            s = x @ key.T * scale - sums
            p = (s.masked_fill(hidden(s.shape[0], s.shape[1], q.device), -torch.inf) if causal else s).exp()
            ds = p * (g @ value.T - (g * y).sum(-1, keepdim=True))
            rough = summed(x.abs() @ key.abs().T * scale, x.shape[1]) + (s.abs() + sums.abs()) * 2.0**-21
            noise_p = p * (rough + 2.0**-20)
            terms = g.abs() @ value.abs().T + (g * y).abs().sum(-1, keepdim=True)
            noise_ds = ds.abs() * (rough + 2.0**-20) + p * summed(terms, x.shape[1])
            for name, a, noise, other in (
                ("v", p.T, noise_p.T, g),
                ("k", ds.T, noise_ds.T, x),
                ("q", ds, noise_ds, key),
            ):
                times = 1.0 if name == "v" else scale
                starts, at = (q_starts, h) if name == "q" else (k_starts, h // group)
                plain = a.abs() @ other.abs()
                rows_of_head(grads[name], starts, b, at).add_(a @ other * times)
                rounded = unit * torch.minimum(plain, 8 * (a.square() @ other.square()).sqrt())
                rows_of_head(off[name], starts, b, at).add_(
                    (noise @ other.abs() + rounded + summed(plain, a.shape[1] * group)) * times
                )
    return tuple(expected(grads[n], q.dtype, noise=off[n]) for n in "qkv")


def cudnn(
    do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor,
    causal: bool, **_: Any,
) -> Callable[[], Any]:  # fmt: skip
    """cuDNN's, as torch calls it, on its own forward's results."""
    made = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False)
    own, sums, q_ends, k_ends, most_q, most_k, seed, offset = made[:8]
    backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    return lambda: backward(
        do, q, k, v, own, sums, seed, offset, None, q_ends, k_ends, most_q, most_k, 0.0, causal
    )


def flops(
    batch: int, heads: int, length: int, dim: int, keys: int = 0, causal: bool = False, **_: Any
) -> float:
    """Of the five products that it takes at least, half of them where a query sees half of the keys."""
    return 10.0 * batch * heads * length * (keys or length) * dim * (0.5 if causal else 1.0)


def _cases() -> tuple[Case, ...]:
    small: list[dict[str, Any]] = [
        {"batch": 1, "heads": 2, "kv_heads": 1, "length": 40, "keys": 70, "dim": 16},
        {"batch": 2, "heads": 1, "length": 70, "dim": 32, "causal": True, "dtype": "float16"},
        {"batch": 3, "heads": 2, "length": 40, "keys": 50, "dim": 16, "packed": True},
        {"batch": 3, "heads": 2, "kv_heads": 1, "length": 40, "dim": 16, "packed": True, "causal": True},
        {
            "batch": 1,
            "heads": 2,
            "kv_heads": 1,
            "length": 150,
            "keys": 170,
            "dim": 16,
            "deterministic": False,
        },
        {"batch": 1, "heads": 2, "kv_heads": 1, "length": 40, "keys": 70, "dim": 24, "deterministic": False},
        {"batch": 2, "heads": 2, "kv_heads": 1, "length": 40, "dim": 40, "packed": True, "causal": True},
        {"batch": 2, "heads": 2, "length": 70, "keys": 90, "dim": 16, "packed": True, "deterministic": False},
        {
            "batch": 2,
            "heads": 4,
            "kv_heads": 2,
            "length": 290,
            "dim": 24,
            "causal": True,
            "deterministic": False,
        },
        {"batch": 1, "heads": 4, "kv_heads": 2, "length": 150, "dim": 24, "causal": True},
        {
            "batch": 2,
            "heads": 4,
            "kv_heads": 2,
            "length": 91,
            "dim": 24,
            "causal": True,
            "deterministic": False,
        },
        {"batch": 1, "heads": 2, "kv_heads": 1, "length": 200, "dim": 136, "causal": True},
        {"batch": 2, "heads": 4, "kv_heads": 2, "length": 150, "dim": 24, "causal": True, "by_token": True},
        {"batch": 2, "heads": 2, "length": 70, "keys": 150, "dim": 16, "by_token": True},
        {
            "batch": 2,
            "heads": 2,
            "length": 70,
            "keys": 90,
            "dim": 16,
            "by_token": True,
            "deterministic": False,
        },
    ]
    gpu: list[dict[str, Any]] = []
    for dim in (64, 72, 96, 128, 216, 256):
        for causal in (False, True):
            gpu.append({"batch": 2, "heads": 4, "kv_heads": 2, "length": 333, "dim": dim, "causal": causal})
            gpu.append({"batch": 5, "heads": 2, "length": 500, "dim": dim, "causal": causal, "packed": True})
            gpu.append(
                {"batch": 1, "heads": 2, "length": 640, "dim": dim, "causal": causal, "dtype": "float16"}
            )
        gpu.append({"batch": 2, "heads": 2, "kv_heads": 1, "length": 77, "keys": 1000, "dim": dim})
    gpu += [
        {"batch": 2, "heads": 4, "kv_heads": 2, "length": n, "dim": d, "causal": c, "by_token": True}
        for n, d, c in ((333, 64, True), (1024, 128, True), (500, 128, False), (333, 256, True))
    ]
    gpu += [{**case, "deterministic": False} for case in gpu]
    shapes = [
        (1, 32, 4096, 128),
        (1, 32, 16384, 128),
        (4, 32, 4096, 128),
        (1, 32, 4096, 64),
        (1, 32, 4096, 256),
        (16, 16, 1024, 128),
    ]
    bench = [
        {"batch": b, "heads": h, "length": n, "dim": d, "causal": c}
        for b, h, n, d in shapes
        for c in (False, True)
    ]
    # the peer adds to dq as its blocks come; a fixed order takes two products more
    measured = [Case({**s, "deterministic": d}, bar=0.9) for s in bench for d in (False, True)]
    return (*(Case(s, small=True) for s in small), *(Case(s) for s in gpu), *measured)


OP = Op(
    name="attention_gradients",
    run=attention_gradients,
    draw=draw,
    reference=reference,
    cases=_cases(),
    peers={"cuDNN": cudnn},
    flops=flops,
)
