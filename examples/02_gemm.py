"""GEMM with a fused ReLU, twice: as a function of tensors, and as a factory whose kernel takes any number of
rows.

Look at: T.copy moves tiles and minds the edges, T.gemm multiplies them, T.Pipelined lets copies run ahead
where the target can. `matmul_relu` reads its extents off the arguments and returns what it allocates;
`kernel` is compiled once for all M.
"""

import common
import torch

import tilescale
import tilescale.language as T


@tilescale.jit
def matmul_relu(A, B, BM: int = 64, BN: int = 64, BK: int = 32):
    M, N, K = T.const("M, N, K")
    A: T.Tensor((M, K), "float32")
    B: T.Tensor((K, N), "float32")
    C = T.empty((M, N), "float32")
    with T.Kernel(T.ceildiv(N, BN), T.ceildiv(M, BM), threads=128) as (bx, by):
        a, b = T.alloc_shared((BM, BK), "float32"), T.alloc_shared((BK, BN), "float32")
        acc = T.alloc_fragment((BM, BN), "float32")
        T.clear(acc)
        for k in T.Pipelined(T.ceildiv(K, BK), num_stages=3):
            T.copy(A[by * BM, k * BK], a)
            T.copy(B[k * BK, bx * BN], b)
            T.gemm(a, b, acc)
        for i, j in T.Parallel(BM, BN):
            acc[i, j] = T.max(acc[i, j], 0)
        T.copy(acc, C[by * BM, bx * BN])
    return C


@tilescale.jit
def kernel(N, K, BM=64, BN=64, BK=32):
    M = T.dynamic("m")

    @T.prim_func
    def gemm_relu(
        A: T.Tensor((M, K), "float32"), B: T.Tensor((K, N), "float32"), C: T.Tensor((M, N), "float32")
    ):
        with T.Kernel(T.ceildiv(N, BN), T.ceildiv(M, BM), threads=128) as (bx, by):
            a, b = T.alloc_shared((BM, BK), "float32"), T.alloc_shared((BK, BN), "float32")
            acc = T.alloc_fragment((BM, BN), "float32")
            T.clear(acc)
            for k in T.Pipelined(T.ceildiv(K, BK), num_stages=3):
                T.copy(A[by * BM, k * BK], a)
                T.copy(B[k * BK, bx * BN], b)
                T.gemm(a, b, acc)
            for i, j in T.Parallel(BM, BN):
                acc[i, j] = T.max(acc[i, j], 0)
            T.copy(acc, C[by * BM, bx * BN])

    return gemm_relu


def run(M, N, K, dynamic=False, seed=0):
    """One launch on this rank (three with ``dynamic``, of M, 1 and 2M rows); returns the largest error
    against torch."""
    rank, _ = common.ranks()
    b = common.randn(K, N, seed=seed + 1, rank=rank, scale=K**-0.5)
    worst = 0.0
    for m in (M, 1, 2 * M) if dynamic else (M,):
        a = common.randn(m, K, seed=seed, rank=rank)
        if dynamic:
            c = common.poison(torch.empty(m, N, device=common.device()))
            kernel(N, K)(a, b, c)
        else:
            c = matmul_relu(a, b)
        worst = max(worst, common.difference(c, (a @ b).relu()))
    return worst


def main(argv=None):
    args = common.arguments(argv, __doc__, m=300, n=400, k=500)
    code = 0
    for dynamic in (False, True):
        error = run(args.m, args.n, args.k, dynamic, args.seed)
        code |= common.report(
            f"{'dynamic ' if dynamic else ''}GEMM + ReLU, {args.m}×{args.n}×{args.k}", error, 1e-5
        )
    return code


if __name__ == "__main__":
    raise SystemExit(main())
