"""Results that leave by TMA beside other writes of their tensor, and beside what blocks tell each other: who
waits for whom."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.unit.cuda.emulated import agree, data, empty
from tests.unit.cuda.test_hopper import lowered
from tilescale.compiler.checks.run import check
from tilescale.compiler.cuda.printer import print_kernel

M, N, K = 128, 128, 64


def products(store: Callable[..., None], rows: int = M) -> Any:
    """Two products, D of A and B, and E of twice A, and what ``store(D, E, C, F)`` makes of them."""

    @T.prim_func
    def main(
        A: T.Tensor((M, K), "bfloat16"),
        B: T.Tensor((K, N), "bfloat16"),
        C: T.Tensor((rows, N), "float32"),
        F: T.Tensor((1,), "int32"),
    ):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((64, 32), "bfloat16"), T.alloc_shared((32, 64), "bfloat16")
            D, E = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64, 64), "float32")
            T.clear(D)
            for k in T.Pipelined(2, num_stages=2):
                T.copy(A[0, k * 32], a)
                T.copy(B[k * 32, 0], b)
                T.gemm(a, b, D)
            for i, j in T.Parallel(64, 64):
                E[i, j] = D[i, j] + 1.0
            store(D, E, C, F)

    return main


@T.macro
def side_by_side(D, E, C, F):
    T.copy(D, C[0, 0])
    T.copy(E, C[0, 64])


@T.macro
def overlapping(D, E, C, F):
    T.copy(D, C[0, 0])
    T.copy(E, C[32, 0])


@T.macro
def then_threads(D, E, C, F):
    T.copy(D, C[0, 0])
    for i, j in T.Parallel(64, 64):
        if i < 20:
            C[i + 40, j] = E[i, j]


@T.macro
def threads_first(D, E, C, F):
    for i, j in T.Parallel(64, 64):
        if i < 20:
            C[i + 40, j] = E[i, j]
    T.copy(D, C[0, 0])


@T.macro
def told(D, E, C, F):
    T.copy(D, C[0, 0])
    T.atomic_add(F[0], 1)


@T.macro
def looked_at(D, E, C, F):
    T.copy(D, C[0, 0])
    for i, j in T.Parallel(64, 64):
        E[i, j] += C[i, j]
    T.copy(E, C[64, 0])


#: what is stored; stores by TMA, waits for complete ones
CASES = [
    (side_by_side, 2, 0),
    (overlapping, 2, 2),
    (then_threads, 1, 1),
    (threads_first, 1, 1),
    (told, 1, 1),
    (looked_at, 0, 0),
]


@pytest.mark.parametrize("store, stores, complete", CASES, ids=lambda x: getattr(x, "__name__", str(x)))
@pytest.mark.parametrize("seed", [0, 1])
def test_stores_and_what_comes_behind_them(store: Any, stores: int, complete: int, seed: int):
    kernel = products(store)
    made, program = lowered(kernel)
    text = print_kernel(made).text
    assert [r.form for r in program.schedule.rings] == ["roles"]
    assert (text.count("ts::tma_store(") // 2, text.count("ts::bulk_wait<0>")) == (stores, complete)
    args = {
        "A": data((M, K), "bfloat16", 1),
        "B": data((K, N), "bfloat16", 2),
        "C": empty((M, N), "float32"),
        "F": np.zeros(1, np.int32),
    }
    args["C"][...] = 0.0
    agree(kernel, args, seed=seed)
    report = check(kernel, 1, args, level="both", seeds=2, arch="sm_90a")
    assert report, report
