"""All-gather + GEMM in one kernel: C = concat(X of all ranks) · W, where each rank holds its rows of X and
its columns of W.

Look at: while a rank multiplies the rows that it owns, it puts them to the others; tiles of other ranks' rows
wait for exactly the rows that they read. Every row crosses to every rank once. `--trace` shows when.
"""

import common
import timeline
import torch

import tilescale
import tilescale.comm as comm
import tilescale.language as T


@tilescale.jit
def kernel(M, N, K, world, BM=64, BN=64, BK=64, blocks=132, dtype="bfloat16"):
    """M rows a rank, N columns of W a rank."""
    rows, cols = -(-M // BM), -(-N // BN)
    blocks = min(blocks, world * rows * cols)  # blocks that wait must all be resident

    @T.prim_func
    def ag_gemm(
        X: T.SymmTensor((world, M, K), dtype),  # at first X[rank] alone is there, in the end all of it
        W: T.Tensor((K, N), dtype),
        C: T.Tensor((world, M, N), dtype),
        here: T.Signal((world, rows)),
    ):
        with T.Kernel(blocks, threads=128) as b:
            x, w = T.alloc_shared((BM, BK), dtype), T.alloc_shared((BK, BN), dtype)
            acc = T.alloc_fragment((BM, BN), "float32")
            with T.Scale("device") as rank, n:
                # Own rows first, so nobody waits before it has put.
                for step, i, j in T.Persistent((world, rows, cols), blocks, b):
                    owner = (rank + step) % n
                    if step == 0:
                        mine = X[rank, i * BM : (i + 1) * BM, 0:K]
                        for hop in T.serial(j + 1, n, step=cols):  # a row's blocks share its receivers
                            peer, flag = (rank + hop) % n, here[rank, i]
                            # Goes on beside the products; its signal releases these rows to the receiver.
                            T.copy(mine, mine, dst=peer, signal=flag, blocking=False)
                    else:
                        T.wait(here[owner, i])  # acquires the rows that their owner put here
                    T.clear(acc)
                    for k in T.Pipelined(T.ceildiv(K, BK), num_stages=2):
                        T.copy(X[owner, i * BM, k * BK], x)
                        T.copy(W[k * BK, j * BN], w)
                        T.gemm(x, w, acc)
                    T.copy(acc, C[owner, i * BM, j * BN])

    return ag_gemm


def run(M, N, K, seed=0, launches=1, instrument=False):
    """Launches on this rank; returns the largest error against torch."""
    rank, world = common.ranks()
    x = comm.empty((world, M, K), torch.bfloat16)
    here = comm.signals((world, -(-M // 64)))
    c = torch.empty(world, M, N, dtype=torch.bfloat16, device=common.device())
    compiled, worst = kernel(M, N, K, world), 0.0
    if instrument:
        compiled = tilescale.compile(kernel.get_tir(M, N, K, world), instrument=True)
    for launch in range(launches):
        everyone = torch.stack([common.randn(M, K, seed=seed + launch, rank=r) for r in range(world)])
        w = common.randn(K, N, seed=seed + launch + 1000, rank=rank, scale=K**-0.5)
        everyone, w = everyone.bfloat16(), w.bfloat16()
        common.poison(x)[rank] = everyone[rank]
        common.poison(c)
        compiled(x, w, c, here)
        worst = max(worst, common.difference(c, everyone.float() @ w.float()))
    return worst


def main(argv=None):
    options = common.options(__doc__, m=128, n=256, k=512)
    options.add_argument(
        "--trace", action="store_true", help="log products and puts; show when they ran and what was sent"
    )
    args = options.parse_args(argv)
    _, world = common.ranks()
    error = run(args.m, args.n, args.k, args.seed)
    code = common.report(f"AG-GEMM, {world * args.m}×{args.n}×{args.k}", error, 2e-2)
    if args.trace:
        code |= run(args.m, args.n, args.k, args.seed, instrument=True) > 2e-2
        code |= timeline.show(expected=args.m * args.k * 2)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
