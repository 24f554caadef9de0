"""Faulty kernels and their repaired twins. Each is one function: ``bug`` chooses between the fault and its repair.

``CASES`` says for each what the simulator must call the fault, and at which operation and buffer it must be found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import tilescale.language as T

S = 32


@dataclass(frozen=True)
class Case:
    """``build(n, bug)`` gives the kernel for n ranks. kind: the finding; says: words of its text."""

    build: Callable[[int, bool], Any]
    kind: str
    says: tuple[str, ...]
    ranks: int = 3
    args: Callable[[int], dict[str, Any]] = field(default=lambda n: {})

    @property
    def name(self) -> str:
        return self.build.__name__


CASES: list[Case] = []


def case(kind: str, *says: str, ranks: int = 3, args: Callable[[int], dict[str, Any]] = lambda n: {}) -> Any:
    def add(build: Callable[[int, bool], Any]) -> Callable[[int, bool], Any]:
        CASES.append(Case(build, kind, says, ranks, args))
        return build

    return add


@case("race", "inbox", "T.copy")
def missing_wait(n, bug):
    """The neighbour's vector is read without waiting for it."""

    @T.prim_func
    def main(A: T.Tensor((S,), "float32"), inbox: T.SymmTensor((S,), "float32"), got: T.Signal((1,)), B: T.Tensor((S,), "float32")):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                T.copy(A, inbox, dst=(rank + 1) % world, signal=got[0])
                if not bug:
                    T.wait(got[0])
                T.copy(inbox, B)
                if bug:
                    T.wait(got[0])

    return main


@case("race", "parts", "T.copy")
def wrong_count(n, bug):
    """n vectors arrive, and the reader goes on behind the first."""

    @T.prim_func
    def main(A: T.Tensor((S,), "float32"), parts: T.SymmTensor((n, S), "float32"), got: T.Signal((1,)), B: T.Tensor((n, S), "float32")):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                for r in T.serial(world):
                    T.copy(A, parts[rank, 0:S], dst=r, signal=got[0])
                T.wait(got[0], 1 if bug else world)
                T.copy(parts, B)

    return main


@case("race", "inbox")
def signal_before_copy(n, bug):
    """The signal is sent before the data that it stands for."""

    @T.prim_func
    def main(A: T.Tensor((S,), "float32"), inbox: T.SymmTensor((S,), "float32"), got: T.Signal((1,)), B: T.Tensor((S,), "float32")):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                peer = (rank + 1) % world
                if bug:
                    T.signal(got[0], dst=peer)
                T.copy(A, inbox, dst=peer)
                if not bug:
                    T.signal(got[0], dst=peer)
                T.wait(got[0])
                T.copy(inbox, B)

    return main


@case("race", "inbox")
def two_writers(n, bug):
    """All ranks put into the same region of rank 0."""

    @T.prim_func
    def main(A: T.Tensor((S,), "float32"), inbox: T.SymmTensor((n, S), "float32"), got: T.Signal((1,)), B: T.Tensor((n, S), "float32")):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                T.copy(A, inbox[0 if bug else rank, 0:S], dst=0, signal=got[0])
                if rank == 0:
                    T.wait(got[0], world)
                    for r in T.serial(1 if bug else world):
                        T.copy(inbox[r, 0:S], B[r, 0:S])

    return main


@case("race", "part")
def missing_phase_barrier(n, bug):
    """A sum of all ranks' vectors whose parts are read before their owners have written them."""

    @T.prim_func
    def main(A: T.Tensor((S,), "float32"), part: T.SymmTensor((S,), "float32"), B: T.Tensor((S,), "float32")):
        with T.Kernel(1):
            total, piece = T.alloc_fragment((S,), "float32"), T.alloc_fragment((S,), "float32")
            with T.Scale("device") as rank, world:
                T.copy(A, part)
                if not bug:
                    T.barrier()
                T.clear(total)
                for r in T.serial(world):
                    T.copy(part, piece, src=r)
                    for i in T.Parallel(S):
                        total[i] += piece[i]
                T.copy(total, B)

    return main


@case("race", "part")
def overwritten_before_read(n, bug):
    """The second round overwrites parts that others may still read: the barrier behind the reads is missing."""

    @T.prim_func
    def main(A: T.Tensor((2, S), "float32"), part: T.SymmTensor((S,), "float32"), B: T.Tensor((2, S), "float32")):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                for step in T.serial(2):
                    T.copy(A[step, 0:S], part)
                    T.barrier()
                    T.copy(part, B[step, 0:S], src=(rank + 1) % world)
                    if not bug:
                        T.barrier()

    return main


@case("no-such-rank", "there is no rank 3")
def off_by_one_peer(n, bug):
    """The last rank puts to a rank that is not there."""

    @T.prim_func
    def main(A: T.Tensor((S,), "float32"), inbox: T.SymmTensor((S,), "float32"), got: T.Signal((1,)), B: T.Tensor((S,), "float32")):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                T.copy(A, inbox, dst=rank + 1 if bug else (rank + 1) % world, signal=got[0])
                if not bug or rank > 0:
                    T.wait(got[0])
                    T.copy(inbox, B)

    return main


@case("deadlock", "wait for one another", "got")
def everyone_waits_first(n, bug):
    """Every rank waits for its neighbour before it signals the next."""

    @T.prim_func
    def main(A: T.Tensor((S,), "float32"), inbox: T.SymmTensor((S,), "float32"), got: T.Signal((1,)), B: T.Tensor((S,), "float32")):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                peer = (rank + 1) % world
                if bug:
                    T.wait(got[0])
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
    def main(A: T.Tensor((S,), "float32"), parts: T.SymmTensor((n, S), "float32"), got: T.Signal((1,)), B: T.Tensor((n, S), "float32")):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                for r in T.serial(world):
                    T.copy(A, parts[rank, 0:S], dst=r, signal=got[0])
                T.wait(got[0], world + 1 if bug else world)
                T.copy(parts, B)

    return main


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
                        T.barrier()
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
            T.copy(A[b, 0:S], X[b, 0:S])
            with T.Scale("grid"):
                if not bug:
                    T.barrier()
            T.copy(X[(b + 1) % 4, 0:S], B[b, 0:S])

    return main


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
                        T.copy(A[k, 0:S], tile)
                        T.signal(full[0])
                else:
                    for k in T.serial(4):
                        T.wait(full[0], k + 1)
                        T.copy(tile, B[k, 0:S])
                        T.signal(free[0])
                    if bug:
                        T.wait(free[0], 4)

    return main


@case("uninitialised", "acc", ranks=1)
def accumulator_not_cleared(n, bug):
    """The product is added to an accumulator that nothing wrote."""

    @T.prim_func
    def main(A: T.Tensor((32, 32), "float32"), B: T.Tensor((32, 32), "float32"), C: T.Tensor((32, 32), "float32")):
        with T.Kernel(1):
            a, b = T.alloc_shared((32, 32), "float32"), T.alloc_shared((32, 32), "float32")
            acc = T.alloc_fragment((32, 32), "float32")
            if not bug:
                T.clear(acc)
            T.copy(A, a)
            T.copy(B, b)
            T.gemm(a, b, acc)
            T.copy(acc, C)

    return main


@case("uninitialised", "inbox[16:32]")
def half_a_vector_sent(n, bug):
    """Half of the vector is put, all of it is read."""
    part = S // 2 if bug else S

    @T.prim_func
    def main(A: T.Tensor((S,), "float32"), inbox: T.SymmTensor((S,), "float32"), got: T.Signal((1,)), B: T.Tensor((S,), "float32")):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                T.copy(A[0:part], inbox[0:part], dst=(rank + 1) % world, signal=got[0])
                T.wait(got[0])
                T.copy(inbox, B)

    return main


@case("out-of-bounds", "tile", ranks=1, args=lambda n: {"k": 3})
def index_outside_a_tile(n, bug):
    """The last iterations write behind the tile."""

    @T.prim_func
    def main(A: T.Tensor((S,), "float32"), k: T.int32, B: T.Tensor((S,), "float32")):
        with T.Kernel(1):
            tile = T.alloc_shared((S,), "float32")
            T.clear(tile)
            for i in T.Parallel(S):
                if bug:
                    tile[i + k] = A[i]
                else:
                    tile[(i + k) % S] = A[i]
            T.copy(tile, B)

    return main



@case("collision", "total", ranks=1)
def iterations_share_an_element(n, bug):
    """A sum in T.Parallel, whose iterations all add to one element."""

    @T.prim_func
    def main(A: T.Tensor((S,), "float32"), B: T.Tensor((1,), "float32")):
        with T.Kernel(1):
            x, total = T.alloc_fragment((S,), "float32"), T.alloc_fragment((1,), "float32")
            T.copy(A, x)
            T.clear(total)
            if bug:
                for i in T.Parallel(S):
                    total[0] = total[0] + x[i]
            else:
                T.reduce_sum(x, total, dim=0)
            T.copy(total, B)

    return main


@case("mismatch", "the collective")
def collectives_in_another_order(n, bug):
    """Rank 0 gathers and then reduces, the others reduce and then gather."""

    @T.prim_func
    def main(A: T.Tensor((S,), "float32"), G: T.SymmTensor((n, S), "float32"), R: T.SymmTensor((S,), "float32")):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                T.copy(A, R)
                if bug and rank == 0:
                    T.all_gather(A, G)
                    T.all_reduce(R)
                else:
                    T.all_reduce(R)
                    T.all_gather(A, G)

    return main


@case("unawaited", "done")
def signal_nobody_awaits(n, bug):
    """A counter is signalled, and its wait was forgotten."""

    @T.prim_func
    def main(A: T.Tensor((S,), "float32"), inbox: T.SymmTensor((S,), "float32"), done: T.Signal((1,)), B: T.Tensor((S,), "float32")):
        with T.Kernel(1):
            with T.Scale("device") as rank, world:
                T.copy(A, inbox, dst=(rank + 1) % world)
                T.signal(done[0], dst=(rank + 1) % world)
                if bug:
                    T.barrier()
                else:
                    T.wait(done[0])
                T.copy(inbox, B)

    return main


@case("not-resident", "resident at once", ranks=1)
def grid_too_large_to_wait(n, bug):
    """Blocks meet in a grid of which not all are resident, so that some never start."""
    extent = 300 if bug else 20

    @T.prim_func
    def main(X: T.Tensor((extent,), "float32"), B: T.Tensor((extent,), "float32"), C: T.Tensor((extent,), "float32")):
        with T.Kernel(extent, threads=1024) as b:
            B[b] = X[b]
            with T.Scale("grid"):
                T.barrier()
            C[b] = B[(b + 1) % extent]

    return main


@case("arithmetic", "divided by zero", ranks=1, args=lambda n: {"k": 0})
def division_by_zero(n, bug):
    """Rows are dealt by a count that is zero."""

    @T.prim_func
    def main(k: T.int32, B: T.Tensor((S,), "int32")):
        with T.Kernel(1):
            for i in T.Parallel(S):
                B[i] = i // (k if bug else k + 1)

    return main
