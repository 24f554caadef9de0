"""Packets: awaited where nobody puts them, put twice, taken for a signal, left where they came."""

from __future__ import annotations

import tilescale.language as T
from tests.ranks.faulty.case import case

S = 32


@case("deadlock", "ends the wait for packets box[0, 0:32] of rank 0")
def packets_at_the_own_place(n, bug):
    """Each rank puts its vector to its neighbour, at its own place, and awaits what comes at its own place
    too."""

    @T.prim_func
    def main(A: T.Tensor((S,), "float32"), box: T.Packets((n, S), "float32"), B: T.Tensor((S,), "float32")):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                T.put_packets(A, box[rank, 0:S], dst=(rank + 1) % world)
                T.get_packets(box[rank if bug else (rank + world - 1) % world, 0:S], B)  # here

    return main


@case("race", "a second time in one launch")
def one_place_for_two_rounds(n, bug):
    """The second round of an exchange puts its packets where the first one's came: nothing tells them
    apart."""

    @T.prim_func
    def main(
        A: T.Tensor((2, S), "float32"),
        box: T.Packets((2, n, S), "float32"),
        B: T.Tensor((2, S), "float32"),
    ):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                for step in T.serial(2):
                    turn = 0 if bug else step
                    T.put_packets(A[step, 0:S], box[turn, rank, 0:S], dst=(rank + 1) % world)  # here
                    T.get_packets(box[turn, (rank + world - 1) % world, 0:S], B[step, 0:S])

    return main


@case("race", "inbox")
def a_packet_for_a_signal(n, bug):
    """A packet behind a copy is taken for its signal. It orders nothing but itself."""

    @T.prim_func
    def main(
        A: T.Tensor((S,), "float32"),
        inbox: T.SymmTensor((S,), "float32"),
        box: T.Packets((n, 2), "float32"),
        got: T.Signal((1,)),
        B: T.Tensor((S,), "float32"),
    ):
        with T.Kernel(1):
            mark = T.alloc_fragment((2,), "float32")
            T.fill(mark, 1.0)
            with T.Scale("device") as rank, world:
                right, left = (rank + 1) % world, (rank + world - 1) % world
                T.copy(A, inbox, dst=right)  # here
                T.put_packets(mark, box[rank, 0:2], dst=right)
                if not bug:
                    T.signal(got[0], dst=right)
                T.get_packets(box[left, 0:2], mark)
                if not bug:
                    T.wait(got[0])
                T.copy(inbox, B)  # here

    return main


@case("unawaited", "nobody takes packets box")
def packets_left_behind(n, bug):
    """Everyone puts to everyone, and takes what its neighbour has put alone."""

    @T.prim_func
    def main(A: T.Tensor((S,), "float32"), box: T.Packets((n, S), "float32"), B: T.Tensor((n, S), "float32")):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                for k in T.serial(world):
                    T.put_packets(A, box[rank, 0:S], dst=k)  # here
                for k in T.serial(1 if bug else world):
                    T.get_packets(box[(rank + k) % world, 0:S], B[k, 0:S])

    return main


@case("race", "a second time in one launch: their places are empty again")
def a_dense_packet_taken_twice(n, bug):
    """Each rank takes its neighbour's vector for a check and takes it again for its result, though who takes a
    packet of a dense box empties the place."""

    @T.prim_func
    def main(
        A: T.Tensor((S,), "float32"),
        box: T.Packets((n, S), "float32", dense=True),
        B: T.Tensor((S,), "float32"),
    ):
        with T.Kernel(1):
            x = T.alloc_fragment((S,), "float32")
            with T.Scale("device") as rank, world:
                left = (rank + world - 1) % world
                T.put_packets(A, box[rank, 0:S], dst=(rank + 1) % world)
                T.get_packets(box[left, 0:S], x)  # here
                if bug:
                    T.get_packets(box[left, 0:S], x)  # here
                T.copy(x, B)

    return main
