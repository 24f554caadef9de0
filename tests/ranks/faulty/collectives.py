"""Meetings of ranks: left out between phases, under branches, in another order, at too small a scale."""

from __future__ import annotations

import tilescale.language as T
from tests.ranks.faulty.case import case

S = 32


@case("race", "part")
def missing_phase_barrier(n, bug):
    """A sum of all ranks' vectors whose parts are read before their owners have written them."""

    @T.prim_func
    def main(A: T.Tensor((S,), "float32"), part: T.SymmTensor((S,), "float32"), B: T.Tensor((S,), "float32")):
        with T.Kernel(1):
            total, piece = T.alloc_fragment((S,), "float32"), T.alloc_fragment((S,), "float32")
            with T.Scale("device") as rank, world:
                T.copy(A, part)  # here
                if not bug:
                    T.barrier()
                T.clear(total)
                for r in T.serial(world):
                    T.copy(part, piece, src=r)  # here
                    for i in T.Parallel(S):
                        total[i] += piece[i]
                T.copy(total, B)

    return main


@case("race", "sums", 'T.Scale("device")')
def missing_barrier_between_the_shots(n, bug):
    """Two-shot all-reduce by pulls: slices are fetched before their owners have added them up."""
    piece = S // 2

    @T.prim_func
    def main(
        A: T.Tensor((n * piece,), "float32"),
        parts: T.SymmTensor((n * piece,), "float32"),
        sums: T.SymmTensor((piece,), "float32"),
        B: T.Tensor((n * piece,), "float32"),
    ):
        with T.Kernel(1):
            acc, tile = T.alloc_fragment((piece,), "float32"), T.alloc_fragment((piece,), "float32")
            with T.Scale("device") as rank, world:
                T.copy(A, parts)
                T.barrier()
                T.clear(acc)
                for r in T.serial(world):
                    T.copy(parts[rank * piece : (rank + 1) * piece], tile, src=r)
                    for i in T.Parallel(piece):
                        acc[i] += tile[i]
                T.copy(acc, sums)  # here
                if not bug:
                    T.barrier()
                for r in T.serial(world):
                    T.copy(sums, B[r * piece : (r + 1) * piece], src=r)  # here

    return main


@case("race", "sums")
def missing_second_wait(n, bug):
    """Two-shot all-reduce by puts: the sums that the others hand out are read without waiting for them."""
    piece = S // 2

    @T.prim_func
    def main(
        A: T.Tensor((n, piece), "float32"),
        parts: T.SymmTensor((n, piece), "float32"),
        sums: T.SymmTensor((n, piece), "float32"),
        given: T.Signal((1,)),
        done: T.Signal((1,)),
        B: T.Tensor((n, piece), "float32"),
    ):
        with T.Kernel(1):
            acc, tile = T.alloc_fragment((piece,), "float32"), T.alloc_fragment((piece,), "float32")
            with T.Scale("device") as rank, world:
                for hop in T.serial(world):
                    peer = (rank + hop) % world
                    T.copy(A[peer, 0:piece], parts[rank, 0:piece], dst=peer, signal=given[0])
                T.wait(given[0], world)
                T.clear(acc)
                for r in T.serial(world):
                    T.copy(parts[r, 0:piece], tile)
                    for i in T.Parallel(piece):
                        acc[i] += tile[i]
                for hop in T.serial(world):
                    T.copy(acc, sums[rank, 0:piece], dst=(rank + hop) % world, signal=done[0])  # here
                T.wait(done[0], 1 if bug else world)
                T.copy(sums, B)  # here

    return main


@case("race", "R", "T.all_reduce")
def reduced_before_it_is_filled(n, bug):
    """A block reduces the tile that its neighbour block fills: the collective meets the same block of each
    rank, not the grid."""

    @T.prim_func
    def main(
        A: T.Tensor((2, S), "float32"), R: T.SymmTensor((2, S), "float32"), B: T.Tensor((2, S), "float32")
    ):
        with T.Kernel(2) as b:
            with T.Scale("device") as rank, world:
                T.copy(A[1 - b, 0:S], R[1 - b, 0:S])  # here
                if not bug:
                    T.barrier()
                T.all_reduce(R[b, 0:S], B[b, 0:S])  # here

    return main


@case("race", "part", 'T.Scale("device")')
def a_grid_barrier_for_ranks(n, bug):
    """The blocks of a rank meet where those of all ranks should."""

    @T.prim_func
    def main(
        A: T.Tensor((2, S), "float32"), part: T.SymmTensor((2, S), "float32"), B: T.Tensor((2, S), "float32")
    ):
        with T.Kernel(2) as b:
            with T.Scale("device") as rank, world:
                T.copy(A[b, 0:S], part[b, 0:S])  # here
                if bug:
                    T.sync_grid()
                else:
                    T.barrier()
                T.copy(part[1 - b, 0:S], B[b, 0:S], src=(rank + 1) % world)  # here

    return main


@case("mismatch", "the collective")
def collectives_in_another_order(n, bug):
    """Rank 0 gathers and then reduces, the others reduce and then gather."""

    @T.prim_func
    def main(
        A: T.Tensor((S,), "float32"), G: T.SymmTensor((n, S), "float32"), R: T.SymmTensor((S,), "float32")
    ):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                T.copy(A, R)
                if bug and rank == 0:
                    T.all_gather(A, G)  # here
                    T.all_reduce(R)  # here
                else:
                    T.all_reduce(R)  # here
                    T.all_gather(A, G)  # here

    return main


@case("mismatch", "the collective")
def another_root_on_rank_zero(n, bug):
    """Rank 0 believes that it is the root, the others that rank 1 is."""

    @T.prim_func
    def main(A: T.Tensor((S,), "float32"), G: T.SymmTensor((S,), "float32"), B: T.Tensor((S,), "float32")):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                if bug and rank == 0:
                    T.broadcast(A, G, 0)  # here
                else:
                    T.broadcast(A, G, 1)  # here
                T.copy(G, B)

    return main


@case("mismatch", "the root is", "T.broadcast")
def everyone_is_the_root(n, bug):
    """The root is computed, and every rank computes itself: n broadcasts into one buffer."""

    @T.prim_func
    def main(A: T.Tensor((S,), "float32"), G: T.SymmTensor((S,), "float32"), B: T.Tensor((S,), "float32")):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                T.broadcast(A, G, rank if bug else world - 1)  # here
                T.copy(G, B)

    return main


@case("deadlock", "the collective", "have come")
def a_collective_under_a_branch(n, bug):
    """The last rank has no rows and leaves the reduction out."""

    @T.prim_func
    def main(A: T.Tensor((S,), "float32"), R: T.SymmTensor((S,), "float32"), B: T.Tensor((S,), "float32")):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                T.copy(A, R)
                if not bug or rank < world - 1:
                    T.all_reduce(R, B)  # here

    return main


@case("deadlock", "T.barrier", "have come")
def a_barrier_under_a_rank_branch(n, bug):
    """Rank 0 meets the others once more than they meet it."""

    @T.prim_func
    def main(A: T.Tensor((S,), "float32"), part: T.SymmTensor((S,), "float32"), B: T.Tensor((S,), "float32")):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                T.copy(A, part)
                T.barrier()
                T.copy(part, B, src=(rank + 1) % world)
                if bug:
                    if rank == 0:
                        T.barrier()  # here
                else:
                    T.barrier()

    return main


@case("deadlock", "T.barrier")
def a_barrier_in_a_loop_of_other_lengths(n, bug):
    """Each rank meets the others once for each of its tiles, and ranks have different numbers of tiles."""

    @T.prim_func
    def main(
        A: T.Tensor((4, S), "float32"), part: T.SymmTensor((4, S), "float32"), B: T.Tensor((4, S), "float32")
    ):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                for k in T.serial(2 + rank if bug else 4):
                    T.copy(A[k, 0:S], part[k, 0:S])
                    T.barrier()  # here
                    T.copy(part[k, 0:S], B[k, 0:S], src=(rank + 1) % world)

    return main


@case("deadlock", "wait for one another")
def a_barrier_against_a_wait(n, bug):
    """Rank 0 waits for a signal that rank 1 sends behind a barrier, to which rank 0 has still to come."""

    @T.prim_func
    def main(
        A: T.Tensor((S,), "float32"),
        inbox: T.SymmTensor((S,), "float32"),
        got: T.Signal((1,)),
        B: T.Tensor((S,), "float32"),
    ):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                if not bug:
                    T.barrier()
                if rank == 0:
                    T.wait(got[0])  # here
                    T.copy(inbox, B)
                if bug:
                    T.barrier()  # here
                if rank == 1:
                    T.copy(A, inbox, dst=0, signal=got[0])

    return main


@case("different-programs", "rank 1 launches")
def another_tile_on_rank_one(n, bug):
    """The tuner chose another tile on one rank."""

    def made(tile):
        @T.prim_func  # here
        def main(
            A: T.Tensor((64,), "float32"), R: T.SymmTensor((64,), "float32"), B: T.Tensor((64,), "float32")
        ):
            with T.Kernel(64 // tile) as b:
                with T.Scale("device"):
                    T.copy(A[b * tile : (b + 1) * tile], R[b * tile : (b + 1) * tile])
                    T.all_reduce(R[b * tile : (b + 1) * tile], B[b * tile : (b + 1) * tile])

        return main

    return [made(16 if bug and r == 1 else 32) for r in range(n)]
