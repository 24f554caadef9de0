"""Memory that ranks share: reused before its reader is done, written by two, cut at the wrong place."""

from __future__ import annotations

import numpy as np

import tilescale.language as T
from tests.ranks.faulty.case import case

S = 32


@case("race", "inbox")
def two_writers(n, bug):
    """All ranks put into the same region of rank 0."""

    @T.prim_func
    def main(
        A: T.Tensor((S,), "float32"),
        inbox: T.SymmTensor((n, S), "float32"),
        got: T.Signal((1,)),
        B: T.Tensor((n, S), "float32"),
    ):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                T.copy(A, inbox[0 if bug else rank, 0:S], dst=0, signal=got[0])  # here
                if rank == 0:
                    T.wait(got[0], world)
                    for r in T.serial(1 if bug else world):
                        T.copy(inbox[r, 0:S], B[r, 0:S])

    return main


@case("race", "part")
def overwritten_before_read(n, bug):
    """The second round overwrites parts that others may still read: the barrier behind the reads is
    missing."""

    @T.prim_func
    def main(
        A: T.Tensor((2, S), "float32"), part: T.SymmTensor((S,), "float32"), B: T.Tensor((2, S), "float32")
    ):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                for step in T.serial(2):
                    T.copy(A[step, 0:S], part)  # here
                    T.barrier()
                    T.copy(part, B[step, 0:S], src=(rank + 1) % world)  # here
                    if not bug:
                        T.barrier()

    return main


@case("race", "slot")
def slot_reused_without_credit(n, bug):
    """A ring all-reduce with one slot: the next partial sum is put before the neighbour has added the last
    one."""

    @T.prim_func
    def main(
        A: T.Tensor((S,), "float32"),
        slot: T.SymmTensor((S,), "float32"),
        full: T.Signal((1,)),
        free: T.Signal((1,)),
        B: T.Tensor((S,), "float32"),
    ):
        with T.Kernel(1):
            mine, acc, piece = (T.alloc_fragment((S,), "float32") for _ in range(3))
            T.copy(A, mine)
            T.copy(A, acc)
            with T.Scale("device") as rank, world:
                for step in T.serial(world - 1):
                    if not bug:
                        T.wait(free[0], step)
                    T.copy(mine, slot, dst=(rank + 1) % world, signal=full[0])  # here
                    T.wait(full[0], step + 1)
                    T.copy(slot, piece)  # here
                    T.signal(free[0], dst=(rank + world - 1) % world)
                    T.copy(piece, mine)
                    for i in T.Parallel(S):
                        acc[i] += piece[i]
                if bug:
                    T.wait(free[0], world - 1)
            T.copy(acc, B)

    return main


@case("race", "slots")
def double_buffer_without_back_pressure(n, bug):
    """Two slots a neighbour and four rounds: the third put does not ask whether the first was read."""

    @T.prim_func
    def main(
        A: T.Tensor((4, S), "float32"),
        slots: T.SymmTensor((2, S), "float32"),
        full: T.Signal((1,)),
        free: T.Signal((1,)),
        B: T.Tensor((4, S), "float32"),
    ):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                for k in T.serial(4):
                    if not bug:
                        T.wait(free[0], k - 1)
                    T.copy(A[k, 0:S], slots[k % 2, 0:S], dst=(rank + 1) % world, signal=full[0])  # here
                    T.wait(full[0], k + 1)
                    T.copy(slots[k % 2, 0:S], B[k, 0:S])  # here
                    T.signal(free[0], dst=(rank + world - 1) % world)
                if bug:
                    T.wait(free[0], 4)

    return main


@case("race", "slots", ranks=4)
def credit_off_by_one(n, bug):
    """Two slots, and a sender that believes there are three: it asks for one credit fewer than the slot has
    readers."""

    @T.prim_func
    def main(
        A: T.Tensor((5, S), "float32"),
        slots: T.SymmTensor((2, S), "float32"),
        full: T.Signal((1,)),
        free: T.Signal((1,)),
        B: T.Tensor((5, S), "float32"),
    ):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                for k in T.serial(5):
                    T.wait(free[0], k - (2 if bug else 1))
                    T.copy(A[k, 0:S], slots[k % 2, 0:S], dst=(rank + 1) % world, signal=full[0])  # here
                    T.wait(full[0], k + 1)
                    T.copy(slots[k % 2, 0:S], B[k, 0:S])  # here
                    T.signal(free[0], dst=(rank + world - 1) % world)

    return main


@case("race", "inbox")
def credit_given_before_the_read(n, bug):
    """The reader gives the slot back, then reads it."""

    @T.prim_func
    def main(
        A: T.Tensor((3, S), "float32"),
        inbox: T.SymmTensor((S,), "float32"),
        full: T.Signal((1,)),
        free: T.Signal((1,)),
        B: T.Tensor((3, S), "float32"),
    ):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                for k in T.serial(3):
                    T.wait(free[0], k)
                    T.copy(A[k, 0:S], inbox, dst=(rank + 1) % world, signal=full[0])  # here
                    T.wait(full[0], k + 1)
                    if bug:
                        T.signal(free[0], dst=(rank + world - 1) % world)
                    T.copy(inbox, B[k, 0:S])  # here
                    if not bug:
                        T.signal(free[0], dst=(rank + world - 1) % world)

    return main


@case("race", "inbox")
def inbox_read_again_after_the_credit(n, bug):
    """The vector is used twice, and given back between the two uses."""

    @T.prim_func
    def main(
        A: T.Tensor((2, S), "float32"),
        inbox: T.SymmTensor((S,), "float32"),
        full: T.Signal((1,)),
        free: T.Signal((1,)),
        B: T.Tensor((2, S), "float32"),
        C: T.Tensor((2, S), "float32"),
    ):
        with T.Kernel(1):
            x = T.alloc_fragment((S,), "float32")
            with T.Scale("device") as rank, world:
                for k in T.serial(2):
                    T.wait(free[0], k)
                    T.copy(A[k, 0:S], inbox, dst=(rank + 1) % world, signal=full[0])  # here
                    T.wait(full[0], k + 1)
                    T.copy(inbox, x)
                    T.signal(free[0], dst=(rank + world - 1) % world)
                    T.copy(x, B[k, 0:S])
                    T.copy(inbox if bug else x, C[k, 0:S])  # here

    return main


@case("race", "part")
def credit_of_one_reader_for_all(n, bug):
    """Everyone pulls a rank's vector, and the rank goes on to the next when the first of them has."""

    @T.prim_func
    def main(
        A: T.Tensor((2, S), "float32"),
        part: T.SymmTensor((S,), "float32"),
        ready: T.Signal((1,)),
        read: T.Signal((1,)),
        B: T.Tensor((2, n, S), "float32"),
    ):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                for k in T.serial(2):
                    T.wait(read[0], (1 if bug else world) * k)
                    T.copy(A[k, 0:S], part)  # here
                    for r in T.serial(world):
                        T.signal(ready[0], dst=r)
                    T.wait(ready[0], (k + 1) * world)
                    for r in T.serial(world):
                        T.copy(part, B[k, r, 0:S], src=r)  # here
                        T.signal(read[0], dst=r)

    return main


@case("race", "G")
def gathered_again_without_a_last_wait(n, bug):
    """A gather in two rounds: the second is put while others still read what the first brought."""

    @T.prim_func
    def main(
        A: T.Tensor((2, S), "float32"),
        G: T.SymmTensor((n, S), "float32"),
        got: T.Signal((1,)),
        B: T.Tensor((2, n, S), "float32"),
    ):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                for k in T.serial(2):
                    for r in T.serial(world):
                        T.copy(A[k, 0:S], G[rank, 0:S], dst=r, signal=got[0])  # here
                    T.wait(got[0], (k + 1) * world)
                    T.copy(G, B[k, 0:n, 0:S])  # here
                    if not bug:
                        T.barrier()

    return main


@case("race", "halo")
def two_ranks_own_the_border(n, bug):
    """A field cut among ranks: each sends its rows to rank 0, the border's row twice, once from either
    side."""
    rows = 4

    @T.prim_func
    def main(
        A: T.Tensor((rows + 1, S), "float32"),
        halo: T.SymmTensor((rows * n + 1, S), "float32"),
        got: T.Signal((1,)),
        B: T.Tensor((rows * n, S), "float32"),
    ):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                for i in T.serial(rows + 1 if bug else rows):
                    T.copy(A[i, 0:S], halo[rank * rows + i, 0:S], dst=0)  # here
                T.signal(got[0], dst=0)
                if rank == 0:
                    T.wait(got[0], world)
                    T.copy(halo[0 : rows * n, 0:S], B)

    return main


@case("race", "inbox", args=lambda n: {"counts": np.arange(1, n + 1, dtype=np.int32)})
def offsets_of_an_all_to_all_overlap(n, bug):
    """Rank r sends r + 1 rows to everyone; where they begin is summed over one rank too few."""
    total = n * (n + 1) // 2

    @T.prim_func
    def main(
        A: T.Tensor((n, S), "float32"),
        counts: T.Tensor((n,), "int32"),
        inbox: T.SymmTensor((total, S), "float32"),
        got: T.Signal((1,)),
        B: T.Tensor((total, S), "float32"),
    ):
        with T.Kernel(1):
            first = T.alloc_var("int32")
            with T.Scale("device") as rank, world:
                first = 0
                for r in T.serial(rank - 1 if bug else rank):
                    first = first + counts[r]
                for r in T.serial(world):
                    for i in T.serial(counts[rank]):
                        T.copy(A[i, 0:S], inbox[first + i, 0:S], dst=r)  # here
                    T.signal(got[0], dst=r)
                T.wait(got[0], world)
                T.copy(inbox[0 : 1 if bug else total, 0:S], B[0 : 1 if bug else total, 0:S])

    return main


def tokens(n: int) -> dict:
    """Six tokens a rank for two experts, and where each rank's begin in an expert's inbox."""
    expert = [np.array([(t + r) % 2 for t in range(6)], np.int32) for r in range(n)]
    base = [np.array([3 * r, 3 * r], np.int32) for r in range(n)]
    return {"expert": expert, "base": base}


@case("race", "inbox", args=tokens)
def dispatched_tokens_collide(n, bug):
    """Tokens go to their expert's inbox, counted from zero on every rank: two ranks' tokens get one place."""

    @T.prim_func
    def main(
        X: T.Tensor((6, S), "float32"), expert: T.Tensor((6,), "int32"), base: T.Tensor((2,), "int32"),
        inbox: T.SymmTensor((3 * n, S), "float32"), got: T.Signal((1,)), Y: T.Tensor((3 * n, S), "float32"),
    ):  # fmt: skip
        with T.Kernel(1):
            count = T.alloc_local((2,), "int32")
            with T.Scale("device") as rank, world:
                for e in T.serial(2):
                    count[e] = 0 if bug else base[e]
                for t in T.serial(6):
                    T.copy(X[t, 0:S], inbox[count[expert[t]], 0:S], dst=expert[t])  # here
                    count[expert[t]] = count[expert[t]] + 1
                for e in T.serial(2):
                    T.signal(got[0], dst=e)
                if rank < 2:
                    T.wait(got[0], world)
                    T.copy(inbox[0 : 3 if bug else 3 * n, 0:S], Y[0 : 3 if bug else 3 * n, 0:S])

    return main


@case("race", "inbox")
def tiles_wider_than_their_distance(n, bug):
    """Ranks own 16 elements each of rank 0's vector and put tiles of 32."""
    step = 16

    @T.prim_func
    def main(
        A: T.Tensor((S,), "float32"),
        inbox: T.SymmTensor((step * n + S,), "float32"),
        got: T.Signal((1,)),
        B: T.Tensor((step * n,), "float32"),
    ):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                T.copy(  # here
                    A[0 : S if bug else step],
                    inbox[rank * step : rank * step + (S if bug else step)],
                    dst=0,
                    signal=got[0],
                )
                if rank == 0:
                    T.wait(got[0], world)
                    T.copy(inbox[0 : step * n], B)

    return main


@case("race", "inbox")
def a_broadcast_to_itself_races_the_reader(n, bug):
    """A rank puts its own part into its own inbox as well and awaits the others' alone; another block reads
    it."""

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
                    T.copy(A[b, 0:S], inbox[rank, b, 0:S], dst=r)  # here
                    if not bug or r != rank:
                        T.signal(got[0], dst=r)
                T.wait(got[0], 2 * (world - 1) if bug else 2 * world)
                for r in T.serial(world):
                    T.copy(inbox[r, 1 - b, 0:S], B[r, 1 - b, 0:S])  # here

    return main


@case("race", "table")
def everyone_puts_the_same(n, bug):
    """Every rank fills rank 0's table with the same numbers, since one of them must: whose they are shows
    nowhere."""

    @T.prim_func
    def main(table: T.SymmTensor((S,), "float32"), got: T.Signal((1,)), B: T.Tensor((S,), "float32")):
        with T.Kernel(1):
            row = T.alloc_fragment((S,), "float32")
            for i in T.Parallel(S):
                row[i] = i * 2
            with T.Scale("device") as rank, world:
                if bug or rank == world - 1:
                    T.copy(row, table, dst=0, signal=got[0])  # here
                if rank == 0:
                    T.wait(got[0], world if bug else 1)
                    T.copy(table, B)

    return main


@case("race", "weights")
def the_same_weights_sent_again(n, bug):
    """Each round sends the weights anew; the second round's overwrite, with the same numbers, what the first
    round still reads."""

    @T.prim_func
    def main(
        W: T.Tensor((S,), "float32"),
        weights: T.SymmTensor((S,), "float32"),
        got: T.Signal((1,)),
        B: T.Tensor((2, S), "float32"),
    ):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                for k in T.serial(2):
                    T.copy(W, weights, dst=(rank + 1) % world, signal=got[0])  # here
                    T.wait(got[0], k + 1)
                    T.copy(weights, B[k, 0:S])  # here
                    if not bug:
                        T.barrier()

    return main


@case("uninitialised", "inbox[16:32]")
def half_a_vector_sent(n, bug):
    """Half of the vector is put, all of it is read."""
    part = S // 2 if bug else S

    @T.prim_func
    def main(
        A: T.Tensor((S,), "float32"),
        inbox: T.SymmTensor((S,), "float32"),
        got: T.Signal((1,)),
        B: T.Tensor((S,), "float32"),
    ):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                T.copy(A[0:part], inbox[0:part], dst=(rank + 1) % world, signal=got[0])
                T.wait(got[0])
                T.copy(inbox, B)  # here

    return main


@case("uninitialised", "parts[")
def the_own_part_is_left_out(n, bug):
    """Everyone puts to all others and reads all n parts, its own among them, which nobody wrote."""

    @T.prim_func
    def main(
        A: T.Tensor((S,), "float32"),
        parts: T.SymmTensor((n, S), "float32"),
        got: T.Signal((1,)),
        B: T.Tensor((n, S), "float32"),
    ):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                for hop in T.serial(1 if bug else 0, world):
                    T.copy(A, parts[rank, 0:S], dst=(rank + hop) % world, signal=got[0])
                T.wait(got[0], world - 1 if bug else world)
                T.copy(parts, B)  # here

    return main
