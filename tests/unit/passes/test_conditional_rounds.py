"""Rounds of T.Pipelined that are one condition: a ring counts those that the condition is for, and the producer
knows it by what the computation cannot change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.unit.cuda.emulated import agree, data, empty, lowered
from tilescale.compiler.checks.run import check
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.compiler.ir import spec
from tilescale.compiler.passes.pipeline import tile_level
from tilescale.compiler.passes.schedule import ROLES, schedule

ROUNDS, S = 6, 32
PLAN: dict[str, Any] = {"roles": ("producer", "consumer"), "by_reader": True}


@T.macro
def put(a: Any, C: Any, t: Any, k: Any) -> None:
    for i in T.Parallel(S):
        C[t, k, i] = a[i]


def chosen(how: str) -> Any:
    """C[t, k] = A[k] where M[t, k] says so, else zero; of two tiles t. ``how``: where the condition comes from.

    "tensor": it is read there. "named": under a name. "held": from a tile that holds the row of M, copied in
    each round of the loop around; "held of all": from one that holds all of M. The others: "summed": that tile
    is changed behind its copy. "late": it holds the row of the tile before. "written": the kernel writes M.
    "part": half of the tile is copied, twice. "looked up": what the tile holds depends on memory."""

    @T.prim_func
    def main(A: T.Tensor((ROUNDS, S), "int32"), M: T.Tensor((2, ROUNDS), "int32"),
             C: T.Tensor((2, ROUNDS, S), "int32")):  # fmt: skip
        with T.Kernel(1, threads=128):
            a = T.alloc_shared((S,), "int32")
            row, rows = T.alloc_fragment((ROUNDS,), "int32"), T.alloc_fragment((2, ROUNDS), "int32")
            T.clear(row) if how == "late" else None
            T.copy(M, rows) if how == "held of all" else None
            for t in T.serial(2):
                if how == "part":
                    for h in range(2):
                        T.copy(M[t, h * 3 : h * 3 + 3], row[h * 3 : h * 3 + 3])
                elif how == "looked up":
                    T.copy(M[M[0, 0], 0:ROUNDS], row)
                elif how not in ("tensor", "named", "written", "held of all", "late"):
                    T.copy(M[t, 0:ROUNDS], row)
                if how == "summed":
                    for i in T.Parallel(ROUNDS):
                        row[i] += 1
                for k in T.Pipelined(ROUNDS, num_stages=3):
                    if how in ("tensor", "written"):
                        if M[t, k] > 0:
                            T.copy(A[k, 0], a)
                            put(a, C, t, k)
                            if how == "written":
                                M[t, (k + 1) % ROUNDS] = 0
                    elif how == "named":
                        there = M[t, k] > 0
                        if there:
                            T.copy(A[k, 0], a)
                            put(a, C, t, k)
                    elif how == "held of all":
                        if rows[t, k] > 0:
                            T.copy(A[k, 0], a)
                            put(a, C, t, k)
                    elif row[k] > 0:
                        T.copy(A[k, 0], a)
                        put(a, C, t, k)
                T.copy(M[t, 0:ROUNDS], row) if how == "late" else None

    return main


def forms(kernel: Any) -> tuple[list[str], list[str]]:
    made = schedule(tile_level(kernel), 3, **PLAN)
    spec.verify(made.func, spec.SCHEDULED, "schedule")
    return [r.form for r in made.schedule.rings], [k.reason for k in made.schedule.kept]


def arguments(seed: int) -> dict[str, Any]:
    g = np.random.default_rng(seed)
    return {
        "A": g.integers(0, 99, (ROUNDS, S), dtype="int32"),
        "M": g.integers(0, 2, (2, ROUNDS), dtype="int32"),
        "C": np.zeros((2, ROUNDS, S), "int32"),
    }


@pytest.mark.parametrize("how", ["tensor", "named", "held", "held of all"])
def test_a_producer_knows_the_condition(how: str):
    assert forms(chosen(how)) == (["roles"], [])
    assert [r.form for r in lowered(chosen(how)).program.schedule.rings] == [ROLES]
    for seed in range(2):
        report = check(chosen(how), 1, arguments(seed), level="both", arch="sm_90a", seeds=2)
        assert report, report


@pytest.mark.parametrize("how", ["summed", "late", "written", "part", "looked up"])
def test_what_may_change_stays_with_the_computation(how: str):
    rings, reasons = forms(chosen(how))
    assert rings == [] and "which the computation may still change" in reasons[0], (rings, reasons)
    report = check(chosen(how), 1, arguments(1), level="both", arch="sm_90a", seeds=2)
    assert report, report


def sparse(cluster: tuple[int, int, int] = (1, 1, 1), rows_alone: bool = False) -> Any:
    """C = A · B of the blocks that a mask names; ``rows_alone``: it says the same for all columns."""

    @T.prim_func
    def kernel(
        A: T.Tensor((128, 256), "bfloat16"), B: T.Tensor((256, 128), "bfloat16"),
        M: T.Tensor((2, 2, 8), "bool"), C: T.Tensor((128, 128), "float32"),
    ):  # fmt: skip
        with T.Kernel(2, 2, threads=128, cta_cluster=cluster) as (bx, by):
            a, b = T.alloc_shared((64, 32), "bfloat16"), T.alloc_shared((32, 64), "bfloat16")
            c, mask = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((8,), "bool")
            T.copy(M[by, 0 if rows_alone else bx, 0:8], mask)
            T.clear(c)
            for k in T.Pipelined(8, num_stages=2):
                if mask[k]:
                    T.copy(A[by * 64, k * 32], a)
                    T.copy(B[k * 32, bx * 64], b)
                    T.gemm(a, b, c)
            T.copy(c, C[by * 64, bx * 64])

    return kernel


@pytest.mark.parametrize(
    "cluster, rows_alone, shared",
    [((1, 1, 1), False, False), ((2, 1, 1), False, False), ((2, 1, 1), True, True)],
)
def test_products_of_some_blocks(cluster: tuple[int, int, int], rows_alone: bool, shared: bool):
    """By TMA, whose copies blocks of a cluster make for each other where all of them make them."""
    kernel = sparse(cluster, rows_alone)
    made = lowered(kernel)
    assert [(r.form, r.depth, r.buffers) for r in made.program.schedule.rings] == [(ROLES, 2, ["a", "b"])]
    assert ("ts::tma_load_multicast(&a" in print_kernel(made.kernel).text) == shared
    args = {
        "A": data((128, 256), "bfloat16", 1),
        "B": data((256, 128), "bfloat16", 2),
        "M": np.random.default_rng(3).integers(0, 2, (2, 2, 8)).astype("bool"),
        "C": empty((128, 128), "float32"),
    }
    agree(kernel, args)


def test_other_loops_keep_their_producer():
    """TMA does not make the copies of the loop under conditions, whose rows are 72 bytes, and does the others."""

    @T.prim_func
    def kernel(
        A: T.Tensor((64, 256), "bfloat16"), B: T.Tensor((256, 64), "bfloat16"), M: T.Tensor((4,), "int32"),
        D: T.Tensor((4, 8, 18), "float32"), C: T.Tensor((64, 64), "float32"), E: T.Tensor((8, 18), "float32"),
    ):  # fmt: skip
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((64, 32), "bfloat16"), T.alloc_shared((32, 64), "bfloat16")
            c, d, e = (
                T.alloc_fragment((64, 64), "float32"),
                T.alloc_shared((8, 18), "float32"),
                T.alloc_fragment((8, 18), "float32"),
            )
            T.clear(c)
            T.clear(e)
            for k in T.Pipelined(8, num_stages=2):
                T.copy(A[0, k * 32], a)
                T.copy(B[k * 32, 0], b)
                T.gemm(a, b, c)
            for k in T.Pipelined(4, num_stages=2):
                if M[k] > 0:
                    T.copy(D[k, 0:8, 0:18], d)
                    for i, j in T.Parallel(8, 18):
                        e[i, j] += d[i, j]
            T.copy(c, C)
            T.copy(e, E)

    assert [(r.form, r.buffers) for r in lowered(kernel).program.schedule.rings] == [(ROLES, ["a", "b"])]
    args = {
        "A": data((64, 256), "bfloat16", 1), "B": data((256, 64), "bfloat16", 2),
        "M": np.array([1, 0, 1, 1], "int32"), "D": data((4, 8, 18), "float32", 3),
        "C": empty((64, 64), "float32"), "E": empty((8, 18), "float32"),
    }  # fmt: skip
    agree(kernel, args)
