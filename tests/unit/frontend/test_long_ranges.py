"""Python's range in a kernel: laid out round by round where it is short, a loop of the device where it is
long."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.kernels import run
from tilescale.compiler.frontend.hooks import LAID_OUT
from tilescale.compiler.tvm_compat import structural_walk, tirx


def summed(rounds: Any) -> Any:
    """B = Σ of A's numbers at the places that ``rounds`` has."""

    @T.prim_func
    def kernel(A: T.Tensor((400,), "int32"), B: T.Tensor((1,), "int32")):
        with T.Kernel(1, threads=32):
            total = T.alloc_var("int32")
            total = 0
            for i in rounds:
                half = i // 2
                total += A[i] * (half + 1)
            B[0] = total

    return kernel


def handed_on(n: int) -> Any:
    """B[i] = A[0] + … + A[i], where a value of Python's counts."""

    @T.prim_func
    def kernel(A: T.Tensor((400,), "int32"), B: T.Tensor((400,), "int32")):
        with T.Kernel(1, threads=32):
            at = 0
            for _ in range(n):
                B[at] = A[at] + at
                at += 1

    return kernel


def loops(kernel: Any) -> list[int]:
    found: list[int] = []
    structural_walk(kernel.trace().func.body, (tirx.For, lambda s: found.append(int(s.extent))))
    return found


@pytest.mark.parametrize(
    ("rounds", "laid_out"),
    [
        (range(LAID_OUT), True),
        (range(LAID_OUT + 1), False),
        (range(3, 300, 4), False),
        (range(200, 0, -2), True),
    ],
)
def test_long_ranges_are_loops(rounds: range, laid_out: bool):
    kernel = summed(rounds)
    assert loops(kernel) == ([] if laid_out else [len(rounds)])
    A = np.arange(400, dtype=np.int32)
    B = np.zeros(1, np.int32)
    run(kernel)(A, B)
    assert B[0] == sum(int(A[i]) * (i // 2 + 1) for i in rounds)


def test_rounds_that_hand_python_values_on_are_laid_out():
    kernel = handed_on(100)
    assert loops(kernel) == []
    A = np.arange(400, dtype=np.int32)
    B = np.zeros(400, np.int32)
    run(kernel)(A, B)
    assert np.array_equal(B[:100], A[:100] + np.arange(100)) and not B[100:].any()
