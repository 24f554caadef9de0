"""Atomic operations and memory that nothing has written."""

from __future__ import annotations

import numpy as np
import pytest

import tilescale.language as T
from tilescale.compiler.checks.run import check, launch

KINDS = {"add": T.atomic_add, "max": T.atomic_max, "min": T.atomic_min}


def updating(kind: str):
    @T.prim_func
    def main(A: T.Tensor((4,), "float32"), O: T.Tensor((2,), "float32")):
        with T.Kernel(4) as b:
            KINDS[kind](O[0], A[b])

    return main


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", ["nothing", "masked", "zeros"])
def test_an_update_reads(kind: str, given: str):
    zeros = np.zeros(2, np.float32)
    args = {"nothing": {}, "masked": {"O": np.ma.MaskedArray(zeros, [True, False])}, "zeros": {"O": zeros}}[
        given
    ]
    report = check(updating(kind), 1, args, seeds=3)
    if given == "zeros":
        assert report, report
    else:
        (found,) = report.findings
        assert (
            found.kind == "uninitialised"
            and found.where.what == f"T.atomic_{kind}"
            and found.where.region == "O[0]"
        )


@pytest.mark.parametrize("clear", [False, True])
@pytest.mark.parametrize("scale", ["block", "warp"])
def test_a_shared_tile_without_a_clear(scale: str, clear: bool):
    @T.prim_func
    def main(A: T.Tensor((32,), "float32"), B: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=64):
            bins = T.alloc_shared((4,), "float32")
            if clear:
                T.clear(bins)
            with T.Scale(scale):
                for i in T.Parallel(32):
                    T.atomic_add(bins[i % 4], A[i])
            T.copy(bins, B)

    report = check(main, 1, seeds=3)
    assert report.kinds == (set() if clear else {"uninitialised"}), report


def test_a_tile_added_to_unwritten_memory():
    @T.prim_func
    def main(A: T.Tensor((8,), "float32"), B: T.Tensor((8,), "float32")):
        with T.Kernel(2):
            T.atomic_add(B[0:8], A[0:8])

    (found,) = check(
        main, 1, {"B": np.ma.MaskedArray(np.zeros(8, np.float32), np.arange(8) >= 6)}, seeds=3
    ).findings
    assert found.kind == "uninitialised" and found.where.region == "B[6:8]"


def test_a_store_writes_and_a_load_does_not():
    @T.prim_func
    def main(store: T.int32, O: T.Tensor((2,), "int32"), B: T.Tensor((1,), "int32")):
        with T.Kernel(1):
            if store == 1:
                T.atomic_store(O[0], 7)
            B[0] = T.atomic_load(O[0])

    made = launch(main, 1, {"store": 1})
    assert made.report and made.arrays[0]["B"][0] == 7, made.report
    assert made.unwritten[0]["O"].tolist() == [False, True]
    made = launch(main, 1, {"store": 0})
    (found,) = made.report.findings
    assert found.kind == "uninitialised" and found.where.what == "T.atomic_load"
    assert made.unwritten[0]["O"].all()


@pytest.mark.parametrize("schedule", ["round_robin", "random", "adversary"])
def test_a_clear_that_nothing_orders_is_a_race(schedule: str):
    @T.prim_func
    def main(A: T.Tensor((4,), "float32"), O: T.Tensor((1,), "float32")):
        with T.Kernel(4) as b:
            if b == 3:
                O[0] = 0
            else:
                T.atomic_add(O[0], A[b])

    assert check(main, 1, schedule=schedule, seeds=5).kinds == {"race"}
