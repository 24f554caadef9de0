"""Multi-head latent attention, one query token a sequence (DeepSeek-V2, 2024, §2.1; in its absorbed form): all heads attend to one
latent vector a token, of ``latent`` numbers that are keys and values at once, and ``rope`` more that are keys alone.

``o[b, h] = softmax(scale · q[b, h] · kv[b, :n]ᵀ) · kv[b, :n, :latent]``, n = lengths[b]. A block has 64 heads of one sequence and a part
of its context; where there are several parts, ``combine`` adds them up, in their order. Rows of the cache behind a sequence's end are
read where they share a tile with its last ones and must be finite numbers there.
"""

from __future__ import annotations

from typing import Any

import tilescale
import tilescale.language as T

LOG2_E = 1.4426950408889634


@tilescale.jit
def kernel(
    heads: int = 128, latent: int = 512, rope: int = 64, scale: float = 192**-0.5, dtype: str = "bfloat16", page: int = 0, parts: int = 1,
    BH: int = 64, BN: int = 64, threads: int = 256, stages: int = 2,
) -> Any:  # fmt: skip
    """Decoding: q (batch, heads, latent + rope), lengths (batch,) int32 → o (batch, heads, latent).

    Args:
        page: 0: the cache is (batch, most, latent + rope); else (pages, page, latent + rope), and ``Table`` (batch, most pages) int32
            says where a sequence's pages are. A multiple of BN.
        parts: 1: ``O`` is written. More: each block writes its part of O, divided by its own total (parts, batch, heads, latent) in
            float32, and log2 of that total (parts, batch, heads): what ``combine`` takes.
    """
    batch, rows, pages, width = T.dynamic("batch"), T.dynamic("rows"), T.dynamic("pages"), latent + rope
    cache = (rows, page, width) if page else (batch, rows, width)
    factor = scale * LOG2_E
    out, wide = ((batch, heads, latent), dtype) if parts == 1 else ((parts, batch, heads, latent), "float32"), T.infinity("float32")

    @T.prim_func
    def mla_decode(
        Q: T.Tensor((batch, heads, width), dtype),
        KV: T.Tensor(cache, dtype),
        Table: T.Tensor((batch, pages), "int32"),
        Lengths: T.Tensor((batch,), "int32"),
        O: T.Tensor(*out),
        Lse: T.Tensor((parts, batch, heads), "float32"),
    ):
        with T.Kernel(heads // BH, parts, batch, threads=threads) as (group, part, b):
            q, q_rope = T.alloc_shared((BH, latent), dtype), T.alloc_shared((BH, rope), dtype)
            kv, k_rope = T.alloc_shared((BN, latent), dtype), T.alloc_shared((BN, rope), dtype)
            p = T.alloc_shared((BH, BN), dtype)
            s, o = T.alloc_fragment((BH, BN), "float32"), T.alloc_fragment((BH, latent), "float32")
            top, before, total = (T.alloc_fragment((BH,), "float32") for _ in range(3))
            tiles = T.ceildiv(Lengths[b], BN)
            first = tiles * part // parts
            T.copy(Q[b, group * BH, 0], q)
            T.copy(Q[b, group * BH, latent], q_rope)
            T.clear(o)
            T.clear(total)
            T.fill(top, -wide)
            for t in T.Pipelined(tiles * (part + 1) // parts - first, num_stages=stages):
                at = (first + t) * BN
                where, row = (Table[b, at // page], at % page) if page else (b, at)
                T.copy(KV[where, row, 0], kv)
                T.copy(KV[where, row, latent], k_rope)
                T.gemm(q, kv, s, transpose_B=True, clear_accum=True)
                T.gemm(q_rope, k_rope, s, transpose_B=True)
                for i, j in T.Parallel(BH, BN):
                    s[i, j] = T.if_then_else(at + j < Lengths[b], s[i, j], -wide)
                T.copy(top, before)
                T.reduce_max(s, top, dim=1, clear=False)
                for i, j in T.Parallel(BH, BN):
                    s[i, j] = T.__exp2((s[i, j] - top[i]) * factor)
                for i in T.Parallel(BH):
                    before[i] = T.__exp2((before[i] - top[i]) * factor)  # how much what was summed so far shrinks
                    total[i] *= before[i]
                T.reduce_sum(s, total, dim=1, clear=False)
                T.copy(s, p)
                for i, j in T.Parallel(BH, latent):
                    o[i, j] *= before[i]
                T.gemm(p, kv, o)
            for i, j in T.Parallel(BH, latent):
                o[i, j] /= total[i]
            if parts == 1:
                T.copy(o, O[b, group * BH, 0])
            else:
                T.copy(o, O[part, b, group * BH, 0])
            for i in T.Parallel(BH):
                Lse[part, b, group * BH + i] = T.log2(total[i]) + top[i] * factor

    return mla_decode
