"""Names of kernels that C++ has another use for."""

from __future__ import annotations

import pytest

import tilescale
import tilescale.language as T
from tilescale.compiler.cuda import toolchain
from tilescale.compiler.cuda.cprinter import symbol


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
