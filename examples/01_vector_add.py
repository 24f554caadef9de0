"""Vector add: a grid of blocks, each adds one tile. Each rank works on vectors of its own.

Look at: T.Kernel (how many blocks), T.Parallel (independent elements), the tile over the edge (nothing
outside is written).
"""

import common
import torch

import tilescale
import tilescale.language as T


@tilescale.jit
def kernel(N, block=256):
    @T.prim_func
    def vector_add(A: T.Tensor((N,), "float32"), B: T.Tensor((N,), "float32"), C: T.Tensor((N,), "float32")):
        with T.Kernel(T.ceildiv(N, block), threads=128) as bx:
            for i in T.Parallel(block):
                C[bx * block + i] = A[bx * block + i] + B[bx * block + i]

    return vector_add


def run(N, seed=0):
    """One launch on this rank; returns the largest error against torch."""
    rank, _ = common.ranks()
    a, b = (common.randn(N, seed=seed + k, rank=rank) for k in (0, 1))
    c = common.poison(torch.empty_like(a))
    kernel(N)(a, b, c)
    return common.difference(c, a + b)


def main(argv=None):
    args = common.arguments(argv, __doc__, n=100_000)
    return common.report(f"vector add, {args.n} elements", run(args.n, args.seed), 0)


if __name__ == "__main__":
    raise SystemExit(main())
