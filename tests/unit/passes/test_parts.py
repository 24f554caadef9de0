"""Several copies in T.Pipelined that fill a tile together: it is a ring's, like one that a single copy fills."""

from __future__ import annotations

from typing import Any

import pytest

import tilescale.language as T
from tests.unit.cuda.emulated import agree, data, empty, lowered
from tilescale.compiler.checks.run import check
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.compiler.passes.schedule import AHEAD, ROLES

M, N = 72, 56


def product(
    parts: list[tuple[slice, slice]],
    K: int = 320,
    cluster: tuple[int, int, int] = (1, 1, 1),
    between: Any = None,
) -> Any:
    """C = A · B, whose left tiles of 64 × 128 are filled part by part."""

    @T.prim_func
    def kernel(
        A: T.Tensor((M, K), "bfloat16"), B: T.Tensor((K, N), "bfloat16"), C: T.Tensor((M, N), "float32")
    ):
        with T.Kernel(2, 2, threads=128, cta_cluster=cluster) as (bx, by):
            a, b = T.alloc_shared((64, 128), "bfloat16"), T.alloc_shared((128, 64), "bfloat16")
            c = T.alloc_fragment((64, 64), "float32")
            T.clear(c)
            for k in T.Pipelined(T.ceildiv(K, 128), num_stages=2):
                for rows, columns in parts:
                    T.copy(A[by * 64 + rows.start, k * 128 + columns.start], a[rows, columns])
                    if between is not None:
                        between(a, c)
                T.copy(B[k * 128, bx * 64], b)
                T.gemm(a, b, c)
            T.copy(c, C[by * 64, bx * 64])

    return kernel


def boxes(rows: tuple[int, ...], columns: tuple[int, ...]) -> list[tuple[slice, slice]]:
    """Between these rows and columns."""
    return [
        (slice(r, s), slice(c, d))
        for r, s in zip(rows, rows[1:], strict=False)
        for c, d in zip(columns, columns[1:], strict=False)
    ]


ROWS, COLUMNS = boxes((0, 16, 64), (0, 128)), boxes((0, 64), (0, 64, 128))
BOTH = boxes((0, 32, 64), (0, 64, 128))
#: a part of rows, and one of columns, that no group of eight rows of 128 bytes ends with
ODD = [boxes((0, 12, 64), (0, 128)), boxes((0, 64), (0, 48, 128))]


@pytest.mark.parametrize("parts", [ROWS, COLUMNS, BOTH], ids=["rows", "columns", "both"])
def test_parts_go_through_a_ring_by_tma(parts: list[tuple[slice, slice]]):
    kernel = product(parts)
    made = lowered(kernel, "sm_90a")
    assert [(r.form, r.depth, r.buffers) for r in made.program.schedule.rings] == [(ROLES, 2, ["a", "b"])]
    boxed = len({(r.start, c) for r, c in [(r, c) for r, s in parts for c in range(s.start, s.stop, 64)]})
    assert print_kernel(made.kernel).text.count("ts::tma_load(&a") == boxed
    args = {
        "A": data((M, 320), "bfloat16", 1),
        "B": data((320, N), "bfloat16", 2),
        "C": empty((M, N), "float32"),
    }
    agree(kernel, args, arch="sm_90a")


@pytest.mark.parametrize(
    "parts, arch", [(ROWS, "sm_80"), (ODD[0], "sm_90a"), (ODD[1], "sm_90a")], ids=["sm_80", "rows", "columns"]
)
def test_others_by_cp_async(parts: list[tuple[slice, slice]], arch: str):
    kernel = product(parts)
    assert [(r.form, r.depth) for r in lowered(kernel, arch).program.schedule.rings] == [(AHEAD, 2)]
    args = {
        "A": data((M, 320), "bfloat16", 1),
        "B": data((320, N), "bfloat16", 2),
        "C": empty((M, N), "float32"),
    }
    agree(kernel, args, arch=arch)


def test_blocks_of_a_cluster_share_parts():
    kernel = product(boxes((0, 32, 64), (0, 128)), 256, cluster=(2, 1, 1))
    text = print_kernel(lowered(kernel, "sm_90a").kernel).text
    assert text.count("ts::tma_load_multicast(&a") == 2
    args = {
        "A": data((M, 256), "bfloat16", 1),
        "B": data((256, N), "bfloat16", 2),
        "C": empty((M, N), "float32"),
    }
    agree(kernel, args, arch="sm_90a")


@T.macro
def reads(a: Any, c: Any) -> None:
    for i, j in T.Parallel(64, 64):
        c[i, j] += T.cast(a[i, j], "float32")


@pytest.mark.parametrize(
    "kernel",
    [
        product(boxes((0, 32, 64), (0, 128)), between=reads),
        product([*ROWS, (slice(0, 8), slice(0, 128))]),
        product(ROWS[1:]),
        product([*ROWS, (slice(0, 64), slice(0, 128))]),
    ],
    ids=["read between them", "some elements twice", "some not at all", "and whole"],
)
def test_other_tiles_have_no_ring(kernel: Any):
    made = lowered(kernel, "sm_90a").program.schedule
    assert not any("a" in r.buffers for r in made.rings)


def test_the_simulator_finds_no_race_at_either_level():
    kernel = product(ROWS, 256)
    args = {"A": data((M, 256), "bfloat16"), "B": data((256, N), "bfloat16"), "C": empty((M, N), "float32")}
    report = check(kernel, 1, args, level="both", arch="sm_90a", seeds=2)
    assert report, report
