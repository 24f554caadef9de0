"""What an operation reads and what it writes share no elements: every target would make something else of it, so all refuse it."""

from __future__ import annotations

import numpy as np
import pytest

import tilescale
import tilescale.language as T
from tests.kernels import refused
from tests.unit.cuda.emulated import agree
from tilescale.errors import TileValueError

TARGETS = ("sim", "cpu", "cuda:sm_90a")


def on_tile(statement):
    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float32"), D: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            s = T.alloc_shared((64, 64), "float32")
            T.copy(A, s)
            statement(s, A)
            T.copy(s, D)

    return kernel


@T.macro
def shifted(s, A):
    T.copy(s[0:48, 0:64], s[8:56, 0:64])


@T.macro
def shifted_along_both(s, A):
    T.copy(s[0:32, 8:40], s[31:63, 0:32])


@T.macro
def shifted_in_a_loop(s, A):
    for k in T.serial(3):
        T.copy(s[k : k + 8, 0:64], s[k + 1 : k + 9, 0:64])


@T.macro
def within_a_tensor(s, A):
    T.copy(A[0:48, 0:64], A[8:56, 0:64])


@T.macro
def scanned(s, A):
    T.cumsum(s[0:31, 0:64], s[1:32, 0:64], dim=0)


@T.macro
def reduced(s, A):
    T.reduce_sum(s, s[0, 0:64], dim=1)


@T.macro
def product(s, A):
    b = T.alloc_shared((64, 64), "float32")
    T.copy(A, b)
    T.gemm(b, s, s, transpose_A=True)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("statement", "what"),
    [
        (shifted, "T.copy writes elements of s that it also reads"), (shifted_along_both, "T.copy writes elements of s"),
        (shifted_in_a_loop, "T.copy writes elements of s"), (within_a_tensor, "T.copy writes elements of A"),
        (scanned, "T.cumsum writes elements of s"), (reduced, "T.reduce_sum writes elements of s"), (product, "T.gemm writes elements of s"),
    ],
)  # fmt: skip
def test_overlaps_are_refused(statement, what, target):
    with refused(TileValueError, what):
        tilescale.compile(on_tile(statement), target=target)


@T.macro
def halves(s, A):
    T.copy(s[0:32, 0:64], s[32:64, 0:64])


@T.macro
def steps(s, A):
    for k in T.serial(4):
        T.copy(s[k * 16 : k * 16 + 8, 0:64], s[k * 16 + 8 : k * 16 + 16, 0:64])


@T.macro
def in_place(s, A):
    T.cumsum(s, dim=1)


@pytest.mark.parametrize("statement", [halves, steps, in_place])
def test_parts_that_touch_no_other_and_what_stays_in_place_are_right(statement):
    rng = np.random.default_rng(1)
    given = {"A": rng.integers(-4, 5, (64, 64)).astype("f4"), "D": np.zeros((64, 64), "f4")}
    agree(on_tile(statement), given)
