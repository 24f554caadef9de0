"""GEMM + all-reduce in one kernel: each rank holds columns of X and rows of W; all of them get the whole X ·
W.

Look at: T.all_reduce on a tile as soon as it is multiplied, while other blocks still multiply. The same block
of every rank takes part, and it signals and waits by itself.
"""

import common
import torch

import tilescale
import tilescale.comm as comm
import tilescale.language as T


@tilescale.jit
def kernel(M, N, K, BM=64, BN=64, BK=64, blocks=132, dtype="bfloat16"):
    """K is a rank's share of the inner dimension."""
    rows, cols = -(-M // BM), -(-N // BN)
    blocks = min(blocks, rows * cols)  # blocks that wait must all be resident

    @T.prim_func
    def gemm_ar(
        X: T.Tensor((M, K), dtype),
        W: T.Tensor((K, N), dtype),
        part: T.SymmTensor((M, N), dtype),
        C: T.Tensor((M, N), dtype),
    ):
        with T.Kernel(blocks, threads=128) as b:
            x, w = T.alloc_shared((BM, BK), dtype), T.alloc_shared((BK, BN), dtype)
            acc = T.alloc_fragment((BM, BN), "float32")
            with T.Scale("device"):
                # The same tiles in the same order on every rank.
                for i, j in T.Persistent((rows, cols), blocks, b):
                    T.clear(acc)
                    for k in T.Pipelined(T.ceildiv(K, BK), num_stages=2):
                        T.copy(X[i * BM, k * BK], x)
                        T.copy(W[k * BK, j * BN], w)
                        T.gemm(x, w, acc)
                    tile = (slice(i * BM, (i + 1) * BM), slice(j * BN, (j + 1) * BN))
                    T.copy(acc, part[tile])
                    T.all_reduce(part[tile], C[tile])

    return gemm_ar


def run(M, N, K, seed=0, launches=1):
    """Launches on this rank; returns the largest error against torch."""
    rank, world = common.ranks()
    part = comm.empty((M, N), torch.bfloat16)
    c = torch.empty(M, N, dtype=torch.bfloat16, device=common.device())
    product, worst = kernel(M, N, K), 0.0
    for launch in range(launches):
        x = [common.randn(M, K, seed=seed + launch, rank=r, scale=(world * K) ** -0.5) for r in range(world)]
        w = [common.randn(K, N, seed=seed + launch + 1000, rank=r) for r in range(world)]
        x, w = ([t.bfloat16() for t in ts] for ts in (x, w))
        common.poison(part), common.poison(c)
        product(x[rank], w[rank], part, c)
        worst = max(worst, common.difference(c, sum(x[r].float() @ w[r].float() for r in range(world))))
    return worst


def main(argv=None):
    args = common.arguments(argv, __doc__, m=256, n=256, k=128)
    _, world = common.ranks()
    return common.report(
        f"GEMM-AR, {args.m}×{args.n}×{world * args.k}", run(args.m, args.n, args.k, args.seed), 3e-2
    )


if __name__ == "__main__":
    raise SystemExit(main())
