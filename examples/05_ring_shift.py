"""Ring shift: every rank puts its vector into its right neighbour's memory.

Look at: T.Scale("device") (from here on, statements may reach other ranks), T.copy(…, dst=rank, signal=…) and
T.wait.
"""

import common
import torch

import tilescale
import tilescale.comm as comm
import tilescale.language as T


@tilescale.jit
def kernel(N, block=1024):
    @T.prim_func
    def ring_shift(
        A: T.Tensor((N,), "float32"),
        inbox: T.SymmTensor((N,), "float32"),
        arrived: T.Signal((T.ceildiv(N, block),)),
        B: T.Tensor((N,), "float32"),
    ):
        with T.Kernel(min(T.ceildiv(N, block), 132), threads=128) as bx:
            with T.Scale("device") as rank, n:
                for i in T.serial(bx, T.ceildiv(N, block), step=min(T.ceildiv(N, block), 132)):
                    here = inbox[i * block : (i + 1) * block]
                    # The signal releases this tile's put to the right neighbour,
                    T.copy(A[i * block : (i + 1) * block], here, dst=(rank + 1) % n, signal=arrived[i])
                    # and the wait acquires the tile that the left neighbour put here.
                    T.wait(arrived[i])
                    T.copy(here, B[i * block : (i + 1) * block])

    return ring_shift


def run(N, seed=0, launches=1):
    """Launches on this rank; returns the largest error against the left neighbour's vector."""
    rank, world = common.ranks()
    b = torch.empty(N, device=common.device())
    inbox = comm.empty((N,), torch.float32)
    arrived = comm.signals((-(-N // 1024),))
    shift, worst = kernel(N), 0.0
    for launch in range(launches):
        a = common.randn(N, seed=seed + launch, rank=rank)
        common.poison(inbox), common.poison(b)
        shift(a, inbox, arrived, b)
        worst = max(worst, common.difference(b, common.randn(N, seed=seed + launch, rank=(rank - 1) % world)))
    return worst


def main(argv=None):
    args = common.arguments(argv, __doc__, n=100_000)
    return common.report(f"ring shift, {args.n} elements", run(args.n, args.seed), 0)


if __name__ == "__main__":
    raise SystemExit(main())
