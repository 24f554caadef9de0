"""Copies between memories of a GPU: a thread's loads are under way together, in front of its stores."""

from __future__ import annotations

import re
from typing import Any

import pytest

import tilescale.language as T
from tests.unit.cuda.emulated import agree, data, empty
from tilescale.compiler import driver


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
