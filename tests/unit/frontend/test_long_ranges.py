"""Python's range in a kernel: laid out round by round, but a loop of the device where it is long and its body is
nothing but T's operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.kernels import run
from tilescale.compiler.frontend.ranges import LAID_OUT
from tilescale.compiler.tvm_compat import structural_walk, tirx

LONG = LAID_OUT + 1
Row = T.Tensor((200,), "int32")


def copied(rounds: Any) -> Any:
    """B[2 i + 1] = A[2 i + 1] for each round i, with a nested loop."""

    @T.prim_func
    def kernel(A: T.Tensor((900,), "int32"), B: T.Tensor((900,), "int32")):
        with T.Kernel(1, threads=32):
            s = T.alloc_shared((2, 2), "int32")
            for i in rounds:
                T.copy(A[i * 2 : i * 2 + 2], s[i % 2, 0:2])
                for j in range(1, 2):
                    T.copy(s[i % 2, j : j + 1], B[i * 2 + j : i * 2 + j + 1])

    return kernel


def loops(kernel: Any) -> list[int]:
    found: list[int] = []
    structural_walk(kernel.trace().func.body, (tirx.For, lambda s: found.append(int(s.extent))))
    return found


@pytest.mark.parametrize(
    ("rounds", "laid_out"),
    [
        (range(LAID_OUT), True),
        (range(LONG), False),
        (range(3, 300, 4), False),
        (range(200, 0, -2), True),
    ],
)
def test_long_ranges_are_loops(rounds: range, laid_out: bool):
    kernel = copied(rounds)
    assert loops(kernel) == ([] if laid_out else [len(rounds)])
    A, B = np.arange(900, dtype=np.int32), np.zeros(900, np.int32)
    run(kernel)(A, B)
    want = np.zeros(900, np.int32)
    for i in rounds:
        want[2 * i + 1] = A[2 * i + 1]
    assert np.array_equal(B, want)


def by_name() -> Any:
    at = 0

    def body(A: Any, B: Any) -> None:
        nonlocal at
        T.copy(A[at : at + 1], B[at : at + 1])
        at += 1

    return body


@T.macro
def one(A: Any, B: Any, at: Any):
    T.copy(A[at : at + 1], B[at : at + 1])


def kernels() -> dict[str, Callable[[], Any]]:
    """B = A up to `LONG`, by loops in which Python hands values on, or looks at a round's number."""

    def listed() -> Any:
        @T.prim_func
        def kernel(A: Row, B: Row):
            with T.Kernel(1, threads=32):
                c = [0]
                for _ in range(LONG):
                    T.copy(A[c[0] : c[0] + 1], B[c[0] : c[0] + 1])
                    c[0] += 1

        return kernel

    def table() -> Any:
        where = list(range(LONG))

        @T.prim_func
        def kernel(A: Row, B: Row):
            with T.Kernel(1, threads=32):
                for i in range(LONG):
                    T.copy(A[where[i] : where[i] + 1], B[where[i] : where[i] + 1])

        return kernel

    def helper() -> Any:
        move = by_name()

        @T.prim_func
        def kernel(A: Row, B: Row):
            with T.Kernel(1, threads=32):
                for _ in range(LONG):
                    move(A, B)

        return kernel

    def iterated() -> Any:
        places = iter(range(LONG))

        @T.prim_func
        def kernel(A: Row, B: Row):
            with T.Kernel(1, threads=32):
                for _ in range(LONG):
                    at = next(places)
                    T.copy(A[at : at + 1], B[at : at + 1])

        return kernel

    def turned() -> Any:
        @T.prim_func
        def kernel(A: Row, B: Row):
            with T.Kernel(1, threads=32):
                s = [T.alloc_shared((1,), "int32"), T.alloc_shared((1,), "int32")]
                for i in range(LONG):
                    T.copy(A[i : i + 1], s[0])
                    s.reverse()
                    T.copy(s[1], B[i : i + 1])

        return kernel

    def counted() -> Any:
        @T.prim_func
        def kernel(A: Row, B: Row):
            at = 0
            for _ in range(LONG):
                at += 1
            with T.Kernel(1, threads=32):
                T.copy(A[0:at], B[0:at])

        return kernel

    def scaled() -> Any:
        @T.prim_func
        def kernel(A: Row, B: Row):
            with T.Kernel(1, threads=32):
                for i in range(LONG):
                    B[i] = A[i] + (i * 100000000) // 7 - (i * 100000000) // 7

        return kernel

    def in_macro() -> Any:
        @T.prim_func
        def kernel(A: Row, B: Row):
            with T.Kernel(1, threads=32):
                for i in range(LONG):
                    one(A, B, i)

        return kernel

    return {f.__name__: f for f in (listed, table, helper, iterated, turned, counted, scaled, in_macro)}


@pytest.mark.parametrize("name", kernels())
def test_rounds_that_python_has_a_part_in_are_laid_out(name: str):
    A, B = np.arange(1, 201, dtype=np.int32), np.zeros(200, np.int32)
    run(kernels()[name]())(A, B)
    assert np.array_equal(B[:LONG], A[:LONG]) and not B[LONG:].any()


def test_long_ranges_of_stores_are_loops_where_floats_do_not_come_from_the_rounds_number():
    half = 0.5

    @T.prim_func
    def kernel(A: T.Tensor((900,), "float32"), B: T.Tensor((900,), "float32")):
        with T.Kernel(1, threads=1):
            s = T.alloc_local((1,), "float32")
            s[0] = 0
            for i in range(900):
                if i < 800:
                    s[0] += A[i] * half
                    B[i] = A[i] / 3 + 0.25
            for i in range(LONG):
                B[800 + i] = A[i] + i * half
            B[899] = s[0]

    assert loops(kernel) == [900]
    A, B = np.arange(900, dtype=np.float32), np.zeros(900, np.float32)
    run(kernel)(A, B)
    np.testing.assert_allclose(B[:800], A[:800] / 3 + 0.25, rtol=1e-6)
    np.testing.assert_allclose(B[800 : 800 + LONG], A[:LONG] * 1.5, rtol=1e-6)
    assert B[899] == A[:800].sum() / 2
