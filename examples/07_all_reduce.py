"""All-reduce: the sum of everyone's vectors on every rank, in one shot and in two.

Look at: one-shot puts the whole vector to every rank, one trip but n − 1 times the bytes: for small vectors.
Two-shot cuts the vector into n slices; rank r sums slice r and hands it out: two trips, 2(n − 1)/n of the
vector sent: for large ones. Vectors are bfloat16; both add in float32 and in rank order, so all ranks get
the same bits. (T.all_reduce does the same for a tile in one line: see 10_gemm_ar.py.)
"""

import common
import torch

import tilescale
import tilescale.comm as comm
import tilescale.language as T


@T.macro
def add_up(parts, n, low, block, acc, tile):
    """acc = parts[0, low:+block] + … + parts[n − 1, low:+block], in this order."""
    T.clear(acc)
    for r in T.serial(n):
        T.copy(parts[r, low], tile)
        for i in T.Parallel(block):
            acc[i] += tile[i]


@tilescale.jit
def one_shot(N, world, block=1024, dtype="bfloat16"):
    tiles = -(-N // block)
    blocks = min(tiles, 132)

    @T.prim_func
    def all_reduce_one_shot(
        A: T.Tensor((N,), dtype),
        parts: T.SymmTensor((world, N), dtype),
        arrived: T.Signal((tiles,)),
        B: T.Tensor((N,), dtype),
    ):
        with T.Kernel(blocks, threads=128) as bx:
            acc, tile = T.alloc_fragment((block,), "float32"), T.alloc_fragment((block,), dtype)
            with T.Scale("device") as rank, n:
                for t in T.serial(bx, tiles, step=blocks):
                    low = t * block
                    for step in T.serial(n):
                        # Each put releases its tile to one rank,
                        T.copy(
                            A[low : low + block],
                            parts[rank, low : low + block],
                            dst=(rank + step) % n,
                            signal=arrived[t],
                        )
                    T.wait(arrived[t], n)  # which acquires the n tiles that it got, its own among them.
                    add_up(parts, n, low, block, acc, tile)
                    T.copy(acc, B[low])

    return all_reduce_one_shot


@tilescale.jit
def two_shot(N, world, block=256, dtype="bfloat16"):
    slice_ = -(-N // world)  # rank r sums elements r * slice_ …
    tiles = -(-slice_ // block)
    blocks = min(tiles, 132)

    @T.prim_func
    def all_reduce_two_shot(
        A: T.Tensor((N,), dtype),
        parts: T.SymmTensor((world, slice_), dtype),
        sums: T.SymmTensor((world, slice_), dtype),
        given: T.Signal((tiles,)),
        done: T.Signal((tiles,)),
        B: T.Tensor((N,), dtype),
    ):
        with T.Kernel(blocks, threads=128) as bx:
            acc, tile = T.alloc_fragment((block,), "float32"), T.alloc_fragment((block,), dtype)
            with T.Scale("device") as rank, n:
                for t in T.serial(bx, tiles, step=blocks):
                    low = t * block
                    for step in T.serial(n):
                        peer = (rank + step) % n
                        # Shot one. Each put releases a part of the peer's slice to the peer,
                        T.copy(A[peer * slice_ + low], tile)
                        T.copy(tile, parts[rank, low : low + block], dst=peer, signal=given[t])
                    T.wait(given[t], n)  # which acquires the n parts of its own slice.
                    add_up(parts, n, low, block, acc, tile)
                    for step in T.serial(n):
                        # Shot two. Each put releases a finished sum to one rank,
                        T.copy(acc, sums[rank, low : low + block], dst=(rank + step) % n, signal=done[t])
                    T.wait(done[t], n)  # which acquires this tile of all n slices.
                    for owner in T.serial(n):
                        for i in T.Parallel(block):
                            if low + i < slice_:
                                B[owner * slice_ + low + i] = sums[owner, low + i]

    return all_reduce_two_shot


def run(N, shots=1, seed=0, launches=1):
    """Launches on this rank; returns the largest error against torch's sum in float32, rounded once."""
    rank, world = common.ranks()
    slice_ = -(-N // world)
    b = torch.empty(N, dtype=torch.bfloat16, device=common.device())
    if shots == 1:
        reduce = one_shot(N, world)
        scratch = [comm.empty((world, N), torch.bfloat16), comm.signals((-(-N // 1024),))]
    else:
        reduce = two_shot(N, world)
        scratch = [comm.empty((world, slice_), torch.bfloat16) for _ in range(2)] + [
            comm.signals((-(-slice_ // 256),)) for _ in range(2)
        ]
    worst = 0.0
    for launch in range(launches):
        everyone = [common.randn(N, seed=seed + launch, rank=r).bfloat16() for r in range(world)]
        for t in (b, *scratch[:shots]):
            common.poison(t)
        reduce(everyone[rank], *scratch, b)
        want = sum(x.float() for x in everyone).bfloat16()  # in rank order, as the kernels add
        worst = max(worst, common.difference(b, want))
    return worst


def main(argv=None):
    args = common.arguments(argv, __doc__, n=100_000)
    code = 0
    for shots in (1, 2):
        code |= common.report(
            f"all-reduce in {shots} shot{'s'[: shots - 1]}, {args.n} elements",
            run(args.n, shots, args.seed),
            0,
        )
    return code


if __name__ == "__main__":
    raise SystemExit(main())
