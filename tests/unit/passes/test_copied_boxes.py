"""Loops of T.Parallel in T.Pipelined that only copy a box of a tensor: as T.copy's they run ahead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.unit.cuda.emulated import agree, data, empty, lowered
from tilescale.compiler.checks.run import check
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.compiler.passes.schedule import AHEAD, ROLES


def product(M: int, N: int, K: int, stages: int = 3) -> Any:
    """C = A · B, whose tiles come by loops of T.Parallel."""

    @T.prim_func
    def kernel(
        A: T.Tensor((M, K), "bfloat16"), B: T.Tensor((K, N), "bfloat16"), C: T.Tensor((M, N), "float32")
    ):
        with T.Kernel(T.ceildiv(N, 64), T.ceildiv(M, 64), threads=128) as (bx, by):
            a, b = T.alloc_shared((64, 64), "bfloat16"), T.alloc_shared((64, 64), "bfloat16")
            c = T.alloc_fragment((64, 64), "float32")
            T.clear(c)
            for k in T.Pipelined(T.ceildiv(K, 64), num_stages=stages):
                for i, j in T.Parallel(64, 64):
                    a[i, j] = A[by * 64 + i, k * 64 + j]
                for i, j in T.Parallel(64, 64):
                    row = k * 64 + i
                    b[i, j] = B[row, bx * 64 + j]
                T.gemm(a, b, c)
            T.copy(c, C[by * 64, bx * 64])

    return kernel


@pytest.mark.parametrize(
    "arch, form, word", [("sm_90a", ROLES, "ts::tma_load(&a"), ("sm_80", AHEAD, "ts::cp_async<16>(&a")]
)
@pytest.mark.parametrize("shape", [(64, 64, 256), (72, 40, 200)], ids=str)
def test_products(shape: tuple[int, int, int], arch: str, form: str, word: str):
    M, N, K = shape
    kernel = product(M, N, K)
    made = lowered(kernel, arch)
    assert [(r.form, r.depth) for r in made.program.schedule.rings] == [(form, 3)]
    assert word in print_kernel(made.kernel).text
    args = {
        "A": data((M, K), "bfloat16", 1),
        "B": data((K, N), "bfloat16", 2),
        "C": np.full((M, N), np.nan, "float32"),
    }
    agree(kernel, args, arch=arch)


def test_what_the_simulator_says_is_of_the_loop():
    """The schedule of the copies leaves the bits of the program as it was written."""
    kernel = product(64, 64, 192)
    args = {
        "A": data((64, 192), "bfloat16"),
        "B": data((192, 64), "bfloat16"),
        "C": empty((64, 64), "float32"),
    }
    report = check(kernel, 1, args, level="both", arch="sm_90a", seeds=2)
    assert report, report


def rows(
    fill: Callable[[Any, Any, Any], None], tile: tuple[int, ...], tensor: tuple[int, ...] = (256, 32)
) -> Any:
    """Sums tiles that ``fill(tile, tensor, round)`` fills from a tensor of rows."""

    @T.prim_func
    def kernel(A: T.Tensor(tensor, "float32"), B: T.Tensor(tile, "float32")):
        with T.Kernel(1, threads=128):
            a, total = T.alloc_shared(tile, "float32"), T.alloc_fragment(tile, "float32")
            T.clear(total)
            for k in T.Pipelined(3, num_stages=2):
                fill(a, A, k)
                for i, j in T.Parallel(*tile):
                    total[i, j] += a[i, j] * (k + 1)
            T.copy(total, B)

    return kernel


@T.macro
def shifted(a: Any, A: Any, k: Any):
    for i, j in T.Parallel(16, 32):
        a[i, j] = A[k * 112 + i - 8, j]


@T.macro
def wide(a: Any, A: Any, k: Any):
    for i, j in T.Parallel(16, 32):
        a[i, j] = A[T.cast(k * 100, "int64") + T.cast(i, "int64"), T.cast(j, "int64")]


@T.macro
def by_columns(a: Any, A: Any, k: Any):
    for j, i in T.Parallel(32, 16):
        a[i, j] = A[k * 16 + i, j]


@T.macro
def of_three_axes(a: Any, A: Any, k: Any):
    for i, o, j in T.Parallel(16, 1, 32):
        a[i, j] = A[k * 16 + i, o + 1, j]


@T.macro
def turned(a: Any, A: Any, k: Any):
    for i, j in T.Parallel(16, 32):
        a[i, j] = A[k * 16 + j, i]


@T.macro
def every_other(a: Any, A: Any, k: Any):
    for i, j in T.Parallel(16, 32):
        a[i, j] = A[k * 16 + i * 2, j]


@T.macro
def one_row(a: Any, A: Any, k: Any):
    for i, j in T.Parallel(16, 32):
        a[i, j] = A[k, j]


@T.macro
def scaled(a: Any, A: Any, k: Any):
    for i, j in T.Parallel(16, 32):
        a[i, j] = A[k * 16 + i, j] * 2


@pytest.mark.parametrize(
    "fill, tensor",
    [(shifted, (256, 32)), (wide, (256, 32)), (by_columns, (256, 32)), (of_three_axes, (256, 3, 32))],
    ids=["shifted", "wide", "by_columns", "of_three_axes"],
)
def test_boxes(fill: Any, tensor: tuple[int, ...]):
    """Rows outside of the tensor are zero; loops may stand in any order."""
    kernel = rows(fill, (16, 32), tensor)
    (ring,) = lowered(kernel).program.schedule.rings
    assert (ring.form, ring.depth) == (ROLES, 2)
    agree(kernel, {"A": data(tensor, "float32"), "B": np.full((16, 32), np.nan, "float32")})


@pytest.mark.parametrize(
    "fill", [turned, every_other, one_row, scaled], ids=["turned", "every_other", "one_row", "scaled"]
)
def test_what_is_no_box_is_no_copy(fill: Any):
    """Threads do it, or copies of single rows."""
    kernel = rows(fill, (16, 32))
    assert all(r.form != ROLES for r in lowered(kernel).program.schedule.rings)
    agree(kernel, {"A": data((256, 32), "float32"), "B": np.full((16, 32), np.nan, "float32")})


def test_the_author_says_who_copies():
    """A layout of the loop is a word about threads; a bound on what they move is one on cp.async."""

    def summed(asked: bool) -> Any:
        @T.prim_func
        def kernel(A: T.Tensor((48, 32), "float32"), B: T.Tensor((16, 32), "float32")):
            with T.Kernel(1, threads=64):
                a, total = T.alloc_shared((16, 32), "float32"), T.alloc_fragment((16, 32), "float32")
                T.clear(total)
                for k in T.Pipelined(3, num_stages=2):
                    if asked:
                        owner = T.Fragment((16, 32), forward_fn=lambda i, j: (i * 4 + j // 8, j % 8))
                        for i, j in T.Parallel(16, 32, loop_layout=owner):
                            a[i, j] = A[k * 16 + i, j]
                    else:
                        for i, j in T.Parallel(16, 32, coalesced_width=2):
                            a[i, j] = A[k * 16 + i, j]
                    for i, j in T.Parallel(16, 32):
                        total[i, j] += a[i, j]
                T.copy(total, B)

        return kernel

    args = {"A": data((48, 32), "float32"), "B": empty((16, 32), "float32")}
    assert "cp_async" not in print_kernel(lowered(summed(True), "sm_80").kernel).text
    assert "ts::cp_async<8>" in print_kernel(lowered(summed(False), "sm_80").kernel).text
    for asked in (True, False):
        agree(summed(asked), args, arch="sm_80")
