"""Names in printed code, of kernels that C++ has another use for among them."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

import tilescale
import tilescale.language as T
from tests.unit.cuda.test_hopper import lowered
from tilescale.compiler.cuda import toolchain
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.compiler.gpu.cprinter import symbol


@pytest.mark.skipif(toolchain.find_nvcc() is None, reason="there is no nvcc on this machine")
def test_a_kernel_may_be_called_main():
    @T.prim_func
    def main(A: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(64):
                A[i] = A[i] + 1.0

    made = tilescale.compile(main, target="cuda")
    assert "main_kernel(" in made.get_kernel_source("cuda") and made.resources["registers"] > 0


def test_other_names_stay():
    assert symbol("gemm") == "gemm" and symbol("exp") == "exp_kernel" and symbol("class") == "class_kernel"


@pytest.mark.skipif(toolchain.find_nvcc() is None, reason="there is no nvcc on this machine")
def test_a_variable_may_be_called_like_a_function():
    @T.prim_func
    def expf(A: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64) as bx:
            for i in T.Parallel(64):
                expf = A[i]
                A[i] = T.exp(expf) + bx

    made = tilescale.compile(expf, target="cuda")
    assert "expf_kernel(" in made.get_kernel_source("cuda") and made.resources["registers"] > 0


def test_names_are_ascii():
    assert symbol("é") == "__kernel" and symbol("__x") == "__x_kernel"


class Pair(NamedTuple):
    """Two tiles, and some more."""

    left: Any
    right: Any
    others: list[Any]


def test_tiles_of_a_named_tuple_have_its_fields_names():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64):
            one = Pair(
                T.alloc_shared((64,), "float32"),
                T.alloc_fragment((64,), "float32"),
                [T.alloc_shared((64,), "float32")],
            )
            T.copy(A, one.left)
            T.copy(one.left, one.right)
            T.copy(one.right, one.others[0])
            T.copy(one.others[0], A)

    text = print_kernel(lowered(kernel)[0]).text
    assert all(name in text for name in ("one_left", "one_right", "one_others")), text
