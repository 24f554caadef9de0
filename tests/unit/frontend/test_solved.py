"""Symbols that stand in expressions alone: an extent says what they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import tilescale
import tilescale.language as T
from tests.kernels import refused, run
from tests.unit.cuda.emulated import agree
from tilescale.compiler.checks.run import launch
from tilescale.errors import TileTypeError, TileValueError
from tilescale.language.symbolic import linear


def numbered(of: Any, other: Any) -> Any:
    n = T.dynamic("n")

    @T.prim_func
    def kernel(A: T.Tensor((of(n),), "int32"), B: T.Tensor((other(n), 2), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(64):
                if i < of(n):
                    A[i] = n
            for i in T.Parallel(64):
                if i < other(n):
                    B[i, 1] = i + n

    return kernel


@pytest.mark.parametrize(
    ("of", "other"),
    [
        (lambda n: n + 1, lambda n: 2 * n),
        (lambda n: 3 * n, lambda n: 3 * n - 1),
        (lambda n: (n - 2) * 1, lambda n: T.ceildiv(n, 2)),
    ],
)
def test_what_an_extent_says(of: Any, other: Any):
    n, kernel = 6, numbered(of, other)
    args = {"A": np.zeros(of(n), np.int32), "B": np.zeros((other(n), 2), np.int32)}
    there, here = agree(kernel, args, exact=True), {name: a.copy() for name, a in args.items()}
    run(kernel)(*here.values())
    for found in (there, here):
        assert (found["A"] == n).all() and (found["B"][:, 1] == np.arange(other(n)) + n).all()
    with refused(TileValueError, "axis 0 of B has extent 33"):
        run(kernel)(here["A"], np.zeros((33, 2), np.int32))


def test_multiples_are_looked_at():
    kernel = numbered(lambda n: 4 * n, lambda n: n + 2)
    with refused(TileValueError, "axis 0 of A has extent 10", expected="a multiple of 4, as 4 * n is"):
        run(kernel)(np.zeros(10, np.int32), np.zeros((4, 2), np.int32))


def test_errors_say_what_was_written():
    """Not the names and expressions that stand in its place."""
    n, x = 6, np.zeros
    kernel = numbered(lambda n: n + 1, lambda n: 2 * n)
    with refused(
        TileValueError, "axis 0 of B has extent 8", expected="12 = 2 * n, where n + 1 is 7 by axis 0 of A"
    ):
        run(kernel)(x(7, np.int32), x((8, 2), np.int32))
    with refused(TileValueError, "axis 0 of B has extent 8", expected="12 = 2 * n"):
        launch(kernel, 1, {"A": x(7, np.int32), "B": x((8, 2), np.int32)})
    with refused(TileTypeError, "B is a tensor of int64", expected='T.Tensor((2 * n, 2), "int32")'):
        run(kernel)(x(7, np.int32), x((12, 2), np.int64))

    @tilescale.jit
    def baked(A, B):
        n = T.const("n")
        A: T.Tensor((n + 1,), "int32")
        B: T.Tensor((2 * n,), "int32")
        with T.Kernel(1):
            B[0] = A[0]

    with refused(TileValueError, "axis 0 of B has extent 8", expected="12, where n + 1 is 7 by axis 0 of A"):
        baked(x(7, np.int32), x(8, np.int32))


def test_eager_kernels():
    @tilescale.jit
    def picked(A):
        m = T.dynamic("m")
        A: T.Tensor((m * 4,), T.float32)
        C = T.empty((m, 2), T.float32)
        with T.Kernel(m) as b:
            C[b, 0] = A[b * 4]
            C[b, 1] = m
        return C

    for m in (3, 5):
        assert torch.equal(
            picked(torch.arange(4.0 * m)), torch.stack([torch.arange(m) * 4.0, torch.full((m,), 1.0 * m)], 1)
        )


def test_what_says_nothing():
    m, n = T.dynamic("m, n")
    for shape in ((n * 2 + 1,), (n * m,), (n // 2,)):

        @T.prim_func
        def kernel(A: T.Tensor(shape, "int32")):
            with T.Kernel(1):
                A[0] = n

        with refused(TileValueError, "stands alone in no extent"):
            run(kernel)
    assert linear(n * 2 + 1)[1:] == (2, 1) and linear(5 - n)[1:] == (-1, 5) and linear(n * m) is None
