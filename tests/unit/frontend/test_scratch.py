"""Memory of threads that stands in front of a T.Parallel nest and is scratch of its iterations, on every target."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilescale
import tilescale.language as T
from tests.kernels import refused
from tests.unit.ops.test_argmax import TARGETS, run
from tilescale.compiler import driver
from tilescale.errors import TileValueError


@T.macro
def sign(x: T.Ref, out):
    if x > 0:
        out[0] = 1
    else:
        out[0] = -1


@T.prim_func
def scratch(
    A: T.Tensor((16, 8), "float32"), B: T.Tensor((16, 8), "float32"), C: T.Tensor((16, 4), "float32")
):
    with T.Kernel(1, threads=32):
        x, y = T.alloc_var("float32", 5.0), T.alloc_var("float32")
        pair, signs = T.alloc_local((2,), "float32"), T.alloc_local((1,), "float32")
        for i, j in T.Parallel(16, 8):
            x = A[i, j] * 2
            if x > 1:
                y = x
            else:
                y = -x
            B[i, j] = x + y
        for _ in T.serial(2):
            for i, j in T.Parallel(16, 4):
                for k in T.serial(2):
                    pair[k] = A[i, 2 * j + k]
                x = pair[0] * pair[1]
                sign(x, signs)
                C[i, j] = x + signs[0]


@pytest.mark.parametrize("target", TARGETS)
def test_each_iteration_has_its_own(target: str):
    a = np.random.default_rng(11).standard_normal((16, 8)).astype(np.float32)
    out = run(scratch, {"A": a, "B": np.zeros_like(a), "C": np.zeros((16, 4), np.float32)}, target)
    x = a * 2
    np.testing.assert_array_equal(out["B"], x + np.where(x > 1, x, -x))
    product = a[:, ::2] * a[:, 1::2]
    np.testing.assert_array_equal(out["C"], product + np.where(product > 0, 1, -1).astype(np.float32))


def test_the_iterations_are_shared_out_among_threads():
    text = driver.backend("cuda:sm_90a").text(driver.lower(scratch.trace(), "cuda:sm_90a"), "cuda")
    assert "tid == 0" not in text


def racing(how: str) -> Any:
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=32):
            x = T.alloc_var("float32")
            for i in T.Parallel(64):
                if how == "sum":
                    x += A[i]
                elif how == "perhaps":
                    if i > 3:
                        x = A[i]
                elif how == "loop":
                    for _ in T.serial(i):
                        x = A[i]
                else:
                    x = A[i]
                B[i] = x
            if how == "behind":
                B[0] = x

    return kernel


@pytest.mark.parametrize("how", ["sum", "perhaps", "loop", "behind"])
def test_what_iterations_would_know_of_each_other_is_refused(how: str):
    with refused(TileValueError, "two iterations of this T.Parallel loop touch one element of x"):
        tilescale.compile(racing(how), target="cpu")
