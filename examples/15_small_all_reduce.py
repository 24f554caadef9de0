"""All-reduce of a small vector: packets that are their own signal.

Look at: no signal, no wait for a counter, no barrier. Each packet holds 8 bytes of data and the number of the
launch, and whoever looks for it sees both or neither. Everyone puts its vector to everyone and adds in rank
order, so all ranks get the same bits. Since every rank gets packets of every other one, the compiler proves
that a launch needs no flags where it begins and ends: `print(kernel.report())` says so. For vectors of some
kilobytes, whose time is that of one trip; 07_all_reduce.py has the ways for larger ones.
"""

import common
import torch

import tilescale
import tilescale.comm as comm
import tilescale.language as T


@tilescale.jit
def kernel(N, world, block=256):
    tiles = -(-N // block)

    @T.prim_func
    def small_all_reduce(
        A: T.Tensor((N,), "float32"),
        box: T.Packets((world, tiles * block), "float32"),
        B: T.Tensor((N,), "float32"),
    ):
        with T.Kernel(tiles, threads=128) as bx, T.Scale("device") as (rank, n):
            low = bx * block
            mine, total = T.alloc_fragment((block,), "float32"), T.alloc_fragment((block,), "float32")
            parts = T.alloc_fragment((world, block), "float32")
            T.copy(A[low], mine)
            T.put_packets(mine, box[rank, low])  # into everyone's box, at my place
            T.get_packets(box[0:world, low : low + block], parts)  # of all ranks, awaited together
            T.clear(total)
            for i in T.Parallel(block):
                for r in T.serial(world):
                    total[i] += parts[r, i]
            T.copy(total, B[low])

    return small_all_reduce


def run(N, seed=0, launches=1):
    """Launches on this rank; returns the largest error against torch's sum."""
    rank, world = common.ranks()
    reduce = kernel(N, world)
    box = comm.packets((world, -(-N // 256) * 256), torch.float32)
    a, b = (torch.empty(N, device=common.device()) for _ in range(2))
    worst = 0.0
    for launch in range(launches):
        everyone = [common.randn(N, seed=seed + launch, rank=r) for r in range(world)]
        a.copy_(everyone[rank])
        common.poison(b)
        reduce(a, box, b)
        worst = max(worst, common.difference(b, torch.stack(everyone).sum(0)))
    return worst


def main(argv=None):
    args = common.arguments(argv, __doc__, n=2_000)
    return common.report(f"small all-reduce, {args.n} elements", run(args.n, args.seed), 1e-5)


if __name__ == "__main__":
    raise SystemExit(main())
