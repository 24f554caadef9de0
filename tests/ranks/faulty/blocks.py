"""Blocks of a grid, blocks of a cluster, warps of a block: who meets whom, who fills what for whom."""

from __future__ import annotations

import numpy as np

import tilescale.language as T
from tests.ranks.faulty.case import case

S = 32


@case("deadlock", "T.barrier", "have come")
def barrier_under_a_branch(n, bug):
    """Only some blocks come to the grid's barrier."""

    @T.prim_func
    def main(A: T.Tensor((4, S), "float32"), X: T.Tensor((4, S), "float32"), B: T.Tensor((4, S), "float32")):
        with T.Kernel(4) as b:
            T.copy(A[b, 0:S], X[b, 0:S])
            with T.Scale("grid"):
                if bug:
                    if b < 3:
                        T.barrier()  # here
                else:
                    T.barrier()
            if b < 3:
                T.copy(X[b + 1, 0:S], B[b, 0:S])

    return main


@case("race", "X", 'T.Scale("grid")', ranks=1)
def blocks_without_a_barrier(n, bug):
    """A block reads what its neighbour wrote, within one rank."""

    @T.prim_func
    def main(A: T.Tensor((4, S), "float32"), X: T.Tensor((4, S), "float32"), B: T.Tensor((4, S), "float32")):
        with T.Kernel(4) as b:
            T.copy(A[b, 0:S], X[b, 0:S])  # here
            with T.Scale("grid"):
                if not bug:
                    T.barrier()
            T.copy(X[(b + 1) % 4, 0:S], B[b, 0:S])  # here

    return main


@case("race", "C", "assignment", ranks=1, args=lambda n: {"C": np.zeros(S, np.float32)})
def split_k_without_atomics(n, bug):
    """Blocks add their partial products to one result by reading and writing it."""

    @T.prim_func
    def main(A: T.Tensor((4, S), "float32"), C: T.Tensor((S,), "float32")):
        with T.Kernel(4) as b:
            for i in T.Parallel(S):
                if bug:
                    C[i] = C[i] + A[b, i]  # here
                else:
                    T.atomic_add(C[i], A[b, i])

    return main


@case("race", "C", "T.atomic_add", ranks=1)
def atomics_beside_a_plain_store(n, bug):
    """One block clears the result while the others already add to it atomically."""

    @T.prim_func
    def main(A: T.Tensor((4, S), "float32"), C: T.Tensor((S,), "float32")):
        with T.Kernel(4) as b:
            if b == 0:
                for i in T.Parallel(S):
                    C[i] = 0  # here
            if not bug:
                T.sync_grid()
            for i in T.Parallel(S):
                T.atomic_add(C[i], A[b, i])  # here

    return main


@case("race", "total", ranks=1, args=lambda n: {"total": np.zeros(1, np.float32)})
def a_sum_read_while_others_add(n, bug):
    """Every block adds its part atomically and then reads the total plainly, without meeting the others."""

    @T.prim_func
    def main(A: T.Tensor((4,), "float32"), total: T.Tensor((1,), "float32"), B: T.Tensor((4,), "float32")):
        with T.Kernel(4) as b:
            T.atomic_add(total[0], A[b])  # here
            if not bug:
                T.sync_grid()
            B[b] = A[b] / total[0]  # here

    return main


@case("race", "ready", ranks=1, args=lambda n: {"ready": np.zeros(1, np.int32)})
def a_plain_flag_between_blocks(n, bug):
    """A block polls a word that another block stores: without an atomic update it orders nothing."""

    @T.prim_func
    def main(
        A: T.Tensor((S,), "float32"),
        X: T.Tensor((S,), "float32"),
        ready: T.Tensor((1,), "int32"),
        B: T.Tensor((S,), "float32"),
    ):
        with T.Kernel(2) as b:
            if b == 0:
                T.copy(A, X)  # here
                if bug:
                    ready[0] = 1  # here
                else:
                    T.atomic_store(ready[0], 1)
            else:
                seen = T.alloc_var("int32")
                seen = 0
                while seen == 0:
                    if bug:
                        seen = ready[0]  # here
                    else:
                        seen = T.atomic_load(ready[0])
                T.copy(X, B)  # here

    return main


@case("race", "partial", ranks=1)
def the_last_block_is_not_the_last(n, bug):
    """The block with the highest index adds up what all blocks left, as if it ran last."""

    @T.prim_func
    def main(
        A: T.Tensor((4,), "float32"),
        partial: T.Tensor((4,), "float32"),
        done: T.Signal((1,)),
        B: T.Tensor((1,), "float32"),
    ):
        with T.Kernel(4) as b:
            acc = T.alloc_var("float32")
            partial[b] = A[b] * 2  # here
            with T.Scale("grid"):
                if not bug:
                    T.signal(done[0])
                if b == 3:
                    if not bug:
                        T.wait(done[0], 4)
                    acc = 0.0
                    for k in T.serial(4):
                        acc = acc + partial[k]  # here
                    B[0] = acc

    return main


@case("race", "X", "signals made", ranks=1)
def wave_front_one_tile_behind(n, bug):
    """Block b needs what block b − 1 made and awaits block b − 2."""

    @T.prim_func
    def main(A: T.Tensor((4, S), "float32"), X: T.Tensor((5, S), "float32"), made: T.Signal((5,))):
        with T.Kernel(4) as b:
            row = T.alloc_fragment((S,), "float32")
            with T.Scale("grid"):
                T.copy(A[b, 0:S], row)
                if b > 0:
                    T.wait(made[b - 1 if bug else b])
                    for i in T.Parallel(S):
                        row[i] += X[b, i]  # here
                else:
                    T.signal(made[0])
                T.copy(row, X[b + 1, 0:S])  # here
                T.signal(made[b + 1])

    return main


@case("deadlock", "wait for one another", "ready", ranks=1)
def tiles_that_wait_for_later_ones(n, bug):
    """Persistent blocks whose tiles wait for the next tile, which the same blocks have still to come to."""

    @T.prim_func
    def main(
        A: T.Tensor((8, S), "float32"),
        X: T.Tensor((8, S), "float32"),
        ready: T.Signal((9,)),
        B: T.Tensor((8, S), "float32"),
    ):
        with T.Kernel(2) as b:
            with T.Scale("grid"):
                for t in T.Persistent((8,), 2, b):
                    T.copy(A[t, 0:S], X[t, 0:S])
                    if bug:
                        if t < 7:
                            T.wait(ready[t + 1])  # here
                            T.copy(X[t + 1, 0:S], B[t, 0:S])
                    else:
                        if t > 0:
                            T.wait(ready[t - 1])
                            T.copy(X[t - 1, 0:S], B[t, 0:S])
                    T.signal(ready[t])

    return main


@case("not-resident", "resident at once", ranks=1)
def grid_too_large_to_wait(n, bug):
    """Blocks meet in a grid of which not all are resident, so that some never start."""
    extent = 300 if bug else 20

    @T.prim_func
    def main(
        X: T.Tensor((extent,), "float32"),
        B: T.Tensor((extent,), "float32"),
        C: T.Tensor((extent,), "float32"),
    ):
        with T.Kernel(extent, threads=1024) as b:
            B[b] = X[b]
            with T.Scale("grid"):
                T.barrier()  # here
            C[b] = B[(b + 1) % extent]

    return main


@case("not-resident", "resident at once", ranks=1)
def a_chain_longer_than_the_device(n, bug):
    """Blocks wait for the block in front of them, with so much shared memory that a block fills a
    processor."""
    extent = 140 if bug else 20

    @T.prim_func
    def main(
        X: T.Tensor((extent,), "float32"), done: T.Signal((extent + 1,)), C: T.Tensor((extent,), "float32")
    ):
        with T.Kernel(extent, threads=128) as b:
            big = T.alloc_shared((48, 1024), "float32")
            big[0, 0] = X[b]
            with T.Scale("grid"):
                if b > 0:
                    T.wait(done[b])  # here
                C[b] = big[0, 0]
                T.signal(done[b + 1])

    return main


# ---- clusters


@case("race", "tile", 'T.Scale("cta_cluster")', ranks=1)
def a_cluster_read_without_a_barrier(n, bug):
    """A block reads its neighbour's shared memory before the neighbour has filled it."""

    @T.prim_func
    def main(A: T.Tensor((4, S), "float32"), B: T.Tensor((4, S), "float32")):
        with T.Kernel(block=(4,), cta_cluster=2) as b:
            tile, other = T.alloc_shared((S,), "float32"), T.alloc_shared((S,), "float32")
            with T.Scale("cta_cluster") as c, blocks:
                T.copy(A[b, 0:S], tile)  # here
                if not bug:
                    T.barrier()
                T.copy(tile, other, src=(c + 1) % blocks)  # here
                T.copy(other, B[b, 0:S])

    return main


@case("race", "tile", ranks=1)
def a_cluster_tile_overwritten(n, bug):
    """The next step fills the tile that the neighbour may still read: one of two cluster barriers is
    missing."""

    @T.prim_func
    def main(A: T.Tensor((3, 2, S), "float32"), B: T.Tensor((3, 2, S), "float32")):
        with T.Kernel(block=(2,), cta_cluster=2) as b:
            tile, other = T.alloc_shared((S,), "float32"), T.alloc_shared((S,), "float32")
            with T.Scale("cta_cluster") as c, blocks:
                for k in T.serial(3):
                    T.copy(A[k, b, 0:S], tile)  # here
                    T.barrier()
                    T.copy(tile, other, src=(c + 1) % blocks)  # here
                    T.copy(other, B[k, b, 0:S])
                    if not bug:
                        T.barrier()

    return main


@case("race", "inbox", "signals got[0] behind it", ranks=1)
def a_cluster_put_without_a_wait(n, bug):
    """A block puts into its neighbour's shared memory; the neighbour reads before it waits."""

    @T.prim_func
    def main(A: T.Tensor((4, S), "float32"), B: T.Tensor((4, S), "float32")):
        with T.Kernel(block=(4,), cta_cluster=2) as b:
            tile, inbox = T.alloc_shared((S,), "float32"), T.alloc_shared((S,), "float32")
            got = T.alloc_signal((1,))
            T.copy(A[b, 0:S], tile)
            with T.Scale("cta_cluster") as c, blocks:
                T.copy(tile, inbox, dst=1 - c, signal=got[0])  # here
                if not bug:
                    T.wait(got[0])
                T.copy(inbox, B[b, 0:S])  # here
                if bug:
                    T.wait(got[0])

    return main


@case("no-such-rank", "the cluster has no block 2: it has 2", ranks=1)
def a_block_outside_the_cluster(n, bug):
    """The neighbour is counted without going round."""

    @T.prim_func
    def main(A: T.Tensor((4, S), "float32"), B: T.Tensor((4, S), "float32")):
        with T.Kernel(block=(4,), cta_cluster=2) as b:
            tile, other = T.alloc_shared((S,), "float32"), T.alloc_shared((S,), "float32")
            with T.Scale("cta_cluster") as c, blocks:
                T.copy(A[b, 0:S], tile)
                T.barrier()
                if bug:
                    T.copy(tile, other, src=c + 1)  # here
                else:
                    T.copy(tile, other, src=(c + 1) % blocks)
                T.barrier()
            if not bug:
                T.copy(other, B[b, 0:S])

    return main


@case("deadlock", "T.barrier", "have come", ranks=1)
def a_cluster_barrier_under_a_branch(n, bug):
    """Only the first block of a cluster comes to its barrier."""

    @T.prim_func
    def main(A: T.Tensor((4, S), "float32"), B: T.Tensor((4, S), "float32")):
        with T.Kernel(block=(4,), cta_cluster=2) as b:
            tile, other = T.alloc_shared((S,), "float32"), T.alloc_shared((S,), "float32")
            with T.Scale("cta_cluster") as c, blocks:
                T.copy(A[b, 0:S], tile)
                if bug:
                    if c == 0:
                        T.barrier()  # here
                else:
                    T.barrier()
                if c == 0:
                    T.copy(tile, other, src=1)
                    T.copy(other, B[b, 0:S])

    return main


# ---- warps


@case("race", "tile", "warp", ranks=1)
def stage_reused_too_early(n, bug):
    """A warp fills the one stage again before the other warp has read it."""

    @T.prim_func
    def main(A: T.Tensor((4, S), "float32"), B: T.Tensor((4, S), "float32")):
        with T.Kernel(1, threads=64):
            tile = T.alloc_shared((S,), "float32")
            full, free = T.alloc_signal((1,)), T.alloc_signal((1,))
            with T.Scale("warp") as w, warps:
                if w == 0:
                    for k in T.serial(4):
                        if not bug:
                            T.wait(free[0], k)
                        T.copy(A[k, 0:S], tile)  # here
                        T.signal(full[0])
                else:
                    for k in T.serial(4):
                        T.wait(full[0], k + 1)
                        T.copy(tile, B[k, 0:S])  # here
                        T.signal(free[0])
                    if bug:
                        T.wait(free[0], 4)

    return main


@case("deadlock", "no statement that is still to run", "free", ranks=1)
def a_producer_whose_empty_signal_is_missing(n, bug):
    """The producer waits for stages to be given back, and the consumer never gives one."""

    @T.prim_func
    def main(A: T.Tensor((4, S), "float32"), B: T.Tensor((4, S), "float32")):
        with T.Kernel(1, threads=64):
            tiles = T.alloc_shared((2, S), "float32")
            full, free = T.alloc_signal((1,)), T.alloc_signal((1,))
            with T.Scale("warp") as w, warps:
                if w == 0:
                    for k in T.serial(4):
                        T.wait(free[0], k - 1)  # here
                        T.copy(A[k, 0:S], tiles[k % 2, 0:S])
                        T.signal(full[0])
                else:
                    for k in T.serial(4):
                        T.wait(full[0], k + 1)  # here
                        T.copy(tiles[k % 2, 0:S], B[k, 0:S])
                        if not bug:
                            T.signal(free[0])

    return main


@case("race", "tiles", "warp", ranks=1)
def the_wrong_phase(n, bug):
    """A counter a stage; from its second round on the consumer still asks for the first phase."""

    @T.prim_func
    def main(A: T.Tensor((4, S), "float32"), B: T.Tensor((4, S), "float32")):
        with T.Kernel(1, threads=64):
            tiles = T.alloc_shared((2, S), "float32")
            full, free = T.alloc_signal((2,)), T.alloc_signal((2,))
            with T.Scale("warp") as w, warps:
                if w == 0:
                    for k in T.serial(4):
                        T.wait(free[k % 2], k // 2)
                        T.copy(A[k, 0:S], tiles[k % 2, 0:S])  # here
                        T.signal(full[k % 2])
                else:
                    for k in T.serial(4):
                        T.wait(full[k % 2], 1 if bug else k // 2 + 1)
                        T.copy(tiles[k % 2, 0:S], B[k, 0:S])  # here
                        T.signal(free[k % 2])

    return main


@case("race", "tile", "warp", ranks=1)
def one_consumer_gives_the_stage_back(n, bug):
    """Two warps read a stage, and the producer fills it again when the first of them is done."""

    @T.prim_func
    def main(A: T.Tensor((3, S), "float32"), B: T.Tensor((2, 3, S), "float32")):
        with T.Kernel(1, threads=96):
            tile = T.alloc_shared((S,), "float32")
            full, free = T.alloc_signal((1,)), T.alloc_signal((1,))
            with T.Scale("warp") as w, warps:
                if w == 0:
                    for k in T.serial(3):
                        T.wait(free[0], k if bug else 2 * k)
                        T.copy(A[k, 0:S], tile)  # here
                        T.signal(full[0])
                else:
                    for k in T.serial(3):
                        T.wait(full[0], k + 1)
                        T.copy(tile, B[w - 1, k, 0:S])  # here
                        T.signal(free[0])

    return main


@case("race", "tile", "warp", ranks=1)
def warps_share_a_tile(n, bug):
    """Each warp fills its half of a tile and goes on to read the other half."""

    @T.prim_func
    def main(A: T.Tensor((2, S), "float32"), B: T.Tensor((2, S), "float32")):
        with T.Kernel(1, threads=64):
            tile = T.alloc_shared((2, S), "float32")
            full = T.alloc_signal((2,))
            with T.Scale("warp") as w, warps:
                T.copy(A[w, 0:S], tile[w, 0:S])  # here
                if not bug:
                    T.signal(full[w])
                    T.wait(full[1 - w])
                T.copy(tile[1 - w, 0:S], B[w, 0:S])  # here

    return main


@case("deadlock", "T.barrier", "have come", ranks=1)
def a_barrier_that_some_warps_call(n, bug):
    """The grid's barrier counts every warp that could call it, and only the first of each block does."""

    @T.prim_func
    def main(
        A: T.Tensor((2, 2, S), "float32"),
        X: T.Tensor((2, 2, S), "float32"),
        B: T.Tensor((2, 2, S), "float32"),
    ):
        with T.Kernel(2, threads=64) as b:
            with T.Scale("warp") as w, warps:
                T.copy(A[b, w, 0:S], X[b, w, 0:S])
                with T.Scale("grid"):
                    if bug:
                        if w == 0:
                            T.barrier()  # here
                    else:
                        T.barrier()
                if w == 0:
                    T.copy(X[1 - b, 0, 0:S], B[b, 0, 0:S])

    return main


@case("race", "tile", "an arrival at full[0]", ranks=1)
def a_tile_that_no_mbarrier_is_awaited_for(n, bug):
    """One warp fills a tile and arrives at a barrier with phases; the other reads the tile and does not
    wait."""

    @T.prim_func
    def main(A: T.Tensor((S,), "float32"), B: T.Tensor((S,), "float32")):
        with T.Kernel(1, threads=64):
            tile, full = T.alloc_shared((S,), "float32"), T.alloc_barrier(32)
            with T.Scale("warp") as (w, n):
                if w == 0:
                    for i in T.Parallel(S):
                        tile[i] = A[i]  # here
                    T.mbarrier_arrive(full[0])
                else:
                    if not bug:
                        T.mbarrier_wait_parity(full[0], 0)
                    for i in T.Parallel(S):
                        B[i] = tile[i] + 1  # here

    return main
