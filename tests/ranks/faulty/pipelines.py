"""Pipelined loops over what other ranks send: copies that run ahead of the wait that guards them, stages and
slots given back too early."""

from __future__ import annotations

import tilescale.language as T
from tests.ranks.faulty.case import case

S = 16


@case("race", "X", "signals here[")
def a_pipelined_gather_awaited_late(n, bug):
    """Rows of all ranks are multiplied as they come; each is awaited when it has been copied."""

    @T.prim_func
    def main(
        A: T.Tensor((S, S), "float32"),
        X: T.SymmTensor((n, S, S), "float32"),
        W: T.Tensor((S, S), "float32"),
        here: T.Signal((n,)),
        C: T.Tensor((S, S), "float32"),
    ):
        with T.Kernel(1):
            x, w = T.alloc_shared((S, S), "float32"), T.alloc_shared((S, S), "float32")
            acc = T.alloc_fragment((S, S), "float32")
            T.copy(W, w)
            T.clear(acc)
            with T.Scale("device") as rank, world:
                for r in T.serial(world):
                    T.copy(A, X[rank, 0:S, 0:S], dst=r, signal=here[rank])  # here
                for r in T.Pipelined(n, num_stages=2):
                    if not bug:
                        T.wait(here[r])
                    T.copy(X[r, 0:S, 0:S], x)  # here
                    T.gemm(x, w, acc)
                if bug:
                    for r in T.serial(world):
                        T.wait(here[r])
            T.copy(acc, C)

    return main


@case("race", "X", "signals here[0] behind it")
def a_pipelined_wait_one_step_behind(n, bug):
    """Step k of a pipelined loop waits for k pieces and reads the one after."""

    @T.prim_func
    def main(
        A: T.Tensor((4, S, S), "float32"),
        X: T.SymmTensor((4, S, S), "float32"),
        here: T.Signal((1,)),
        C: T.Tensor((S, S), "float32"),
    ):
        with T.Kernel(1):
            x, acc = T.alloc_shared((S, S), "float32"), T.alloc_fragment((S, S), "float32")
            T.clear(acc)
            with T.Scale("device") as rank, world:
                for k in T.serial(4):
                    T.copy(A[k, 0:S, 0:S], X[k, 0:S, 0:S], dst=(rank + 1) % world, signal=here[0])  # here
                for k in T.Pipelined(4, num_stages=2):
                    T.wait(here[0], k if bug else k + 1)
                    T.copy(X[k, 0:S, 0:S], x)  # here
                    for i, j in T.Parallel(S, S):
                        acc[i, j] += x[i, j]
            T.copy(acc, C)

    return main


@case("race", "part", 'T.Scale("device")')
def pipelined_pulls_without_a_barrier(n, bug):
    """Every rank's part is pulled tile by tile in a pipelined loop, with no meeting behind its making."""

    @T.prim_func
    def main(
        A: T.Tensor((S, S), "float32"), part: T.SymmTensor((S, S), "float32"), C: T.Tensor((S, S), "float32")
    ):
        with T.Kernel(1):
            x, acc = T.alloc_shared((S, S), "float32"), T.alloc_fragment((S, S), "float32")
            T.clear(acc)
            with T.Scale("device") as rank, world:
                T.copy(A, part)  # here
                if not bug:
                    T.barrier()
                for r in T.Pipelined(n, num_stages=2):
                    T.copy(part, x, src=r)  # here
                    for i, j in T.Parallel(S, S):
                        acc[i, j] += x[i, j]
            T.copy(acc, C)

    return main


@case("race", "slots")
def pipelined_slots_given_back_too_early(n, bug):
    """What arrives in two slots is added in a pipelined loop that gives the slot back in front of its
    copy."""

    @T.prim_func
    def main(
        A: T.Tensor((4, S, S), "float32"),
        slots: T.SymmTensor((2, S, S), "float32"),
        full: T.Signal((1,)),
        free: T.Signal((1,)),
        C: T.Tensor((S, S), "float32"),
    ):
        with T.Kernel(2) as b:
            x, acc = T.alloc_shared((S, S), "float32"), T.alloc_fragment((S, S), "float32")
            with T.Scale("device") as rank, world:
                if b == 0:
                    for k in T.serial(4):
                        T.wait(free[0], k - 1)
                        T.copy(  # here
                            A[k, 0:S, 0:S], slots[k % 2, 0:S, 0:S], dst=(rank + 1) % world, signal=full[0]
                        )
                else:
                    T.clear(acc)
                    for k in T.Pipelined(4, num_stages=2):
                        T.wait(full[0], k + 1)
                        if bug:
                            T.signal(free[0], dst=(rank + world - 1) % world)
                        T.copy(slots[k % 2, 0:S, 0:S], x)  # here
                        if not bug:
                            T.signal(free[0], dst=(rank + world - 1) % world)
                        for i, j in T.Parallel(S, S):
                            acc[i, j] += x[i, j]
                    T.copy(acc, C)

    return main
