"""Teams inside a kernel: meetings left out, of the wrong members or in another order; ranks numbered as the
launch does."""

from __future__ import annotations

import tilescale.language as T
from tests.ranks.faulty.case import case

S = 32


@case("race", "part", ranks=4)
def missing_team_barrier(n, bug):
    """Each node of two ranks exchanges its vectors, which are read before the other has written them."""

    @T.prim_func
    def main(A: T.Tensor((S,), "float32"), part: T.SymmTensor((S,), "float32"), B: T.Tensor((S,), "float32")):
        with T.Kernel(1):
            with T.Scale("device") as (rank, world):
                node = rank // 2
                with T.Scale("device", team=range(node * 2, node * 2 + 2)) as (me, m):
                    T.copy(A, part)  # here
                    if not bug:
                        T.barrier()
                    T.copy(part, B, src=1 - me)  # here

    return main


@case("race", "part", ranks=4)
def a_team_without_the_writer(n, bug):
    """Pairs meet where all four ranks should: the last to read fetches from another pair."""

    @T.prim_func
    def main(A: T.Tensor((S,), "float32"), part: T.SymmTensor((S,), "float32"), B: T.Tensor((S,), "float32")):
        with T.Kernel(1):
            with T.Scale("device") as (rank, world):
                T.copy(A, part)  # here
                node = rank // 2
                if bug:
                    with T.Scale("device", team=range(node * 2, node * 2 + 2)):
                        T.barrier()
                else:
                    T.barrier()
                T.copy(part, B, src=(rank + 1) % world)  # here

    return main


@case("no-such-rank", "the team has 2", ranks=4)
def ranks_of_the_launch_in_a_team(n, bug):
    """A peer inside a team by its number in the launch, which is another one there."""

    @T.prim_func
    def main(
        A: T.Tensor((S,), "float32"),
        inbox: T.SymmTensor((S,), "float32"),
        got: T.Signal((1,)),
        B: T.Tensor((S,), "float32"),
    ):
        with T.Kernel(1):
            with T.Scale("device") as (rank, world):
                with T.Scale("device", team=range(rank % 2, world, 2)) as (me, m):
                    peer = (rank + 2) % world if bug else (me + 1) % m
                    for i in T.Parallel(S):
                        inbox[i] = A[i]
                    T.barrier()
                    T.copy(inbox, B, src=peer)  # here

    return main


@case("deadlock", "of ranks 0, 1, 2", "T.barrier", ranks=4)
def some_of_a_team_skip_its_barrier(n, bug):
    """The barrier of a team stands under a branch that not all of its members take."""

    @T.prim_func
    def main(A: T.Tensor((S,), "float32"), part: T.SymmTensor((S,), "float32"), B: T.Tensor((S,), "float32")):
        with T.Kernel(1):
            with T.Scale("device", team=[0, 1, 2]) as (me, m):
                T.copy(A, part)
                if bug:
                    if me > 0:
                        T.barrier()  # here
                else:
                    T.barrier()
                    T.copy(part, B, src=(me + 1) % m)

    return main


@case("deadlock", "wait for one another", ranks=3)
def teams_that_meet_in_a_circle(n, bug):
    """Three pairs of three ranks: each rank comes to its own pair first, and so none is complete."""
    pairs = (
        [[[0, 1], [2, 0]], [[1, 2], [0, 1]], [[2, 0], [1, 2]]]
        if bug
        else [[[0, 1], [2, 0]], [[0, 1], [1, 2]], [[1, 2], [2, 0]]]
    )

    @T.prim_func
    def main(
        A: T.Tensor((S,), "float32"), part: T.SymmTensor((S,), "float32"), B: T.Tensor((3, S), "float32")
    ):
        with T.Kernel(1):
            T.copy(A, part)
            with T.Scale("device") as (rank, world):
                for r in range(3):
                    if rank == r:
                        for pair in pairs[r]:
                            with T.Scale("device", team=pair) as (me, m):
                                T.barrier()  # here
                                T.copy(part, B[pair[0], 0:S], src=1 - me)

    return main


@case("mismatch", "ranks of the team", ranks=3)
def a_team_in_two_orders(n, bug):
    """Members of one team number each other differently, and so mean two roots."""

    @T.prim_func
    def main(A: T.Tensor((S,), "float32"), G: T.SymmTensor((S,), "float32")):
        with T.Kernel(1):
            with T.Scale("device") as (rank, world):
                if rank == 0:
                    with T.Scale("device", team=[0, 2] if bug else [2, 0]):
                        T.broadcast(A, G, root=0)  # here
                else:
                    with T.Scale("device", team=[2, 0]):
                        T.broadcast(A, G, root=0)  # here

    return main
