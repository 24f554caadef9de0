"""All-gather: everyone's rows to everyone, once as one operation and once put by put.

Look at: T.all_gather, and beside it what it is made of: puts that start at the own neighbour (so that no rank
is everyone's first target) and one counter a source.
"""

import common
import torch

import tilescale
import tilescale.comm as comm
import tilescale.language as T


@tilescale.jit
def collective(N, world, block=1024, dtype="bfloat16"):
    tiles = -(-N // block)
    blocks = min(tiles, 132)

    @T.prim_func
    def all_gather(A: T.Tensor((N,), dtype), G: T.SymmTensor((world, N), dtype)):
        with T.Kernel(blocks, threads=128) as bx:
            with T.Scale("device"):
                for i in T.serial(bx, tiles, step=blocks):
                    # Ends when all ranks' parts of this tile are here: it signals and waits by itself.
                    T.all_gather(A[i * block : (i + 1) * block], G[0:world, i * block : (i + 1) * block])

    return all_gather


@tilescale.jit
def puts(N, world, block=1024, dtype="bfloat16"):
    tiles = -(-N // block)
    blocks = min(tiles, 132)

    @T.prim_func
    def put_gather(A: T.Tensor((N,), dtype), G: T.SymmTensor((world, N), dtype), arrived: T.Signal((world,))):
        with T.Kernel(blocks, threads=128) as bx:
            with T.Scale("device") as rank, n:
                for step, i in T.grid(n, T.ceildiv(tiles - bx, blocks)):
                    peer = (rank + 1 + step) % n
                    tile = (i * blocks + bx) * block
                    mine, there = A[tile : tile + block], G[rank, tile : tile + block]
                    # Each put releases its tile into the counter that the receiver keeps for this source.
                    T.copy(mine, there, dst=peer, signal=arrived[rank])
                if bx == 0:
                    for source in T.serial(n):
                        # Acquires all tiles of the source: G is whole when block 0 ends.
                        T.wait(arrived[source], tiles)

    return put_gather


def run(N, by="collective", seed=0, launches=1):
    """Launches on this rank; returns the largest error against the stacked vectors of all ranks."""
    rank, world = common.ranks()
    g = comm.empty((world, N), torch.bfloat16)
    arrived = comm.signals((world,))
    worst = 0.0
    for launch in range(launches):
        everyone = torch.stack([common.randn(N, seed=seed + launch, rank=r) for r in range(world)]).bfloat16()
        common.poison(g)
        if by == "collective":
            collective(N, world)(everyone[rank], g)
        else:
            puts(N, world)(everyone[rank], g, arrived)
        worst = max(worst, common.difference(g, everyone))
    return worst


def main(argv=None):
    args = common.arguments(argv, __doc__, n=100_000)
    code = 0
    for by in ("collective", "puts"):
        code |= common.report(f"all-gather by {by}, {args.n} elements", run(args.n, by, args.seed), 0)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
