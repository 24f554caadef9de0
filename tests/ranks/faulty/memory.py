"""What one block does wrong with its own memory, and what no number of ranks would mend."""

from __future__ import annotations

import numpy as np

import tilescale.language as T
from tests.ranks.faulty.case import case

S = 32


@case("uninitialised", "acc", "T.gemm", ranks=1)
def accumulator_not_cleared(n, bug):
    """The product is added to an accumulator that nothing wrote."""

    @T.prim_func
    def main(
        A: T.Tensor((32, 32), "float32"), B: T.Tensor((32, 32), "float32"), C: T.Tensor((32, 32), "float32")
    ):
        with T.Kernel(1):
            a, b = T.alloc_shared((32, 32), "float32"), T.alloc_shared((32, 32), "float32")
            acc = T.alloc_fragment((32, 32), "float32")
            if not bug:
                T.clear(acc)
            T.copy(A, a)
            T.copy(B, b)
            T.gemm(a, b, acc)  # here
            T.copy(acc, C)

    return main


@case("uninitialised", "top", "T.reduce", ranks=1)
def running_maximum_not_initialised(n, bug):
    """A running maximum over tiles that begins with whatever the registers hold."""

    @T.prim_func
    def main(A: T.Tensor((S, 64), "float32"), B: T.Tensor((S,), "float32")):
        with T.Kernel(1):
            x, top = T.alloc_fragment((S, 32), "float32"), T.alloc_fragment((S,), "float32")
            if not bug:
                T.fill(top, -T.infinity("float32"))
            for k in T.serial(2):
                T.copy(A[0:S, k * 32 : (k + 1) * 32], x)
                T.reduce_max(x, top, dim=1, clear=False)  # here
            T.copy(top, B)

    return main


@case("uninitialised", "tile[20:32]", "T.reduce", ranks=1, args=lambda n: {"rows": 20})
def a_tile_partly_written(n, bug):
    """Only the rows that are there are loaded, and all rows of the tile are summed."""

    @T.prim_func
    def main(A: T.Tensor((S,), "float32"), rows: T.int32, B: T.Tensor((1,), "float32")):
        with T.Kernel(1):
            tile, total = T.alloc_fragment((S,), "float32"), T.alloc_fragment((1,), "float32")
            if not bug:
                T.clear(tile)
            for i in T.Parallel(S):
                if i < rows:
                    tile[i] = A[i]
            T.reduce_sum(tile, total, dim=0)  # here
            T.copy(total, B)

    return main


@case("uninitialised", "C", ranks=1)
def a_result_accumulated_in_place(n, bug):
    """Block results are added to an output that the caller was expected to have cleared."""

    @T.prim_func
    def main(A: T.Tensor((S,), "float32"), C: T.Tensor((S,), "float32")):
        with T.Kernel(1):
            for i in T.Parallel(S):
                if bug:
                    C[i] = C[i] + A[i]  # here
                else:
                    C[i] = A[i]

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
                    tile[i + k] = A[i]  # here
                else:
                    tile[(i + k) % S] = A[i]
            T.copy(tile, B)

    return main


@case("out-of-bounds", "tile[40]", "(40,)", ranks=1, args=lambda n: {"m": 100})
def the_last_tile_is_longer(n, bug):
    """Rows are dealt to three tiles; the last one takes the rest, which is more than a tile holds."""

    @T.prim_func
    def main(A: T.Tensor((128,), "float32"), m: T.int32, B: T.Tensor((3, 40), "float32")):
        with T.Kernel(3) as b:
            tile = T.alloc_shared((40,), "float32")
            T.clear(tile)
            each = m // 3 - 5 if bug else 40
            for i in T.serial(T.if_then_else(b == 2, m - 2 * each, each) if bug else each):
                tile[i] = A[b * each + i]  # here
            T.copy(tile, B[b, 0:40])

    return main


@case("out-of-bounds", "stages", "T.copy", ranks=1)
def one_stage_too_few(n, bug):
    """A hand-made pipeline of three stages in a buffer of two."""

    @T.prim_func
    def main(A: T.Tensor((6, S), "float32"), B: T.Tensor((6, S), "float32")):
        with T.Kernel(1):
            stages = T.alloc_shared((2 if bug else 3, S), "float32")
            for k in T.serial(6):
                T.copy(A[k, 0:S], stages[k % 3, 0:S])  # here
                T.copy(stages[k % 3, 0:S], B[k, 0:S])  # here

    return main


@case("collision", "total", ranks=1)
def iterations_share_an_element(n, bug):
    """A sum in T.Parallel, whose iterations all add to one element of shared memory."""

    @T.prim_func
    def main(A: T.Tensor((S,), "float32"), B: T.Tensor((1,), "float32")):
        with T.Kernel(1):
            x, total = T.alloc_fragment((S,), "float32"), T.alloc_shared((1,), "float32")
            T.copy(A, x)
            T.clear(total)
            if bug:
                for i in T.Parallel(S):
                    total[0] = total[0] + x[i]  # here
            else:
                T.reduce_sum(x, total, dim=0)
            T.copy(total, B)

    return main


@case("collision", "x[", ranks=1)
def a_stencil_in_place(n, bug):
    """Each iteration reads its neighbour's element, which the neighbour's iteration writes."""

    @T.prim_func
    def main(A: T.Tensor((S,), "float32"), B: T.Tensor((S,), "float32")):
        with T.Kernel(1):
            x, y = T.alloc_fragment((S,), "float32"), T.alloc_fragment((S,), "float32")
            T.copy(A, x)
            T.copy(A, y)
            for i in T.Parallel(S - 1):
                if bug:
                    x[i] = x[i] + x[i + 1]  # here
                else:
                    y[i] = x[i] + x[i + 1]
            T.copy(x if bug else y, B)

    return main


@case("collision", "x[", ranks=1)
def a_transpose_in_place(n, bug):
    """Rows and columns change places within one tile."""

    @T.prim_func
    def main(A: T.Tensor((S, S), "float32"), B: T.Tensor((S, S), "float32")):
        with T.Kernel(1):
            x, y = T.alloc_shared((S, S), "float32"), T.alloc_shared((S, S), "float32")
            T.copy(A, x)
            T.clear(y)
            for i, j in T.Parallel(S, S):
                if bug:
                    x[i, j] = x[j, i]  # here
                else:
                    y[i, j] = x[j, i]
            T.copy(x if bug else y, B)

    return main


@case("collision", "counts", ranks=1, args=lambda n: {"bins": np.arange(S, dtype=np.int32) % 8})
def a_histogram_in_parallel(n, bug):
    """Elements of one bin are counted by iterations of their own."""

    @T.prim_func
    def main(bins: T.Tensor((S,), "int32"), B: T.Tensor((8,), "int32")):
        with T.Kernel(1):
            counts = T.alloc_shared((8,), "int32")
            T.clear(counts)
            for i in T.Parallel(S) if bug else T.serial(S):
                counts[bins[i]] = counts[bins[i]] + 1  # here
            T.copy(counts, B)

    return main


@case("arithmetic", "divided by zero", ranks=1, args=lambda n: {"k": 0})
def division_by_zero(n, bug):
    """Rows are dealt by a count that is zero."""

    @T.prim_func
    def main(k: T.int32, B: T.Tensor((S,), "int32")):
        with T.Kernel(1):
            for i in T.Parallel(S):
                B[i] = i // (k if bug else k + 1)  # here

    return main


@case("assertion", "no such expert", ranks=2, args=lambda n: {"expert": np.array([0, 3, 1, 2], np.int32)})
def an_expert_that_is_not_there(n, bug):
    """The kernel asserts what the router promised, and the router counts experts differently."""
    experts = 3 if bug else 4

    @T.prim_func
    def main(
        X: T.Tensor((4, S), "float32"),
        expert: T.Tensor((4,), "int32"),
        Y: T.Tensor((experts + 1, S), "float32"),
    ):
        with T.Kernel(1):
            for t in T.serial(4):
                T.device_assert(expert[t] < experts, "no such expert")  # here
                T.copy(X[t, 0:S], Y[expert[t], 0:S])

    return main


@case("endless", "has not ended", ranks=1, limit=2000, args=lambda n: {"k": 3})
def a_loop_that_never_ends(n, bug):
    """The stride is computed, and for this size it is zero."""

    @T.prim_func
    def main(A: T.Tensor((S,), "float32"), k: T.int32, B: T.Tensor((S,), "float32")):
        with T.Kernel(1):
            i = T.alloc_var("int32")
            i = 0
            while i < S:  # here
                B[i] = A[i]
                i = i + (k // 4 if bug else k // 3)

    return main
