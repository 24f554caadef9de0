"""Flash attention, forward: softmax(Q·Kᵀ/√D)·V a tile at a time, never holding the matrix of scores.

Look at: two products around a running softmax. When a later tile of keys has a greater score, what was summed
so far is scaled down; the division by the total comes once, at the end. Causal: a query sees the keys up to
its own place, and tiles beyond it are not visited. T.__exp2 is the fast one, where T.exp2 is exact.
"""

import common
import torch

import tilescale
import tilescale.language as T

LOG2_E = 1.4426950408889634


@tilescale.jit
def kernel(batch, heads, S, D, causal=False, BM=64, BN=64, dtype="float32"):
    shape = (batch, heads, S, D)
    scale = LOG2_E / D**0.5  # powers of two are cheaper than those of e
    tiles = -(-S // BN)

    @T.prim_func
    def attention(
        Q: T.Tensor(shape, dtype),
        K: T.Tensor(shape, dtype),
        V: T.Tensor(shape, dtype),
        O: T.Tensor(shape, dtype),
    ):
        with T.Kernel(T.ceildiv(S, BM), heads, batch, threads=128) as (bx, h, b):
            q, k, v = (
                T.alloc_shared((BM, D), dtype),
                T.alloc_shared((BN, D), dtype),
                T.alloc_shared((BN, D), dtype),
            )
            s, o = T.alloc_fragment((BM, BN), "float32"), T.alloc_fragment((BM, D), "float32")
            top, before, total = (T.alloc_fragment((BM,), "float32") for _ in range(3))
            T.copy(Q[b, h, bx * BM, 0], q)
            T.clear(o)
            T.clear(total)
            T.fill(top, -T.infinity("float32"))
            for t in T.Pipelined(
                T.min(T.ceildiv((bx + 1) * BM, BN), tiles) if causal else tiles, num_stages=2
            ):
                T.copy(K[b, h, t * BN, 0], k)
                T.copy(V[b, h, t * BN, 0], v)
                T.gemm(q, k, s, transpose_B=True, clear_accum=True)
                if causal or S % BN:
                    for i, j in T.Parallel(BM, BN):
                        seen = t * BN + j <= T.min(bx * BM + i, S - 1) if causal else t * BN + j < S
                        s[i, j] = T.if_then_else(seen, s[i, j], -T.infinity("float32"))
                T.copy(top, before)
                T.reduce_max(s, top, dim=1, clear=False)
                for i, j in T.Parallel(BM, BN):
                    s[i, j] = T.__exp2((s[i, j] - top[i]) * scale)
                for i in T.Parallel(BM):
                    # How much what was summed so far shrinks.
                    before[i] = T.__exp2((before[i] - top[i]) * scale)
                    total[i] *= before[i]
                T.reduce_sum(s, total, dim=1, clear=False)
                for i, j in T.Parallel(BM, D):
                    o[i, j] *= before[i]
                T.gemm(s, v, o)
            for i, j in T.Parallel(BM, D):
                o[i, j] /= total[i]
            T.copy(o, O[b, h, bx * BM, 0])

    return attention


def run(batch, heads, S, D, causal=False, seed=0):
    """One launch on this rank; returns the largest error against torch."""
    rank, _ = common.ranks()
    q, k, v = (common.randn(batch, heads, S, D, seed=3 * seed + i, rank=rank) for i in range(3))
    o = common.poison(torch.empty_like(q))
    kernel(batch, heads, S, D, causal)(q, k, v, o)
    return common.difference(o, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal))


def main(argv=None):
    args = common.arguments(argv, __doc__, batch=1, heads=4, seq=300, dim=64)
    code = 0
    for causal in (False, True):
        error = run(args.batch, args.heads, args.seq, args.dim, causal, args.seed)
        what = f"{'causal ' if causal else ''}attention, {args.batch}×{args.heads}×{args.seq}×{args.dim}"
        code |= common.report(what, error, 1e-5)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
