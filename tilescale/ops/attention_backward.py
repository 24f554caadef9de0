"""The gradients of attention (Dao, "FlashAttention-2", 2023, §3.1): with p = softmax(scale · q·kᵀ), o = p·v and g the gradient of o,

    dv = pᵀ·g,   dp = g·vᵀ,   ds = p ∘ (dp - delta),   delta = rowsum(g ∘ o),   dq = scale · ds·k,   dk = scale · dsᵀ·q.

p is computed again from the forward's log-sum-exp. ``key_gradients`` has a tile of keys and walks over the queries, ``query_gradients``
the other way round: each gradient is summed by one block, in one order, at the price of computing p and dp twice. With ``atomic`` the
former also adds its share of dq to memory, in order of arrival, and the latter is not needed.
"""

from __future__ import annotations

from typing import Any

import tilescale.language as T

LOG2_E = 1.4426950408889634


class Shape:
    """Where a block finds its rows: tensors (batch, heads, length, dim) or, packed, (all tokens, heads, dim) with the sequences' starts."""

    def __init__(self, heads: int, kv_heads: int, dim: int, packed: bool):
        self.heads, self.kv_heads, self.dim, self.packed = heads, kv_heads, dim, packed
        self.batch, self.queries, self.keys = T.dynamic("batch"), T.dynamic("queries"), T.dynamic("keys")

    def rows(self, length: Any, heads: int) -> tuple[Any, ...]:
        return (length, heads, self.dim) if self.packed else (self.batch, heads, length, self.dim)

    @property
    def sums(self) -> tuple[Any, ...]:
        """Of numbers a query: log-sum-exps and deltas."""
        return (self.heads, self.queries) if self.packed else (self.batch, self.heads, self.queries)

    def tile(self, x: Any, b: Any, h: Any, row: Any) -> Any:
        return x[row, h, 0] if self.packed else x[b, h, row, 0]

    def number(self, x: Any, b: Any, h: Any, row: Any) -> Any:
        return x[h, row] if self.packed else x[b, h, row]

    def span(self, starts: Any, b: Any, length: Any) -> tuple[Any, Any]:
        """The first row of sequence b, and how many it has."""
        return (starts[b], starts[b + 1] - starts[b]) if self.packed else (0, length)


def delta(s: Shape, dtype: str, rows: int = 64, threads: int = 128) -> Any:
    """``Delta = rowsum(dO ∘ O)`` in float32."""

    @T.macro
    def body(O, dO, Delta, tokens):
        with T.Kernel(T.ceildiv(tokens, rows), s.heads, 1 if s.packed else s.batch, threads=threads) as (bx, h, b):
            product, total = T.alloc_fragment((rows, s.dim), "float32"), T.alloc_fragment((rows,), "float32")
            for i, j in T.Parallel(rows, s.dim):
                at = bx * rows + i
                if s.packed:
                    product[i, j] = T.cast(O[at, h, j], "float32") * T.cast(dO[at, h, j], "float32")
                else:
                    product[i, j] = T.cast(O[b, h, at, j], "float32") * T.cast(dO[b, h, at, j], "float32")
            T.reduce_sum(product, total, dim=1)
            T.copy(total, s.number(Delta, b, h, bx * rows))

    @T.prim_func
    def attention_delta(
        O: T.Tensor(s.rows(s.queries, s.heads), dtype), dO: T.Tensor(s.rows(s.queries, s.heads), dtype), Delta: T.Tensor(s.sums, "float32")
    ):
        body(O, dO, Delta, s.queries)

    return attention_delta


def key_gradients(
    s: Shape, dtype: str, scale: float, causal: bool, BM: int, BN: int, threads: int, stages: int, atomic: bool = False
) -> Any:
    """dK and dV: a block has BN keys of one head and walks over all queries of the heads that share it, BM at a time, in their order.
    Scores are computed transposed, (keys, queries), so that they are left operands of the products that sum. With ``atomic`` the block
    adds scale · ds·k to dQ (float32, zero before) as well."""
    factor, group = scale * LOG2_E, s.heads // s.kv_heads

    @T.macro
    def body(Q, K, V, dO, Lse, Delta, dK, dV, dQ, q_starts, k_starts, most):
        with T.Kernel(T.ceildiv(most, BN), s.kv_heads, s.batch, threads=threads) as (bx, h, b):
            q_first, q_count = s.span(q_starts, b, s.queries)
            k_first, k_count = s.span(k_starts, b, s.keys)
            k, v = T.alloc_shared((BN, s.dim), dtype), T.alloc_shared((BN, s.dim), dtype)
            q, g = T.alloc_shared((BM, s.dim), dtype), T.alloc_shared((BM, s.dim), dtype)
            p, ds = T.alloc_fragment((BN, BM), "float32"), T.alloc_fragment((BN, BM), "float32")
            left = T.alloc_fragment((BN, BM), dtype)
            dk, dv = T.alloc_fragment((BN, s.dim), "float32"), T.alloc_fragment((BN, s.dim), "float32")
            T.copy(s.tile(K, b, h, k_first + bx * BN), k)
            T.copy(s.tile(V, b, h, k_first + bx * BN), v)
            T.clear(dk)
            T.clear(dv)
            start = bx * BN // BM if causal else 0
            tiles = T.max(T.ceildiv(q_count, BM) - start, 0)
            for t in T.Pipelined(tiles * group, num_stages=stages):
                head, at = h * group + t // tiles, (start + t % tiles) * BM
                T.copy(s.tile(Q, b, head, q_first + at), q)
                T.copy(s.tile(dO, b, head, q_first + at), g)
                T.gemm(k, q, p, transpose_B=True, clear_accum=True)
                T.gemm(v, g, ds, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(BN, BM):
                    seen = at + j < q_count
                    if causal:
                        seen = seen and bx * BN + i <= at + j
                    score = T.__exp2(p[i, j] * factor - s.number(Lse, b, head, q_first + at + j) * LOG2_E)
                    p[i, j] = T.if_then_else(seen, score, 0.0)
                T.copy(p, left)
                T.gemm(left, g, dv)
                for i, j in T.Parallel(BN, BM):
                    ds[i, j] = p[i, j] * (ds[i, j] - s.number(Delta, b, head, q_first + at + j))
                T.copy(ds, left)
                T.gemm(left, q, dk)
            for i, j in T.Parallel(BN, s.dim):
                dk[i, j] *= scale
            if s.packed:
                for i, j in T.Parallel(BN, s.dim):
                    if bx * BN + i < k_count:
                        dK[k_first + bx * BN + i, h, j] = T.cast(dk[i, j], dtype)
                        dV[k_first + bx * BN + i, h, j] = T.cast(dv[i, j], dtype)
            else:
                T.copy(dk, s.tile(dK, b, h, bx * BN))
                T.copy(dv, s.tile(dV, b, h, bx * BN))

    q, k, sums = T.Tensor(s.rows(s.queries, s.heads), dtype), T.Tensor(s.rows(s.keys, s.kv_heads), dtype), T.Tensor(s.sums, "float32")
    starts = T.Tensor((s.batch + 1,), "int32")
    if s.packed:

        @T.prim_func
        def packed_attention_key_gradients(
            Q: q, K: k, V: k, dO: q, Lse: sums, Delta: sums, dK: k, dV: k, QStarts: starts, KStarts: starts, most: T.int32
        ):
            body(Q, K, V, dO, Lse, Delta, dK, dV, None, QStarts, KStarts, most)

        return packed_attention_key_gradients

    @T.prim_func
    def attention_key_gradients(Q: q, K: k, V: k, dO: q, Lse: sums, Delta: sums, dK: k, dV: k):
        body(Q, K, V, dO, Lse, Delta, dK, dV, None, None, None, s.keys)

    return attention_key_gradients


def query_gradients(s: Shape, dtype: str, scale: float, causal: bool, BM: int, BN: int, threads: int, stages: int) -> Any:
    """dQ: a block has BM queries of one head and walks over the keys that they see, BN at a time."""
    factor, group = scale * LOG2_E, s.heads // s.kv_heads

    @T.macro
    def body(Q, K, V, dO, Lse, Delta, dQ, q_starts, k_starts, most):
        with T.Kernel(T.ceildiv(most, BM), s.heads, s.batch, threads=threads) as (bx, h, b):
            q_first, q_count = s.span(q_starts, b, s.queries)
            k_first, k_count = s.span(k_starts, b, s.keys)
            q, g = T.alloc_shared((BM, s.dim), dtype), T.alloc_shared((BM, s.dim), dtype)
            k, v = T.alloc_shared((BN, s.dim), dtype), T.alloc_shared((BN, s.dim), dtype)
            p, ds = T.alloc_fragment((BM, BN), "float32"), T.alloc_fragment((BM, BN), "float32")
            left, dq = T.alloc_fragment((BM, BN), dtype), T.alloc_fragment((BM, s.dim), "float32")
            lse, less = T.alloc_fragment((BM,), "float32"), T.alloc_fragment((BM,), "float32")
            T.copy(s.tile(Q, b, h, q_first + bx * BM), q)
            T.copy(s.tile(dO, b, h, q_first + bx * BM), g)
            T.copy(s.number(Lse, b, h, q_first + bx * BM), lse)
            T.copy(s.number(Delta, b, h, q_first + bx * BM), less)
            T.clear(dq)
            tiles = T.ceildiv(k_count, BN)
            if causal:
                tiles = T.min(T.ceildiv((bx + 1) * BM, BN), tiles)
            for t in T.Pipelined(tiles, num_stages=stages):
                T.copy(s.tile(K, b, h // group, k_first + t * BN), k)
                T.copy(s.tile(V, b, h // group, k_first + t * BN), v)
                T.gemm(q, k, p, transpose_B=True, clear_accum=True)
                T.gemm(g, v, ds, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(BM, BN):
                    seen = t * BN + j < k_count
                    if causal:
                        seen = seen and t * BN + j <= bx * BM + i
                    score = T.__exp2(p[i, j] * factor - lse[i] * LOG2_E)
                    ds[i, j] = T.if_then_else(seen, score, 0.0) * (ds[i, j] - less[i])
                T.copy(ds, left)
                T.gemm(left, k, dq)
            for i, j in T.Parallel(BM, s.dim):
                dq[i, j] *= scale
            if s.packed:
                for i, j in T.Parallel(BM, s.dim):
                    if bx * BM + i < q_count:
                        dQ[q_first + bx * BM + i, h, j] = T.cast(dq[i, j], dtype)
            else:
                T.copy(dq, s.tile(dQ, b, h, bx * BM))

    q, k, sums = T.Tensor(s.rows(s.queries, s.heads), dtype), T.Tensor(s.rows(s.keys, s.kv_heads), dtype), T.Tensor(s.sums, "float32")
    starts = T.Tensor((s.batch + 1,), "int32")
    if s.packed:

        @T.prim_func
        def packed_attention_query_gradients(
            Q: q, K: k, V: k, dO: q, Lse: sums, Delta: sums, dQ: q, QStarts: starts, KStarts: starts, most: T.int32
        ):
            body(Q, K, V, dO, Lse, Delta, dQ, QStarts, KStarts, most)

        return packed_attention_query_gradients

    @T.prim_func
    def attention_query_gradients(Q: q, K: k, V: k, dO: q, Lse: sums, Delta: sums, dQ: q):
        body(Q, K, V, dO, Lse, Delta, dQ, None, None, s.queries)

    return attention_query_gradients
