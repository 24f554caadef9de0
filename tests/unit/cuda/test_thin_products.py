"""Products by mma.sync of which a warp has few tiles: every second step of k has sums of its own."""

from __future__ import annotations

from typing import Any

import pytest

import tilescale.language as T
from tests.unit.cuda.emulated import agree, data, empty
from tilescale.compiler import driver


def thin(m: int, n: int, k: int, dtype: str, rounds: int = 2, clear: bool = False, threads: int = 128) -> Any:
    out = "int32" if dtype == "int8" else "float32"

    @T.prim_func
    def kernel(
        A: T.Tensor((m, rounds * k), dtype), B: T.Tensor((n, rounds * k), dtype), C: T.Tensor((m, n), out)
    ):
        with T.Kernel(1, threads=threads):
            a, b = T.alloc_shared((m, k), dtype), T.alloc_shared((n, k), dtype)
            acc = T.alloc_fragment((m, n), out)
            T.fill(acc, 3)
            for r in T.serial(rounds):
                T.copy(A[0, r * k], a)
                T.copy(B[0, r * k], b)
                T.gemm(a, b, acc, transpose_B=True, clear_accum=clear)
            T.copy(acc, C)

    return kernel


CASES = [
    ((32, 32, 256, "float16"), True),
    ((16, 8, 256, "bfloat16", 2, False, 32), True),
    ((16, 16, 512, "int8", 2, True, 32), True),
    ((32, 32, 64, "float16"), False),  # four steps
    ((32, 32, 144, "float16"), False),  # nine
    ((64, 64, 256, "float16"), False),  # eight tiles of a warp
]


@pytest.mark.parametrize("made, apart", CASES, ids=str)
def test_sums_of_every_second_step(made: tuple[Any, ...], apart: bool):
    m, n, k, dtype, *_ = made
    kernel = thin(*made)
    code = driver.source_text(kernel.trace(), "cuda", "cuda:sm_80")
    assert ("odd[" in code) == apart, code
    out = "int32" if dtype == "int8" else "float32"
    args = {"A": data((m, 2 * k), dtype, 1), "B": data((n, 2 * k), dtype, 2), "C": empty((m, n), out)}
    agree(kernel, args, arch="sm_80")
