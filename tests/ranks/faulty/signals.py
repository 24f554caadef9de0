"""Signals and waits between ranks: missing, early, miscounted, at the wrong counter, at the wrong rank."""

from __future__ import annotations

import numpy as np

import tilescale.language as T
from tests.ranks.faulty.case import case

S = 32


@case("race", "inbox", "T.copy", "signals got[0] behind it")
def wait_behind_the_read(n, bug):
    """The neighbour's vector is read before it is awaited."""

    @T.prim_func
    def main(
        A: T.Tensor((S,), "float32"),
        inbox: T.SymmTensor((S,), "float32"),
        got: T.Signal((1,)),
        B: T.Tensor((S,), "float32"),
    ):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                T.copy(A, inbox, dst=(rank + 1) % world, signal=got[0])  # here
                if not bug:
                    T.wait(got[0])
                T.copy(inbox, B)  # here
                if bug:
                    T.wait(got[0])

    return main


@case("race", "values", "signals got[1] behind it")
def one_of_two_waits(n, bug):
    """Keys and values arrive with a counter each, and that of the values is awaited when they have been
    read."""

    @T.prim_func
    def main(
        K: T.Tensor((S,), "float32"), V: T.Tensor((S,), "float32"), keys: T.SymmTensor((S,), "float32"),
        values: T.SymmTensor((S,), "float32"), got: T.Signal((2,)), B: T.Tensor((2, S), "float32"),
    ):  # fmt: skip
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                right = (rank + 1) % world
                T.copy(K, keys, dst=right, signal=got[0])
                T.copy(V, values, dst=right, signal=got[1])  # here
                T.wait(got[0])
                if not bug:
                    T.wait(got[1])
                T.copy(keys, B[0, 0:S])
                T.copy(values, B[1, 0:S])  # here
                if bug:
                    T.wait(got[1])

    return main


@case("race", "parts", "T.copy")
def wrong_count(n, bug):
    """n vectors arrive, and the reader goes on behind the first."""

    @T.prim_func
    def main(
        A: T.Tensor((S,), "float32"),
        parts: T.SymmTensor((n, S), "float32"),
        got: T.Signal((1,)),
        B: T.Tensor((n, S), "float32"),
    ):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                for r in T.serial(world):
                    T.copy(A, parts[rank, 0:S], dst=r, signal=got[0])  # here
                T.wait(got[0], 1 if bug else world)
                T.copy(parts, B)  # here

    return main


@case("race", "inbox")
def signal_before_copy(n, bug):
    """The signal is sent before the data that it stands for."""

    @T.prim_func
    def main(
        A: T.Tensor((S,), "float32"),
        inbox: T.SymmTensor((S,), "float32"),
        got: T.Signal((1,)),
        B: T.Tensor((S,), "float32"),
    ):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                peer = (rank + 1) % world
                if bug:
                    T.signal(got[0], dst=peer)
                T.copy(A, inbox, dst=peer)  # here
                if not bug:
                    T.signal(got[0], dst=peer)
                T.wait(got[0])
                T.copy(inbox, B)  # here

    return main


@case("race", "part", "assignment")
def signal_before_the_last_store(n, bug):
    """The neighbour pulls a vector when told that it is ready; its last element is stored behind the
    signal."""

    @T.prim_func
    def main(
        A: T.Tensor((S,), "float32"),
        part: T.SymmTensor((S,), "float32"),
        ready: T.Signal((1,)),
        B: T.Tensor((S,), "float32"),
    ):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                T.copy(A[0 : S - 1], part[0 : S - 1])
                if not bug:
                    part[S - 1] = A[S - 1] * 2
                T.signal(ready[0], dst=(rank + 1) % world)
                if bug:
                    part[S - 1] = A[S - 1] * 2  # here
                T.wait(ready[0])
                T.copy(part, B, src=(rank + world - 1) % world)  # here

    return main


@case("deadlock", "wait for one another", "got")
def everyone_waits_first(n, bug):
    """Every rank waits for its neighbour before it signals the next."""

    @T.prim_func
    def main(
        A: T.Tensor((S,), "float32"),
        inbox: T.SymmTensor((S,), "float32"),
        got: T.Signal((1,)),
        B: T.Tensor((S,), "float32"),
    ):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                peer = (rank + 1) % world
                if bug:
                    T.wait(got[0])  # here
                T.copy(A, inbox, dst=peer)
                T.signal(got[0], dst=peer)
                if not bug:
                    T.wait(got[0])
                T.copy(inbox, B)

    return main


@case("deadlock", "no statement that is still to run", "got[0] ≥ 4")
def waits_for_too_many(n, bug):
    """The wait counts one signal more than there are."""

    @T.prim_func
    def main(
        A: T.Tensor((S,), "float32"),
        parts: T.SymmTensor((n, S), "float32"),
        got: T.Signal((1,)),
        B: T.Tensor((n, S), "float32"),
    ):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                for r in T.serial(world):
                    T.copy(A, parts[rank, 0:S], dst=r, signal=got[0])
                T.wait(got[0], world + 1 if bug else world)  # here
                T.copy(parts, B)

    return main


@case("unawaited", "done")
def signal_nobody_awaits(n, bug):
    """A counter is signalled, and its wait was forgotten."""

    @T.prim_func
    def main(
        A: T.Tensor((S,), "float32"),
        inbox: T.SymmTensor((S,), "float32"),
        done: T.Signal((1,)),
        B: T.Tensor((S,), "float32"),
    ):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                T.copy(A, inbox, dst=(rank + 1) % world)
                T.signal(done[0], dst=(rank + 1) % world)  # here
                if bug:
                    T.barrier()
                else:
                    T.wait(done[0])
                T.copy(inbox, B)

    return main


@case("race", "flag", args=lambda n: {"flag": np.zeros(1, np.int32), "one": np.ones(1, np.int32)})
def relaxed_flag(n, bug):
    """The arrival of the data is polled in ordinary memory, which orders nothing: the flag may be seen before
    the data."""

    @T.prim_func
    def main(
        A: T.Tensor((S,), "float32"), inbox: T.SymmTensor((S,), "float32"), one: T.Tensor((1,), "int32"),
        flag: T.SymmTensor((1,), "int32"), got: T.Signal((1,)), B: T.Tensor((S,), "float32"),
    ):  # fmt: skip
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                peer = (rank + 1) % world
                T.copy(A, inbox, dst=peer)  # here
                if bug:
                    T.copy(one, flag, dst=peer)  # here
                    seen = T.alloc_var("int32")
                    seen = 0
                    while seen == 0:
                        seen = flag[0]  # here
                else:
                    T.signal(got[0], dst=peer)
                    T.wait(got[0])
                T.copy(inbox, B)  # here

    return main


@case("race", "parts")
def waits_on_the_wrong_index(n, bug):
    """A counter a source; the reader waits on the one with its own number, for all of them."""

    @T.prim_func
    def main(
        A: T.Tensor((S,), "float32"),
        parts: T.SymmTensor((n, S), "float32"),
        got: T.Signal((n,)),
        B: T.Tensor((n, S), "float32"),
    ):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                for r in T.serial(world):
                    T.copy(A, parts[rank, 0:S], dst=r, signal=got[rank])  # here
                for source in T.serial(world):
                    T.wait(got[rank if bug else source])
                    T.copy(parts[source, 0:S], B[source, 0:S])  # here

    return main


@case("deadlock", "got[0] = 1")
def equal_to_a_count_that_overshoots(n, bug):
    """The wait is for exactly one, and the counter may be past it before anyone looks."""

    @T.prim_func
    def main(
        A: T.Tensor((S,), "float32"),
        parts: T.SymmTensor((n, S), "float32"),
        got: T.Signal((1,)),
        B: T.Tensor((n, S), "float32"),
    ):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                T.copy(A, parts[rank, 0:S], dst=0, signal=got[0])
                if rank == 0:
                    if bug:
                        T.wait(got[0], 1, cmp="eq")  # here
                    T.wait(got[0], world)
                    T.copy(parts, B)

    return main


@case("race", "inbox")
def one_block_signals_for_all(n, bug):
    """Four blocks put a tile each, and the first of them signals for all."""

    @T.prim_func
    def main(
        A: T.Tensor((4, S), "float32"),
        inbox: T.SymmTensor((4, S), "float32"),
        got: T.Signal((1,)),
        B: T.Tensor((4, S), "float32"),
    ):
        with T.Kernel(4) as b:
            with T.Scale("device") as rank, world:
                peer = (rank + 1) % world
                T.copy(A[b, 0:S], inbox[b, 0:S], dst=peer)  # here
                if bug:
                    if b == 0:
                        T.signal(got[0], 4, dst=peer)
                else:
                    T.signal(got[0], dst=peer)
                T.wait(got[0], 4)
                T.copy(inbox[b, 0:S], B[b, 0:S])  # here

    return main


@case("race", "inbox")
def counts_ranks_and_not_blocks(n, bug):
    """Every block of every rank signals; the reader counts ranks."""

    @T.prim_func
    def main(
        A: T.Tensor((2, S), "float32"),
        inbox: T.SymmTensor((n, 2, S), "float32"),
        got: T.Signal((1,)),
        B: T.Tensor((n, 2, S), "float32"),
    ):
        with T.Kernel(2) as b:
            with T.Scale("device") as rank, world:
                for r in T.serial(world):
                    T.copy(A[b, 0:S], inbox[rank, b, 0:S], dst=r, signal=got[0])  # here
                T.wait(got[0], world if bug else 2 * world)
                for r in T.serial(world):
                    T.copy(inbox[r, 1 - b, 0:S], B[r, 1 - b, 0:S])  # here

    return main


@case("race", "inbox")
def signals_itself(n, bug):
    """dst= was forgotten: each rank signals itself and goes on at once."""

    @T.prim_func
    def main(
        A: T.Tensor((S,), "float32"),
        inbox: T.SymmTensor((S,), "float32"),
        got: T.Signal((1,)),
        B: T.Tensor((S,), "float32"),
    ):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                peer = (rank + 1) % world
                T.copy(A, inbox, dst=peer)  # here
                if bug:
                    T.signal(got[0])
                else:
                    T.signal(got[0], dst=peer)
                T.wait(got[0])
                T.copy(inbox, B)  # here

    return main


@case("race", "inbox")
def signals_the_other_neighbour(n, bug):
    """The data goes to the right neighbour, its signal to the left one."""

    @T.prim_func
    def main(
        A: T.Tensor((S,), "float32"),
        inbox: T.SymmTensor((S,), "float32"),
        got: T.Signal((1,)),
        B: T.Tensor((S,), "float32"),
    ):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                T.copy(A, inbox, dst=(rank + 1) % world)  # here
                T.signal(got[0], dst=(rank + world - 1 if bug else rank + 1) % world)
                T.wait(got[0])
                T.copy(inbox, B)  # here

    return main


@case("race", "got[0]", "T.signal", "stores 1")
def a_store_among_additions(n, bug):
    """One sender stores into a counter that another adds to: an addition that came before is lost."""

    @T.prim_func
    def main(
        A: T.Tensor((S,), "float32"),
        parts: T.SymmTensor((n, S), "float32"),
        got: T.Signal((1,)),
        B: T.Tensor((n, S), "float32"),
    ):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                T.copy(A, parts[rank, 0:S], dst=0)
                if bug:
                    if rank == 1:
                        T.signal(got[0], 1, op="set", dst=0)  # here
                    else:
                        T.signal(got[0], 1, dst=0)  # here
                else:
                    T.signal(got[0], 1, dst=0)
                if rank == 0:
                    if not bug:
                        T.wait(got[0], world)
                        T.copy(parts, B)
                    else:
                        T.wait(got[0], 1)

    return main


@case("deadlock", "step[0] = 1")
def equal_to_a_step_that_is_passed(n, bug):
    """The sender stores the number of its step; whoever waits for exactly one of them may miss it."""

    @T.prim_func
    def main(
        A: T.Tensor((3, S), "float32"),
        inbox: T.SymmTensor((3, S), "float32"),
        step: T.Signal((1,)),
        B: T.Tensor((3, S), "float32"),
    ):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                for k in T.serial(3):
                    T.copy(A[k, 0:S], inbox[k, 0:S], dst=(rank + 1) % world)
                    T.signal(step[0], k + 1, op="set", dst=(rank + 1) % world)
                for k in T.serial(3):
                    T.wait(step[0], k + 1, cmp="eq" if bug else "ge")  # here
                    T.copy(inbox[k, 0:S], B[k, 0:S])

    return main


@case("race", "inbox")
def the_same_count_every_round(n, bug):
    """A loop waits for one signal in each round, and the first round's is still there in the second."""

    @T.prim_func
    def main(
        A: T.Tensor((3, S), "float32"),
        inbox: T.SymmTensor((3, S), "float32"),
        got: T.Signal((1,)),
        B: T.Tensor((3, S), "float32"),
    ):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                for k in T.serial(3):
                    T.copy(A[k, 0:S], inbox[k, 0:S], dst=(rank + 1) % world, signal=got[0])  # here
                    T.wait(got[0], 1 if bug else k + 1)
                    T.copy(inbox[k, 0:S], B[k, 0:S])  # here

    return main


@case("race", "inbox", args=lambda n: {"launch": 2, "got": np.full(1, 1, np.int64)})
def a_kept_counter_of_the_last_launch(n, bug):
    """A counter that lives on holds what the launches before have counted; the wait does not ask for more."""

    @T.prim_func
    def main(
        A: T.Tensor((S,), "float32"),
        launch: T.int32,
        inbox: T.SymmTensor((S,), "float32"),
        got: T.Signal((1,), keep=True),
        B: T.Tensor((S,), "float32"),
    ):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                T.copy(A, inbox, dst=(rank + 1) % world, signal=got[0])  # here
                T.wait(got[0], 1 if bug else launch)
                T.copy(inbox, B)  # here

    return main


@case("race", "part", "signals ready[0] behind it")
def pulls_before_it_is_told(n, bug):
    """A neighbour's vector is pulled before the neighbour says that it is written."""

    @T.prim_func
    def main(
        A: T.Tensor((S,), "float32"),
        part: T.SymmTensor((S,), "float32"),
        ready: T.Signal((1,)),
        B: T.Tensor((S,), "float32"),
    ):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                T.copy(A, part)  # here
                T.signal(ready[0], dst=(rank + 1) % world)
                if not bug:
                    T.wait(ready[0])
                T.copy(part, B, src=(rank + world - 1) % world)  # here
                if bug:
                    T.wait(ready[0])

    return main


@case("race", "first[0]")
def one_counter_for_two_phases(n, bug):
    """Two-shot all-reduce with one counter: a fast rank's second phase is counted as a slow one's first."""

    @T.prim_func
    def main(
        A: T.Tensor((n, S), "float32"),
        parts: T.SymmTensor((n, S), "float32"),
        sums: T.SymmTensor((n, S), "float32"),
        first: T.Signal((1,)),
        second: T.Signal((1,)),
        B: T.Tensor((n, S), "float32"),
    ):
        with T.Kernel(1):
            acc, tile = T.alloc_fragment((S,), "float32"), T.alloc_fragment((S,), "float32")
            with T.Scale("device") as rank, world:
                for r in T.serial(world):
                    T.copy(A[r, 0:S], parts[rank, 0:S], dst=r, signal=first[0])  # here
                T.wait(first[0], world)
                T.clear(acc)
                for r in T.serial(world):
                    T.copy(parts[r, 0:S], tile)  # here
                    for i in T.Parallel(S):
                        acc[i] += tile[i]
                for r in T.serial(world):
                    if bug:
                        T.copy(acc, sums[rank, 0:S], dst=r, signal=first[0])  # here
                    else:
                        T.copy(acc, sums[rank, 0:S], dst=r, signal=second[0])
                if bug:
                    T.wait(first[0], world + 1)
                else:
                    T.wait(second[0], world)
                T.copy(sums, B)  # here

    return main


@case("no-such-rank", "there is no rank 3")
def off_by_one_peer(n, bug):
    """The last rank puts to a rank that is not there."""

    @T.prim_func
    def main(
        A: T.Tensor((S,), "float32"),
        inbox: T.SymmTensor((S,), "float32"),
        got: T.Signal((1,)),
        B: T.Tensor((S,), "float32"),
    ):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                T.copy(A, inbox, dst=rank + 1 if bug else (rank + 1) % world, signal=got[0])  # here
                if not bug or rank > 0:
                    T.wait(got[0])
                    T.copy(inbox, B)

    return main


@case("out-of-bounds", "got[3]")
def a_counter_that_is_not_there(n, bug):
    """Counters by source, numbered from one: the last rank signals behind the set."""

    @T.prim_func
    def main(
        A: T.Tensor((S,), "float32"),
        parts: T.SymmTensor((n, S), "float32"),
        got: T.Signal((n,)),
        B: T.Tensor((n, S), "float32"),
    ):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                for r in T.serial(world):
                    T.copy(A, parts[rank, 0:S], dst=r, signal=got[rank + 1 if bug else rank])  # here
                for source in T.serial(1 if bug else 0, world):
                    T.wait(got[source])
                if not bug:
                    T.copy(parts, B)

    return main
