"""Softmax over rows: reductions of a tile, a block of rows at a time.

Look at: T.reduce_max and T.reduce_sum along an axis, fragments that hold one number a row, and columns beyond
the edge: they are read as zero, so they are masked before the maximum is taken.
"""

import common
import torch

import tilescale
import tilescale.language as T


@tilescale.jit
def kernel(M, N, rows=8):
    width = -(-N // 16) * 16  # a tile's extents are constants; columns N..width are padding

    @T.prim_func
    def softmax(X: T.Tensor((M, N), "float32"), Y: T.Tensor((M, N), "float32")):
        with T.Kernel(T.ceildiv(M, rows), threads=128) as bx:
            x = T.alloc_fragment((rows, width), "float32")
            top = T.alloc_fragment((rows,), "float32")
            total = T.alloc_fragment((rows,), "float32")
            T.copy(X[bx * rows, 0], x)
            for i, j in T.Parallel(rows, width):
                x[i, j] = T.if_then_else(j < N, x[i, j], -T.infinity("float32"))
            T.reduce_max(x, top, dim=1)
            for i, j in T.Parallel(rows, width):
                x[i, j] = T.exp(x[i, j] - top[i])
            T.reduce_sum(x, total, dim=1)
            for i, j in T.Parallel(rows, width):
                x[i, j] = x[i, j] / total[i]
            T.copy(x, Y[bx * rows, 0])

    return softmax


def run(M, N, seed=0):
    """One launch on this rank; returns the largest error against torch."""
    rank, _ = common.ranks()
    x = common.randn(M, N, seed=seed, rank=rank, scale=3)
    y = common.poison(torch.empty_like(x))
    kernel(M, N)(x, y)
    return common.difference(y, x.softmax(-1))


def main(argv=None):
    args = common.arguments(argv, __doc__, m=500, n=1000)
    return common.report(f"softmax, {args.m}×{args.n}", run(args.m, args.n, args.seed), 1e-6)


if __name__ == "__main__":
    raise SystemExit(main())
