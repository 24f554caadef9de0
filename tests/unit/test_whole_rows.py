"""Kernels whose rows are known at the call: which calls take the second one, and what it is."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import tilescale
import tilescale.language as T
from tilescale.errors import PerformanceWarning
from tilescale.whole_rows import Chooser

ARCH = {"kind": "cuda", "arch": "sm_90a"}
M, N, K = T.dynamic("m, n, k")


def product(n: Any = N, k: Any = K, dtype: str = "float16") -> Any:
    @T.prim_func
    def product(A: T.Tensor((M, k), dtype), B: T.Tensor((k, n), dtype), C: T.Tensor((M, n), "float32")):
        with T.Kernel(T.ceildiv(n, 64), T.ceildiv(M, 64), threads=128) as (bx, by):
            a, b = T.alloc_shared((64, 64), dtype), T.alloc_shared((64, 64), dtype)
            c = T.alloc_fragment((64, 64), "float32")
            T.clear(c)
            for step in T.Pipelined(T.ceildiv(k, 64), num_stages=2):
                T.copy(A[by * 64, step * 64], a)
                T.copy(B[step * 64, bx * 64], b)
                T.gemm(a, b, c)
            T.copy(c, C[by * 64, bx * 64])

    return product


@pytest.fixture(scope="module")
def both() -> tuple[Any, Any]:
    """The kernel of any rows, and that of whole vectors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", PerformanceWarning)  # neither is slow where it is taken
        kernel = tilescale.compile(product(), target=ARCH)
        assert kernel.has_second and isinstance(kernel._run, Chooser)
        return kernel, kernel._run.whole()


def test_rows_of_whole_vectors_are_copied_by_tma(both: tuple[Any, Any]):
    kernel, whole = both
    assert kernel.multiples == {} and whole.multiples == {"n": 8, "k": 8} and not whole.has_second
    assert {c["how"] for c in whole.compiled["copies"]} == {"by TMA"}
    assert "by TMA" not in {c["how"] for c in kernel.compiled["copies"]}
    assert kernel._run.whole() is whole  # made once


@pytest.mark.parametrize("m, n, k, whole", [
    (5, 64, 72, True), (64, 8, 8, True), (64, 60, 64, False), (64, 64, 63, False), (7, 0, 8, True)
])  # fmt: skip
def test_calls_are_told_apart_by_rows(both: tuple[Any, Any], m: int, n: int, k: int, whole: bool):
    half = torch.float16
    args = (torch.zeros(m, k, dtype=half), torch.zeros(k, n, dtype=half), torch.zeros(m, n))
    assert both[0]._run.fits(args) == whole


def test_rows_that_begin_elsewhere_take_the_kernel_of_any_rows(both: tuple[Any, Any]):
    a, b, c = (torch.zeros(4096 + 8, dtype=d) for d in (torch.float16, torch.float16, torch.float32))
    shaped = lambda t, at: t[at : at + 4096].view(64, 64)  # noqa: E731
    fits = both[0]._run.fits
    assert fits((shaped(a, 0), shaped(b, 8), shaped(c, 4)))
    assert not fits((shaped(a, 1), shaped(b, 0), shaped(c, 0)))
    assert not fits((shaped(a, 0), shaped(b, 0), shaped(c, 2)))
    assert not fits((shaped(a, 0).numpy(), None, shaped(c, 0)))  # the other one says what is wrong


def test_who_has_one_kernel():
    promised = product(T.dynamic("n", multiple_of=8), T.dynamic("k", multiple_of=8))
    for func, target in ((promised, ARCH), (product(64, 128), ARCH), (product(), "cpu")):
        assert not tilescale.compile(func, target=target).has_second


def test_a_call_of_other_rows_says_what_is_slow(both: tuple[Any, Any]):
    said: list[str] = []
    chooser = Chooser(lambda *_: "any", both[0]._run.rows, both[0]._run.begins, lambda: lambda *_: "whole")
    chooser.advice = lambda: said.append("slow")
    half = {n: torch.zeros(n, n, dtype=torch.float16) for n in (16, 17)}
    assert chooser(half[16], half[16], torch.zeros(16, 16)) == "whole" and not said
    for _ in range(2):
        assert chooser(half[17], half[17], torch.zeros(17, 17)) == "any"
    assert said == ["slow"]
