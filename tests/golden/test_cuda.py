"""The printed CUDA C++ of kernels: reviewed as text in diffs, and taken by nvcc where there is one."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

import tilescale.language as T
from tests.golden.test_ir import gemm
from tests.kernels import run
from tests.unit.cuda import thread_kernels
from tests.unit.cuda.emulated import data, same
from tilescale.compiler.checks.run import launch
from tilescale.compiler.cuda.lower import Lowering
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.compiler.cuda.targets import target
from tilescale.compiler.passes import pipeline

KERNELS = ("scale", "staged")


@pytest.mark.parametrize("name", KERNELS)
def test_cuda(name: str, golden: Callable[[str, str], None]):
    golden(f"{name}.cu", print_kernel(getattr(thread_kernels, name)()).text)


@T.prim_func
def softmax(A: T.Tensor((32, 1000), "float32"), C: T.Tensor((32, 1000), "float32")):
    with T.Kernel(32, threads=128) as row:
        x, top, total = (
            T.alloc_fragment((1000,), "float32"),
            T.alloc_fragment((1,), "float32"),
            T.alloc_fragment((1,), "float32"),
        )
        T.copy(A[row, 0], x)
        T.reduce_max(x, top)
        for i in T.Parallel(1000):
            x[i] = T.exp(x[i] - top[0])
        T.reduce_sum(x, total)
        for i in T.Parallel(1000):
            x[i] = x[i] / total[0]
        T.copy(x, C[row, 0])


@T.prim_func
def vector_add(
    A: T.Tensor((1000,), "float32"), B: T.Tensor((1000,), "float32"), C: T.Tensor((1000,), "float32")
):
    with T.Kernel(T.ceildiv(1000, 512), threads=128) as bx:
        for i in T.Parallel(512):
            C[bx * 512 + i] = A[bx * 512 + i] + B[bx * 512 + i]


KERNELS_OF_TILES = [vector_add, softmax, gemm]


@pytest.mark.parametrize("kernel", KERNELS_OF_TILES, ids=lambda k: k.name)
def test_lowered(kernel, golden: Callable[[str, str], None]):
    """Layouts, fences, vectors and instructions of whole kernels: what an author sees of them."""
    program, _ = pipeline.run(kernel.trace(), target("sm_80"))
    golden(f"{kernel.name}.cu", print_kernel(Lowering(program).run()).text)


def attention() -> Any:
    from tests.unit.passes.seeded_gpu import attention

    return attention()


def sparse() -> Any:
    from tests.golden.sparse import sparse_gemm

    return sparse_gemm


@pytest.mark.parametrize(
    "name, build", [("gemm", lambda: gemm), ("attention", attention), ("sparse_gemm", sparse)]
)
def test_on_hopper(name: str, build: Callable[[], Any], golden: Callable[[str, str], None]):
    """Roles, barriers, TMA and wgmma; without the comments that name lines, which other tests' kernels
    share."""
    program, _ = pipeline.run(build().trace(), target("sm_90a"))
    assert not program.notes
    text = print_kernel(Lowering(program).run()).text
    kept = [
        line
        for line in text[text.index('extern "C"') :].splitlines()
        if not re.match(r"\s*// \w+\.py:\d+", line)
    ]
    golden(f"{name}.sm_90a.cu", "\n".join(kept))


@pytest.mark.parametrize("kernel", KERNELS_OF_TILES, ids=lambda k: k.name)
def test_the_same_kernels_on_the_cpu(kernel: Any):
    args = {
        p.name: data(tuple(130 if str(e) == "m" else int(e) for e in p.spec.shape), str(p.spec.dtype), k)
        for k, p in enumerate(kernel.trace().params)
    }
    want = launch(kernel, 1, args).arrays[0]
    given = {name: array.copy() for name, array in args.items()}
    run(kernel)(**given)
    for name, array in given.items():
        same(array, want[name], name, False)
