"""Which results leave by TMA: on emulated threads against the simulator."""

from __future__ import annotations

from typing import Any

import pytest

import tilescale.language as T
from tests.unit.cuda.emulated import agree, data, empty, lowered
from tilescale.compiler.cuda.printer import print_kernel


def product(result: Any, wide: int = 64) -> Any:
    """A GEMM whose ``result(acc, C, bx, by)`` writes its tile of ``wide`` columns."""

    @T.prim_func
    def kernel(
        A: T.Tensor((128, 64), "float16"),
        B: T.Tensor((64, 2 * wide), "float16"),
        C: T.Tensor((128, 2 * wide), "float16"),
    ):
        with T.Kernel(2, 2, threads=128) as (bx, by):
            a, b = T.alloc_shared((64, 32), "float16"), T.alloc_shared((32, wide), "float16")
            acc = T.alloc_fragment((64, wide), "float32")
            T.clear(acc)
            for k in T.Pipelined(2, num_stages=2):
                T.copy(A[by * 64, k * 32], a)
                T.copy(B[k * 32, bx * wide], b)
                T.gemm(a, b, acc)
            result(acc, C, bx, by)

    return kernel


@T.macro
def bound(acc, C, bx, by):
    col = bx * 64
    twice = col * 2
    T.copy(acc, C[by * 64, twice - col])


@T.macro
def branches(acc, C, bx, by):
    if bx > by:
        for i, j in T.Parallel(64, 64):
            acc[i, j] = acc[i, j] * 2
        T.copy(acc, C[by * 64, bx * 64])
    else:
        T.copy(acc, C[by * 64, bx * 64])


@T.macro
def twice(acc, C, bx, by):
    T.copy(acc, C[by * 64, bx * 64])
    if bx > by:
        T.copy(acc, C[by * 64, bx * 64])


@T.macro
def aside(acc, C, bx, by):
    T.copy(acc, C[by * 64, bx * 64 - 60])


@pytest.mark.parametrize(
    "result, stores",
    [(bound, 1), (branches, 2), (twice, 2), (aside, 0)],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_who_stores(result: Any, stores: int):
    """A name that stands for a column; a tensor that two branches write, or two statements one behind the
    other; not a place that is no multiple of 16 bytes."""
    kernel = product(result)
    assert print_kernel(lowered(kernel).kernel).text.count("ts::tma_store(") == stores
    args = {
        "A": data((128, 64), "float16", 1),
        "B": data((64, 128), "float16", 2),
        "C": empty((128, 128), "float16"),
    }
    for seed in (0, 1):
        agree(kernel, args, seed=seed)


@pytest.mark.parametrize("wide, stores", [(32, 1), (48, 3), (80, 5), (24, 0)])
def test_columns_of_a_narrower_swizzle(wide: int, stores: int):
    """Boxes of 64 or 32 bytes where 128 do not divide the columns; threads store what no box divides."""

    @T.macro
    def plain(acc, C, bx, by):
        T.copy(acc, C[by * 64, bx * wide])

    kernel = product(plain, wide)
    assert print_kernel(lowered(kernel).kernel).text.count("ts::tma_store(") == stores
    agree(
        kernel,
        {
            "A": data((128, 64), "float16", 1),
            "B": data((64, 2 * wide), "float16", 2),
            "C": empty((128, 2 * wide), "float16"),
        },
    )


@pytest.mark.parametrize("first, by_tma", [(8, True), (4, False)])
def test_where_a_box_begins(first: int, by_tma: bool):
    """TMA reads from multiples of 16 bytes of a row alone: elsewhere it is an illegal instruction, and
    threads copy."""

    @T.prim_func
    def kernel(
        A: T.Tensor((64, 80), "float16"), B: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float32")
    ):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((64, 32), "float16"), T.alloc_shared((32, 64), "float16")
            acc = T.alloc_fragment((64, 64), "float32")
            T.clear(acc)
            for k in T.Pipelined(2, num_stages=2):
                at = k * 32 + first
                T.copy(A[0, at], a)
                T.copy(B[k * 32, 0], b)
                T.gemm(a, b, acc)
            T.copy(acc, C)

    made = lowered(kernel)
    assert ("ts::tma_load(" in print_kernel(made.kernel).text) == by_tma
    assert (
        by_tma
        or "the first column of A's tile is not known to be a multiple of 16 bytes" in made.program.notes[0]
    )
    agree(
        kernel,
        {
            "A": data((64, 80), "float16", 1),
            "B": data((64, 64), "float16", 2),
            "C": empty((64, 64), "float32"),
        },
    )
