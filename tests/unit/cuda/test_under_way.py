"""Copies between memories of a GPU: a thread's loads are under way together, in front of its stores."""

from __future__ import annotations

import re
from typing import Any

import pytest

import tilescale.language as T
from tests.unit.cuda import sass
from tests.unit.cuda.corpus import printed
from tests.unit.cuda.emulated import agree, data, empty
from tilescale.compiler import driver
from tilescale.compiler.cuda import toolchain
from tilescale.ops.ranks import expert_kernels


def moved(n: int, size: int, threads: int, dtype: str, rows: int = 1) -> Any:
    """B = A, ``rows`` × ``size`` at a time; what lies beyond the end is left alone."""

    @T.prim_func
    def kernel(A: T.Tensor((rows, n), dtype), B: T.Tensor((rows, n), dtype)):
        with T.Kernel(T.ceildiv(n, size), threads=threads) as b:
            T.copy(A[0:rows, b * size : (b + 1) * size], B[0:rows, b * size : (b + 1) * size])

    return kernel


@pytest.mark.parametrize(
    "n, size, threads, dtype, rows, together",
    [
        (4096, 4096, 64, "float32", 1, 8),
        (5000, 4096, 64, "float32", 1, 8),
        (3072, 3072, 64, "float32", 1, 6),
        (1000, 1024, 128, "float16", 1, 0),
        (3000, 1024, 32, "bfloat16", 3, 4),
        (777, 512, 32, "int8", 2, 0),
    ],
)
def test_loads_go_in_front_of_stores(n: int, size: int, threads: int, dtype: str, rows: int, together: int):
    kernel = moved(n, size, threads, dtype, rows)
    agree(kernel, {"A": data((rows, n), dtype), "B": empty((rows, n), dtype)})
    code = driver.source_text(kernel.trace(), "cuda", "cuda:sm_90a")
    counts = [int(c) for c in re.findall(r"for \(int u\w*_one = 0; u\w*_one < (\d+)", code)]
    assert counts == ([together] * 2 if together else []), code
    if together:
        assert code.index("B_under_way[") < code.index("&A[") < code.index("&B["), code


def test_a_copy_to_shared_memory_has_none():
    @T.prim_func
    def kernel(A: T.Tensor((4096,), "float32"), B: T.Tensor((4096,), "float32")):
        with T.Kernel(1, threads=64):
            s = T.alloc_shared((4096,), "float32")
            T.copy(A, s)
            T.copy(s, B)

    agree(kernel, {"A": data((4096,), "float32"), "B": empty((4096,), "float32")})
    assert "B_under_way" not in driver.source_text(kernel.trace(), "cuda", "cuda:sm_80")


@pytest.mark.skipif(
    toolchain.find_nvcc() is None or sass.find_nvdisasm() is None, reason="needs nvcc and nvdisasm"
)
def test_rows_to_another_rank_are_stored_in_vectors():
    """The address in another rank's memory is one value, whatever rank is asked for: where it was one of two,
    nvcc cut 16 bytes into words."""

    kernel = expert_kernels.combine(1024, 2, 2, 512, 2, 1, 1, 8, 512, "bfloat16", True)
    text = sass.disassembled(toolchain.compile_cubin(printed(kernel, "sm_90a"), "sm_90a").code)
    assert text.count("STG.E.128") == 4, text  # of both lines, to the other rank and to C
    assert not re.search(r" STG\.E (?!64)", text), text
