"""All-reduce in a hierarchy: within nodes first, then across them, then within again.

Look at: T.Scale("device", team=range(…)) cuts the ranks into teams, all at once, and inside a team everything
counts within it. Each rank of a node sums one slice of the vector over its node, so that between nodes, where
the way is slow, it moves 1 / (ranks of a node) of what 07_all_reduce.py would. Here a node is any `per_node`
ranks that follow one another.
"""

import math

import common
import torch

import tilescale
import tilescale.comm as comm
import tilescale.language as T


@tilescale.jit
def kernel(slice_, per, block=1024):
    tiles = -(-slice_ // block)
    blocks = min(tiles, 132)

    @T.prim_func
    def hierarchical_all_reduce(
        A: T.SymmTensor((per, slice_), "float32"),
        sums: T.SymmTensor((slice_,), "float32"),
        B: T.SymmTensor((per, slice_), "float32"),
    ):
        with T.Kernel(blocks, threads=128) as bx:
            total = T.alloc_shared((block,), "float32")
            with T.Scale("device") as rank, n:
                first = rank // per * per
                for t in T.serial(bx, tiles, step=blocks):
                    low = t * block
                    with T.Scale(
                        "device", team=range(first, first + per)
                    ):  # my node: my slice of what its ranks have
                        T.reduce_scatter(A[0:per, low : low + block], sums[low : low + block])
                    with T.Scale(
                        "device", team=range(rank % per, n, per)
                    ):  # those with my slice: one rank of each node
                        T.all_reduce(sums[low : low + block], total)
                    with T.Scale(
                        "device", team=range(first, first + per)
                    ):  # my node again: every slice to everyone
                        T.all_gather(total, B[0:per, low : low + block])

    return hierarchical_all_reduce


def run(N, per_node=2, seed=0, launches=1):
    """Launches on this rank; returns the largest error against torch's sum. Nodes are smaller if ``per_node``
    does not divide the ranks."""
    rank, world = common.ranks()
    per = math.gcd(per_node, world)
    slice_ = -(-N // per)
    reduce = kernel(slice_, per)
    a, sums, b = (comm.empty(shape, torch.float32) for shape in ((per, slice_), (slice_,), (per, slice_)))
    worst = 0.0
    for launch in range(launches):
        everyone = [common.randn(N, seed=seed + launch, rank=r) for r in range(world)]
        for t in (a, sums, b):
            common.poison(t)
        a.view(-1)[:N] = everyone[rank]
        reduce(a, sums, b)
        worst = max(worst, common.difference(b.view(-1)[:N], torch.stack(everyone).sum(0)))
    return worst


def main(argv=None):
    args = common.arguments(argv, __doc__, n=100_000, per_node=2)
    return common.report(
        f"hierarchical all-reduce, {args.n} elements", run(args.n, args.per_node, args.seed), 1e-5
    )


if __name__ == "__main__":
    raise SystemExit(main())
