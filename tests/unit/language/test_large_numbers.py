"""Numbers of a program that 32 bits do not hold: indices and loops of 64 bits, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.unit.cuda.emulated import agree, empty
from tilescale.compiler import driver
from tilescale.compiler.checks.run import launch
from tilescale.errors import TileError, TileValueError

FAR = 5_000_000_000


def text(kernel: Any, target: str) -> str:
    return driver.source_text(kernel.trace(), target.partition(":")[0], target)


def counted(low: Any, high: Any) -> Any:
    @T.prim_func
    def counts(B: T.Tensor((8,), "int64")):
        with T.Kernel(1, threads=32):
            for i in T.serial(low, high):
                B[i - FAR] = 2 * i

    return counts


@pytest.mark.parametrize("wide", [False, True])
def test_loops_between_large_numbers_count_in_64_bits(wide: bool) -> None:
    bounds = [T.int64(b) if wide else b for b in (FAR, FAR + 8)]
    kernel, want = counted(*bounds), 2 * (FAR + np.arange(8))
    np.testing.assert_array_equal(launch(kernel, 1, {"B": empty((8,), "int64")}).arrays[0]["B"], want)
    agree(kernel, {"B": empty((8,), "int64")})


def places(kind: str) -> Any:
    @T.prim_func
    def far(A: T.Tensor((1 << 33,), "int8"), B: T.Tensor((64,), "int8")):
        with T.Kernel(1, threads=32):
            if kind == "element":
                B[0] = A[FAR]
            elif kind == "from":
                T.copy(A[FAR], B)
            elif kind == "slice":
                T.copy(A[FAR : FAR + 64], B)
            else:
                for i in T.Parallel(64):
                    B[i] = A[FAR + i]

    return far


@pytest.mark.parametrize("target", ["cpu", "cuda:sm_90a"])
@pytest.mark.parametrize("kind", ["element", "from", "slice", "sum"])
def test_an_index_that_32_bits_do_not_hold(kind: str, target: str) -> None:
    assert str(FAR) in text(places(kind), target)


def whole(kind: str, n: int) -> Any:
    @T.prim_func
    def all_of_it(A: T.Tensor((n,), "int8"), B: T.Tensor((n,), "int8")):
        with T.Kernel(1, threads=128):
            if kind == "copy":
                T.copy(A, B)
            elif kind == "fill":
                T.fill(B, 1)
            else:
                for i in T.Parallel(n):
                    B[i] = A[i] + 1

    return all_of_it


@pytest.mark.parametrize(("kind", "said"), [("copy", "T.copy"), ("fill", "T.fill"), ("nest", "T.Parallel")])
def test_what_one_executor_of_a_gpu_does_not_count(kind: str, said: str) -> None:
    """A processor does. One element less is a long loop, and takes no memory to compile."""
    assert text(whole(kind, 1 << 33), "cpu")
    with pytest.raises(TileValueError, match=rf"{said} of 8589934592 elements by one executor"):
        text(whole(kind, 1 << 33), "cuda:sm_90a")
    assert text(whole(kind, (1 << 31) - 128), "cuda:sm_90a")


def test_a_constant_that_its_dtype_does_not_hold_is_refused_with_its_line() -> None:
    @T.prim_func
    def kernel(B: T.Tensor((8,), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(8):
                B[i] = T.if_then_else(i > 3, FAR, 0)

    with pytest.raises(TileError) as refused:
        kernel.trace()
    assert "test_large_numbers.py" in str(refused.value) and str(FAR) in str(refused.value)


def test_a_nest_from_a_large_number_on():
    @T.prim_func
    def kernel(B: T.Tensor((8,), "int64")):
        with T.Kernel(1, threads=32):
            for i in T.vectorized(FAR, FAR + 8):
                B[i - FAR] = i

    got = agree(kernel, {"B": empty((8,), "int64")})
    np.testing.assert_array_equal(got["B"], FAR + np.arange(8))


BEYOND = 1 << 64


def beyond(what: str) -> Any:
    @T.prim_func
    def kernel(A: T.Tensor((8,), "int64"), B: T.Tensor((8,), "int64")):
        with T.Kernel(1, threads=32):
            if what == "sum":
                B[0] = A[0] + BEYOND
            elif what == "comparison":
                if A[0] < BEYOND:
                    B[0] = 1
            elif what == "quotient":
                B[0] = A[0] // BEYOND
            elif what == "greatest":
                B[0] = T.max(A[0], BEYOND)
            elif what == "rounded up":
                B[0] = T.ceildiv(A[0], BEYOND)
            elif what == "float":
                B[0] = T.cast(T.cast(A[0], "float32") * BEYOND, "int64")
            elif what == "index":
                B[BEYOND] = 1
            elif what == "slice":
                T.copy(A[BEYOND : BEYOND + 8], B)
            elif what == "tile":
                T.clear(T.alloc_shared((1 << 40,), "int8"))
            elif what == "registers":
                T.clear(T.alloc_fragment((1 << 20, 1 << 20), "int8"))
            elif what == "serial":
                for _ in T.serial(BEYOND - 1, BEYOND):
                    B[0] = 1
            elif what == "pipelined":
                for _ in T.Pipelined(BEYOND):
                    B[0] = 1
            else:
                for i in T.Parallel(BEYOND):
                    B[i] = 1

    return kernel


WHATS = ["sum", "comparison", "quotient", "greatest", "rounded up", "float", "index", "slice", "tile"]


@pytest.mark.parametrize("what", [*WHATS, "registers", "serial", "pipelined", "nest"])
def test_what_no_dtype_holds_is_refused_with_its_line(what: str):
    with pytest.raises(TileValueError) as refused:
        beyond(what).trace()
    said = str(refused.value)
    assert "test_large_numbers.py" in said and "Check failed" not in said and "ffi" not in said


def test_a_tensor_that_no_dtype_counts_is_refused():
    @T.prim_func
    def kernel(B: T.Tensor((BEYOND,), "int8")):
        with T.Kernel(1, threads=32):
            B[0] = 1

    with pytest.raises(TileValueError, match=f"extent 0 of B is {BEYOND}"):
        kernel.trace()
