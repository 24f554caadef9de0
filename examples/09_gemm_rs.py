"""GEMM + reduce-scatter in one kernel: each rank holds columns of X and rows of W, so each has a part of
every element of X · W. Rank r gets the sum of all parts for its rows.

Look at: a tile is put to the rank that sums it as soon as it is multiplied, those for others first; the sum
is in rank order.
"""

import common
import torch

import tilescale
import tilescale.comm as comm
import tilescale.language as T


@tilescale.jit
def kernel(M, N, K, world, BM=64, BN=64, BK=64, blocks=132, dtype="bfloat16"):
    """M rows of the result a rank; K is a rank's share of the inner dimension."""
    rows, cols = -(-M // BM), -(-N // BN)
    blocks = min(blocks, world * rows * cols)  # blocks that wait must all be resident

    @T.prim_func
    def gemm_rs(
        X: T.Tensor((world, M, K), dtype),
        W: T.Tensor((K, N), dtype),
        parts: T.SymmTensor((world, M, N), dtype),
        arrived: T.Signal((rows, cols)),
        C: T.Tensor((M, N), dtype),
    ):
        with T.Kernel(blocks, threads=128) as b:
            x, w = T.alloc_shared((BM, BK), dtype), T.alloc_shared((BK, BN), dtype)
            acc, part = T.alloc_fragment((BM, BN), "float32"), T.alloc_fragment((BM, BN), dtype)
            with T.Scale("device") as rank, n:
                for step, i, j in T.Persistent((world, rows, cols), blocks, b):
                    owner = (rank + 1 + step) % n
                    T.clear(acc)
                    for k in T.Pipelined(T.ceildiv(K, BK), num_stages=2):
                        T.copy(X[owner, i * BM, k * BK], x)
                        T.copy(W[k * BK, j * BN], w)
                        T.gemm(x, w, acc)
                    # The signal releases this rank's part of the tile to the rank that sums it,
                    there = parts[rank, i * BM : (i + 1) * BM, j * BN : (j + 1) * BN]
                    T.copy(acc, there, dst=owner, signal=arrived[i, j])
                # After all puts of this block, so no wait holds up a put.
                for i, j in T.Persistent((rows, cols), blocks, b):
                    T.wait(arrived[i, j], n)  # which acquires the n parts of its tile, its own among them.
                    T.clear(acc)
                    for r in T.serial(n):
                        T.copy(parts[r, i * BM, j * BN], part)
                        for ii, jj in T.Parallel(BM, BN):
                            acc[ii, jj] += part[ii, jj]
                    T.copy(acc, C[i * BM, j * BN])

    return gemm_rs


def run(M, N, K, seed=0, launches=1):
    """Launches on this rank; returns the largest error against torch."""
    rank, world = common.ranks()
    parts = comm.empty((world, M, N), torch.bfloat16)
    arrived = comm.signals((-(-M // 64), -(-N // 64)))
    c = torch.empty(M, N, dtype=torch.bfloat16, device=common.device())
    product, worst = kernel(M, N, K, world), 0.0
    for launch in range(launches):
        scale = (world * K) ** -0.5
        x = [common.randn(world, M, K, seed=seed + launch, rank=r, scale=scale) for r in range(world)]
        w = [common.randn(K, N, seed=seed + launch + 1000, rank=r) for r in range(world)]
        x, w = ([t.bfloat16() for t in ts] for ts in (x, w))
        common.poison(parts), common.poison(c)
        product(x[rank], w[rank], parts, arrived, c)
        worst = max(worst, common.difference(c, sum(x[r][rank].float() @ w[r].float() for r in range(world))))
    return worst


def main(argv=None):
    args = common.arguments(argv, __doc__, m=128, n=256, k=128)
    _, world = common.ranks()
    error = run(args.m, args.n, args.k, args.seed)
    return common.report(f"GEMM-RS, {world * args.m}×{args.n}×{world * args.k}", error, 3e-2)


if __name__ == "__main__":
    raise SystemExit(main())
