"""The printed CUDA C++ of kernels: reviewed as text in diffs, and taken by nvcc where there is one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import tilescale.language as T
from tests.golden.test_ir import gemm
from tests.unit.cuda import thread_kernels
from tilescale.compiler.cuda.lower import Lowering
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.compiler.passes import pipeline

KERNELS = ("scale", "staged")


@pytest.mark.parametrize("name", KERNELS)
def test_cuda(name: str, golden: Callable[[str, str], None]):
    golden(f"{name}.cu", print_kernel(getattr(thread_kernels, name)()).text)


@T.prim_func
def softmax(A: T.Tensor((32, 1000), "float32"), C: T.Tensor((32, 1000), "float32")):
    with T.Kernel(32, threads=128) as row:
        x, top, total = T.alloc_fragment((1000,), "float32"), T.alloc_fragment((1,), "float32"), T.alloc_fragment((1,), "float32")
        T.copy(A[row, 0], x)
        T.reduce_max(x, top)
        for i in T.Parallel(1000):
            x[i] = T.exp(x[i] - top[0])
        T.reduce_sum(x, total)
        for i in T.Parallel(1000):
            x[i] = x[i] / total[0]
        T.copy(x, C[row, 0])


@T.prim_func
def vector_add(A: T.Tensor((1000,), "float32"), B: T.Tensor((1000,), "float32"), C: T.Tensor((1000,), "float32")):
    with T.Kernel(T.ceildiv(1000, 512), threads=128) as bx:
        for i in T.Parallel(512):
            C[bx * 512 + i] = A[bx * 512 + i] + B[bx * 512 + i]


@pytest.mark.parametrize("kernel", [vector_add, softmax, gemm], ids=lambda k: k.name)
def test_lowered(kernel, golden: Callable[[str, str], None]):
    """Layouts, fences, vectors and instructions of whole kernels: what an author sees of them."""
    program, _ = pipeline.run(kernel.trace(), passes=pipeline.gpu_passes("sm_80"))
    golden(f"{kernel.name}.cu", print_kernel(Lowering(program, "sm_80").run()).text)
