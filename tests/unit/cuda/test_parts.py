"""Reductions across warps of threads that have many neighbouring elements of the result: lanes share them out,
and every sum of the warps' parts is made once."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.unit.cuda.emulated import agree, data, empty, lowered
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.compiler.layout.shared import bank_conflicts


def columns(rows: int, wide: int, dtype: str, op: str, clear: bool, threads: int = 256) -> Any:
    """B = the reduction of A along its first axis, of which ``clear`` says whether it begins anew."""

    @T.prim_func
    def kernel(
        A: T.Tensor((rows, wide), dtype), B: T.Tensor((wide,), "float32"), C: T.Tensor((wide,), "float32")
    ):
        with T.Kernel(1, threads=threads):
            a, b = T.alloc_fragment((rows, wide), dtype), T.alloc_fragment((wide,), "float32")
            T.copy(A, a)
            T.fill(b, 3.0)
            T.reduce(a, b, op, dim=0, clear=clear)
            T.copy(b, B)
            T.copy(b, C)

    return kernel


@pytest.mark.parametrize(
    "rows, wide, dtype, threads",
    [
        (64, 128, "float8_e5m2", 256),
        (64, 128, "bfloat16", 128),
        (50, 96, "float8_e5m2", 192),
        (32, 256, "float16", 256),
        (64, 512, "float8_e5m2", 1024),
    ],
)
@pytest.mark.parametrize("op, clear", [("sum", True), ("sum", False), ("max", False)])
def test_parts_of_neighbours(rows: int, wide: int, dtype: str, threads: int, op: str, clear: bool):
    args = {
        "A": data((rows, wide), dtype, scale=2),
        "B": empty((wide,), "float32"),
        "C": empty((wide,), "float32"),
    }
    agree(columns(rows, wide, dtype, op, clear, threads), args)


def test_lanes_share_out_what_they_store():
    """16 sums of each of 8 lanes: 8 + 4 shuffles, not 32, and one vector; all threads store, into different
    banks. Then a thread each adds the warps' parts, and all read vectors from different banks again."""
    text = print_kernel(lowered(columns(64, 128, "float8_e5m2", "sum", False)).kernel).text
    assert text.count("ts::shuffle_xor") == 2 and "u < 8; ++u" in text and "u < 4; ++u" in text
    put, got = (
        next(at for line in text.splitlines() if (at := re.search(pattern, line)))
        for pattern in (r"^\s*\*\(uint4\*\)&b_parts\[(.*)\] = ", r"\(const uint4\*\)&b_total\[(.*)\];")
    )
    warp = np.arange(32)
    i = lambda u0: u0 * 4 + (warp & 7) * 16  # noqa: E731
    for place in (eval(put[1], {"tid": warp}), *(eval(got[1], {"i": i(u0)}) for u0 in range(4))):
        assert bank_conflicts(place * 4, 16) == 0


def test_few_elements_are_read_by_all():
    """Of a row a thread has one sum: one barrier less is worth more than what it reads."""
    assert "b_total" not in print_kernel(lowered(columns(64, 32, "float32", "sum", True)).kernel).text


@pytest.mark.parametrize("each", [12, 24, 48])
def test_shares_are_whole_vectors(each: int):
    """Four lanes share out 24 neighbours by halves of 12, which they halve no more; 12 they all have, of which
    one stores them. 48 are more than registers should hold at once."""
    wide = 8 * each
    layout = T.Fragment(
        (64, wide), lambda i, j: (i % 4 * 8 + i // 4 % 2 * 32 + j // each, i // 8 * each + j % each)
    )

    @T.prim_func
    def kernel(A: T.Tensor((64, wide), "float32"), B: T.Tensor((wide,), "float32")):
        with T.Kernel(1, threads=64):
            a, b = T.alloc_fragment((64, wide), "float32"), T.alloc_fragment((wide,), "float32")
            T.annotate_layout({a: layout})
            T.copy(A, a)
            T.reduce_sum(a, b, dim=0)
            T.copy(b, B)

    agree(kernel, {"A": data((64, wide), "float32"), "B": empty((wide,), "float32")})
    text = print_kernel(lowered(kernel).kernel).text
    assert (f"float totals[{each}]" in text) == (each < 48), text
