"""Programs that were once accepted in silence."""

from __future__ import annotations

import pytest
import torch

import tilescale.language as T
from tests.kernels import refused, run
from tilescale.errors import TileSyntaxError, TileTypeError, TileValueError


def test_a_statement_behind_the_launch():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1):
            A[0] = 1
        A[1] = 2

    with refused(TileSyntaxError, "behind the kernel's launch", at="A[1] = 2", write="with T.Kernel"):
        kernel.trace()


@pytest.mark.parametrize("store", [False, True])
def test_a_constant_index_outside_a_constant_extent(store: bool):
    @T.prim_func
    def kernel(A: T.Tensor((10,), "float32"), B: T.Tensor((10,), "float32")):
        with T.Kernel(1):
            if store:
                B[12] = A[0]
            else:
                B[0] = A[12]

    with refused(
        TileValueError, f"index 12 lies outside axis 0 of {'B' if store else 'A'}, whose extent is 10"
    ):
        run(kernel)


def test_an_unknown_dtype_has_a_place():
    with refused(TileTypeError, "unknown dtype 'float33'", at='T.Tensor((4,), "float33")', write="float3"):
        T.Tensor((4,), "float33")


def test_what_values_and_tiles_do_not_have():
    def refuse(message, statement, **more):
        @T.prim_func
        def kernel(A: T.Tensor((8, 2), "float32"), n: T.int32):
            with T.Kernel(1):
                v = T.alloc_var("int32")
                statement(A, n, v)

        with refused(TileTypeError, message, **more):
            kernel.trace()

    words = "arithmetic, comparisons and the functions of T"
    refuse("a value of float32 has no 'foo'", lambda A, n, v: A[0, 0].foo, at="A[0, 0].foo", expected=words)
    refuse("a value of int32 has no 'exp'", lambda A, n, v: (n + 1).exp(), expected=words, write="T.exp(")
    refuse("A has no 'shap'", lambda A, n, v: A.shap, expected="shape, dtype", write=".shape")
    refuse("A has no 'T'", lambda A, n, v: A[0:2, 0].T)
    refuse("v has no 'foo'", lambda A, n, v: v.foo)


def test_labels_that_are_none():
    def refuse(message, statement, **more):
        @T.prim_func
        def kernel(A: T.Tensor((8, 2), "float32"), n: T.int32):
            with T.Kernel(1):
                statement(A, n)

        with refused(TileTypeError, message, **more):
            kernel.trace()

    refuse(
        "T.print's label is A", lambda A, n: T.print("x", A), at='T.print("x", A)', write='T.print(A, "x")'
    )
    refuse("T.print's label is 3", lambda A, n: T.print(A, 3), expected="what is shown, then a text")
    refuse("T.print of two texts", lambda A, n: T.print("x", "y"), write='T.print("y: x")')
    refuse(
        "T.device_assert of a float32",
        lambda A, n: T.device_assert(A[0, 0]),
        expected="a comparison",
        write="A[0, 0] != 0.0",
    )
    refuse("T.device_assert of a float32", lambda A, n: T.device_assert(1.0))
    refuse("T.device_assert's message is A", lambda A, n: T.device_assert(n > 0, A))


@pytest.mark.parametrize("kind", ["Parallel", "vectorized"])
def test_tile_operations_where_iterations_are_of_elements(kind: str):
    """One meaning on all targets: none of them gives an iteration more than a thread (or lane)."""

    def refuse(message, statement):
        @T.prim_func
        def kernel(A: T.Tensor((8, 8), "float32")):
            with T.Kernel(1, threads=128):
                a, c, r = (
                    T.alloc_shared((8, 8), "float32"),
                    T.alloc_fragment((8, 8), "float32"),
                    T.alloc_shared((8,), "float32"),
                )
                for i in (T.Parallel if kind == "Parallel" else T.vectorized)(8):
                    statement(A, a, c, r, i)

        with refused(TileSyntaxError, message):
            kernel.trace()

    def scale(A, a, c, r, i):
        with T.Scale("thread"):
            pass

    loop = f"of a tile in T.{kind}, whose iterations are of elements"
    refuse(f"T.copy {loop}", lambda A, a, c, r, i: T.copy(A[i, 0:8], a[7 - i, 0:8]))
    refuse(f"T.gemm {loop}", lambda A, a, c, r, i: T.gemm(a, a, c))
    refuse(f"T.fill {loop}", lambda A, a, c, r, i: T.clear(a[i, 0:8]))
    refuse(f"T.reduce_sum {loop}", lambda A, a, c, r, i: T.reduce_sum(c[i, 0:8], r[i : i + 1], dim=0))
    refuse(f"T.cummax {loop}", lambda A, a, c, r, i: T.cummax(a[i, 0:8], dim=0))
    refuse(f"T.atomic_add {loop}", lambda A, a, c, r, i: T.atomic_add(A[0, 0:8], a[i, 0:8]))
    refuse(f"T.print {loop}", lambda A, a, c, r, i: T.print(a[i, 0:8]))
    refuse("T.alloc_shared in T.Parallel", lambda A, a, c, r, i: T.alloc_shared((4,), "float32"))
    refuse('T.Scale("thread") in T.Parallel', scale)


def test_tiles_of_one_element_are_copied_in_a_parallel_loop():
    @T.prim_func
    def kernel(A: T.Tensor((8, 8), "float32"), B: T.Tensor((8, 8), "float16")):
        with T.Kernel(1, threads=32):
            for i, j in T.Parallel(8, 8):
                T.copy(A[i, j], B[j, i])

    a, b = torch.randn(8, 8), torch.zeros(8, 8, dtype=torch.float16)
    run(kernel)(a, b)
    assert torch.equal(b, a.T.half())


def test_names_that_do_not_fit_a_loop():
    def refuse(message, kernel, **more):
        with refused(TileSyntaxError, message, **more):
            T.prim_func(kernel).trace()

    def few(A: T.Tensor((8,), "float32")):
        with T.Kernel(1):
            for i, j in T.Parallel(2, 2, 2):
                A[i] = j

    def many(A: T.Tensor((8,), "float32")):
        with T.Kernel(1):
            for i, j in T.serial(2):
                A[i] = j

    def persistent(A: T.Tensor((8,), "float32")):
        with T.Kernel(1) as b:
            for i, j, k in T.Persistent((2, 2), 1, b):
                A[i] = j + k

    def rest(A: T.Tensor((8,), "float32")):
        with T.Kernel(1):
            for i, *others in T.Parallel(2, 2, 2):
                A[i * 4 + others[0] * 2 + others[1]] = 1
            for at in T.grid(2, 4):
                A[at[0] * 4 + at[1]] += 1

    refuse(
        "T.Parallel has 3 indices, and 2 names take them: i, j",
        few,
        at="T.Parallel(2, 2, 2)",
        write="for i, j, i2 in T.Parallel(…):",
    )
    refuse("T.serial has 1 index, and 2 names take it: i, j", many, write="for i in T.serial(…):")
    refuse(
        "T.Persistent has 2 indices, and 3 names take them", persistent, write="for i, j in T.Persistent(…):"
    )
    a = torch.zeros(8)
    run(T.prim_func(rest))(a)
    assert a.tolist() == [2] * 8


@pytest.mark.parametrize("of_device", [False, True])
def test_a_quotient_rounded_up_by_zero(of_device: bool):
    @T.prim_func
    def kernel(A: T.Tensor((8,), "int32"), n: T.int32):
        with T.Kernel(1):
            A[0] = T.ceildiv(n if of_device else 8, 0)

    with refused(
        TileValueError,
        f"T.ceildiv({'n' if of_device else 8}, 0)",
        at="T.ceildiv(n if of_device else 8, 0)",
        expected="than zero",
    ):
        kernel.trace()


def test_more_names_than_a_grid_has_axes():
    @T.prim_func
    def kernel(A: T.Tensor((8,), "int32")):
        with T.Kernel(2, 4) as (bx, by, bz):
            A[bx + by] = bz

    with refused(
        TileSyntaxError, "T.Kernel of 2 axes as bx, by, bz", expected="each axis", write="as bx, by"
    ):
        kernel.trace()
