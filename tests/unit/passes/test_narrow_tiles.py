"""Tiles of a pipelined loop into which copies widen: they keep the tensor's dtype, and come through a ring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import tilescale.language as T
from tests.unit.cuda.emulated import agree, data, empty, lowered
from tilescale.compiler.checks.run import check
from tilescale.compiler.ir.text import text as program_text
from tilescale.compiler.passes.schedule import AHEAD, ROLES
from tilescale.layout import make_swizzled_layout

ROUNDS, ROWS, COLUMNS = 5, 8, 64


@T.macro
def by_copy(tile: Any, own: Any, total: Any) -> None:
    T.copy(tile, own)
    for i, j in T.Parallel(ROWS, COLUMNS):
        total[i, j] += own[i, j]


@T.macro
def by_element(tile: Any, own: Any, total: Any) -> None:
    for i, j in T.Parallel(ROWS, COLUMNS):
        total[i, j] += tile[i, j] * tile[i, COLUMNS - 1 - j]


@T.macro
def by_reduction(tile: Any, own: Any, total: Any) -> None:
    sums = T.alloc_fragment((ROWS,), "float32")
    T.reduce_sum(tile, sums, dim=1)
    for i, j in T.Parallel(ROWS, COLUMNS):
        total[i, j] += sums[i]


@T.macro
def written(tile: Any, own: Any, total: Any) -> None:
    for i, j in T.Parallel(ROWS, COLUMNS):
        tile[i, j] = tile[i, j] + 1.0
    T.copy(tile, own)
    for i, j in T.Parallel(ROWS, COLUMNS):
        total[i, j] += own[i, j]


def sums(
    read: Callable[..., Any],
    frm: str = "bfloat16",
    wide: str = "float32",
    threads: int = 64,
    layout: Any = None,
) -> Any:
    """Sums of tiles of a tensor, of which the last lies outside in part."""

    @T.prim_func
    def kernel(A: T.Tensor((ROUNDS * ROWS - 3, COLUMNS), frm), B: T.Tensor((ROWS, COLUMNS), wide)):
        with T.Kernel(1, threads=threads):
            a, own = T.alloc_shared((ROWS, COLUMNS), wide), T.alloc_fragment((ROWS, COLUMNS), wide)
            total = T.alloc_fragment((ROWS, COLUMNS), wide)
            if layout is not None:
                T.annotate_layout({a: layout(a)})
            T.clear(total)
            for k in T.Pipelined(ROUNDS, num_stages=2):
                T.copy(A[k * ROWS, 0], a)
                read(a, own, total)
            T.copy(total, B)

    return kernel


def arguments(frm: str, wide: str) -> dict[str, Any]:
    return {"A": data((ROUNDS * ROWS - 3, COLUMNS), frm, 3), "B": empty((ROWS, COLUMNS), wide)}


@pytest.mark.parametrize("read", [by_copy, by_element], ids=["copy", "element"])
@pytest.mark.parametrize("frm", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("arch, form", [("sm_90a", ROLES), ("sm_80", AHEAD)])
def test_the_tile_is_of_the_tensors_dtype(read: Callable[..., Any], frm: str, arch: str, form: str):
    kernel = sums(read, frm, threads=128)
    program = lowered(kernel, arch).program
    assert [(r.form, r.depth) for r in program.schedule.rings] == [(form, 2)]
    assert f'a = T.alloc_shared((2, {ROWS}, {COLUMNS}), "{frm}"' in program_text(program)
    agree(kernel, arguments(frm, "float32"), arch=arch)


@pytest.mark.parametrize(
    "kernel",
    [
        sums(by_reduction),
        sums(written),
        sums(by_copy, "float16", "bfloat16"),
        sums(by_copy, layout=make_swizzled_layout),
    ],
    ids=["an operation reads it", "something else writes it", "numbers are lost", "a layout of its own"],
)
def test_other_tiles_stay_as_they_are(kernel: Any):
    assert "narrow_tiles" not in lowered(kernel, "sm_90a").program.fired


def test_the_simulator_finds_the_same_bits_at_both_levels():
    report = check(sums(by_copy), 1, arguments("bfloat16", "float32"), level="both", arch="sm_90a", seeds=2)
    assert report, report
