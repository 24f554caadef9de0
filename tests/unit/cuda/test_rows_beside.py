"""Copies to other ranks that TMA makes beside their executor (``blocking=False``): where they end, from rings
of warps, and what is no order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.unit.cuda.emulated import agree_on_ranks, data, empty, lowered
from tests.unit.cuda.row_kernels import of_tokens, of_told, spread, told
from tilescale.compiler import emulator
from tilescale.compiler.checks.run import check, launch
from tilescale.compiler.cuda.lower import Lowering
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.compiler.cuda.targets import target
from tilescale.compiler.emulator import EmulationError
from tilescale.compiler.ir.operations import name_of
from tilescale.compiler.passes import pipeline
from tilescale.compiler.tvm_compat import structural_map, tirx
from tilescale.errors import TileError


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("world", [1, 3])
def test_rows_of_a_ring(world: int, stages: int) -> None:
    kernel, args = spread(stages, world), of_tokens(world)
    given = {name: [a[name] for a in args] for name in args[0]}
    report = check(
        kernel, world, given, level="both", seeds=2, depth=stages, roles=("all",), ahead=stages > 1
    )
    assert report, report
    got = launch(kernel, world, given).arrays
    for d in range(world):
        for source, a in enumerate(args):
            there = a["slots"][:, d] >= 0
            rows = got[d]["rows"][source * 23 : source * 23 + there.sum()]
            assert (rows == a["X"][there]).all()
    agree_on_ranks(kernel, [{**a, "rows": empty((world * 23, 64), "float32")} for a in args])


def test_how_they_are_printed() -> None:
    """From a ring a round's rows are a group, awaited a round later; else their reads are where they
    stand."""
    text = printed(spread(3, 2))
    assert text.count("ts::ROWS_BEGUN") == 1 and text.count("ts::bulk_commit()") == 1
    assert text.count("ts::bulk_wait_read<1>()") == 2 and text.count("ts::rows_complete()") == 1
    assert text.index("ts::bulk_commit()") < text.rindex("ts::bulk_wait_read<1>()")
    text = printed(told(2))
    assert text.count("ts::ROWS_READ") == 1 and text.count("ts::rows_complete()") == 2
    assert "rows_complete" not in printed(told(2, late=False))


def scattered(more: str = "") -> Any:
    """A row goes to 40 places of other ranks, more than a warp has lanes; ``more``: each round counts, or
    reads of a fragment whether it puts."""

    @T.prim_func
    def scattered_rows(
        X: T.Tensor((6, 32), "float32"),
        rows: T.SymmTensor((6, 40, 32), "float32"),
        C: T.Tensor((1,), "int32"),
    ):
        with T.Kernel(1, threads=64), T.Scale("device") as (rank, n), T.Scale("warp") as (w, of):
            x, goes = T.alloc_shared((32,), "float32"), T.alloc_fragment((40,), "int32")
            for k in T.Parallel(40):
                goes[k] = k % 7
            for r in T.Pipelined(3, num_stages=2):
                T.copy(X[r * of + w, 0:32], x)
                for k in T.serial(40):
                    there = (rank + k) % n
                    if (goes[k] if more == "fragment" else k % 7) != 3:
                        T.copy(
                            x,
                            rows[r * of + w, k, 0:32],
                            dst=there,
                            prefer_instruction="tma",
                            blocking=False,
                        )
                        if more == "counts":
                            T.atomic_add(C[0], 1)

    return scattered_rows


@pytest.mark.parametrize("more", ["", "counts", "fragment"])
def test_lanes_share_a_loop_that_only_puts(more: str) -> None:
    """Round k is lane k % 32's; a loop that does more is the warp's."""
    text = printed(scattered(more))
    assert ("ts::store_run<1, ts::ROWS_BEGUN>(" in text) == ("ts::enter_all(" in text) == (not more)
    assert ("ts::store_run<32, ts::ROWS_BEGUN>(" in text) == bool(more)
    args = [
        {"X": data((6, 32), "float32", r), "rows": empty((6, 40, 32), "float32"), "C": np.zeros(1, np.int32)}
        for r in range(3)
    ]
    agree_on_ranks(scattered(more), args)


def printed(kernel: Any) -> str:
    return print_kernel(lowered(kernel).kernel).text


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_signal_tells_of_them(world: int) -> None:
    args = of_told(world)
    report = check(told(world), world, {"X": [a["X"] for a in args]}, seeds=3)
    assert report, report
    agree_on_ranks(told(world), args)


def tells(way: str) -> Any:
    """Warps put rows, and one of them tells of all, since the others met it; or the block does."""

    @T.prim_func
    def told_by(
        X: T.Tensor((2, 32), "float32"),
        rows: T.SymmTensor((2, 32), "float32"),
        C: T.SymmTensor((1,), "int32"),
        here: T.Signal((2,)),
        Y: T.Tensor((2, 32), "float32"),
    ):
        with T.Kernel(1, threads=64), T.Scale("device") as (rank, n):
            there = (rank + 1) % n
            if way == "block":
                x = T.alloc_shared((2, 32), "float32")
                T.copy(X, x)
                T.copy(x, rows, dst=there, prefer_instruction="tma", blocking=False)
                T.wait(here[1], 0)  # behind its barrier nothing that the threads did is left to be told of
                T.signal(here[0], dst=there)
            else:
                with T.Scale("warp") as (w, _):
                    y, seen = T.alloc_shared((32,), "float32"), T.alloc_var("int32")
                    T.copy(X[w, 0:32], y)
                    T.copy(y, rows[w, 0:32], dst=there, prefer_instruction="tma", blocking=False)
                    if way == "vote":
                        with T.Scale("thread") as (lane, _):
                            T.syncthreads_count(lane >= 0)
                    else:
                        T.atomic_add(C[0], 1, dst=rank)
                    if w == 1:
                        seen = 0
                        while way == "atomic" and seen < 2:
                            seen = T.atomic_load(C[0], src=rank)
                        T.signal(here[0], dst=there)
            T.wait(here[0], 1)
            T.copy(rows, Y)

    return told_by


@pytest.mark.parametrize("way", ["block", "vote", "atomic"])
def test_whoever_tells_of_them_comes_behind_them(way: str) -> None:
    given = [
        {
            "X": data((2, 32), "float32", r),
            "rows": empty((2, 32), "float32"),
            "C": np.zeros(1, np.int32),
            "here": np.zeros(2, np.int64),
            "Y": empty((2, 32), "float32"),
        }
        for r in range(2)
    ]
    report = check(tells(way), 2, {name: [a[name] for a in given] for name in given[0]}, seeds=3)
    assert report, report
    agree_on_ranks(tells(way), given)


def test_threads_that_update_a_tensor_each_for_itself_meet_behind_the_rows() -> None:
    """Only some of a warp's threads began rows: the update of another one tells of them, too."""

    @T.prim_func
    def counted(
        X: T.Tensor((4, 32), "float32"),
        rows: T.SymmTensor((4, 32), "float32"),
        C: T.Tensor((32,), "int32"),
        Y: T.Tensor((4, 32), "float32"),
    ):
        with T.Kernel(1, threads=64), T.Scale("device") as (rank, n), T.Scale("warp") as (w, _):
            x = T.alloc_shared((2, 32), "float32")
            T.copy(X[2 * w, 0], x)
            T.copy(x, rows[2 * w : 2 * w + 2, 0:32], dst=rank, prefer_instruction="tma", blocking=False)
            for i in T.Parallel(32):
                T.atomic_add(C[i], 1)
            T.copy(rows[2 * w : 2 * w + 2, 0:32], Y[2 * w : 2 * w + 2, 0:32])

    text = printed(counted)
    put, update = text.index("ts::ROWS_READ"), text.index("publishing_add")
    ended = text.index("ts::rows_complete()", put)
    assert put < ended < text.index("__syncwarp()", ended) < update
    args = [
        {
            "X": data((4, 32), "float32", r),
            "rows": empty((4, 32), "float32"),
            "C": np.zeros(32, np.int32),
            "Y": empty((4, 32), "float32"),
        }
        for r in range(2)
    ]
    agree_on_ranks(counted, args)


@T.prim_func
def twice(X: T.Tensor((2, 32), "float32"), rows: T.SymmTensor((32,), "float32")):
    """Which of the two is there in the end?"""
    with T.Kernel(1, threads=32), T.Scale("device") as (rank, n):
        x = T.alloc_shared((32,), "float32")
        for i in T.serial(2):
            T.copy(X[i, 0:32], x)
            T.copy(x, rows, dst=(rank + 1) % n, prefer_instruction="tma", blocking=False)


@T.prim_func
def looks(X: T.Tensor((32,), "float32"), rows: T.SymmTensor((32,), "float32"), Y: T.Tensor((32,), "float32")):
    """A rank reads what it put to itself, too early."""
    with T.Kernel(1, threads=32), T.Scale("device") as (rank, n):
        x = T.alloc_shared((32,), "float32")
        T.copy(X, x)
        T.copy(x, rows, dst=rank, prefer_instruction="tma", blocking=False)
        T.copy(rows, Y)


@pytest.mark.parametrize("kernel", [twice, looks])
def test_what_comes_behind_them_is_unordered(kernel: Any) -> None:
    report = check(kernel, 2, seeds=2)
    assert [f.kind for f in report.findings] == ["race"], report
    assert "goes on beside its executor" in str(report) and "blocking=True of that copy" in str(report)


def test_a_barrier_between_them_is_an_order() -> None:
    @T.prim_func
    def once_more(X: T.Tensor((2, 32), "float32"), rows: T.SymmTensor((32,), "float32")):
        with T.Kernel(1, threads=32), T.Scale("device") as (rank, n):
            x = T.alloc_shared((32,), "float32")
            for i in T.serial(2):
                T.copy(X[i, 0:32], x)
                T.copy(x, rows, dst=(rank + 1) % n, prefer_instruction="tma", blocking=False)
                T.barrier()

    report = check(once_more, 2, seeds=2)
    assert report, report
    args = [{"X": data((2, 32), "float32", r), "rows": empty((32,), "float32")} for r in range(2)]
    agree_on_ranks(once_more, args)


def test_where_threads_copy_they_are_done_where_they_stand() -> None:
    """A row that is no multiple of 16 bytes."""

    @T.prim_func
    def narrow(X: T.Tensor((30,), "float32"), rows: T.SymmTensor((30,), "float32")):
        with T.Kernel(1, threads=32), T.Scale("device") as (rank, n):
            x = T.alloc_shared((30,), "float32")
            T.copy(X, x)
            T.copy(x, rows, dst=(rank + 1) % n, prefer_instruction="tma", blocking=False)

    made = lowered(narrow)
    assert "ts::rows_complete" not in printed(narrow)
    assert any("by threads, not by TMA" in str(n) for n in made.program.notes)
    agree_on_ranks(
        narrow, [{"X": data((30,), "float32", r), "rows": empty((30,), "float32")} for r in range(2)]
    )


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ("await_rows", "shared memory is written while a store"),
        ("sync", "race|fence.proxy.async|store"),
        ("rows_group", "shared memory is written while a store"),
    ],
)
def test_faults_of_rings_are_found(lost: str, said: str) -> None:
    """On the emulated GPU, where one kind of statement is missing."""
    args = [{**a, "rows": empty((2 * 23, 64), "float32")} for a in of_tokens(2)]
    with pytest.raises(EmulationError, match=said):
        run_lacking(lost, spread(2, 2), args)


def test_rows_that_nobody_awaits_before_a_signal_are_found() -> None:
    with pytest.raises(EmulationError, match="race in rows"):
        run_lacking("await_rows", told(2), of_told(2))


def run_lacking(lost: str, kernel: Any, args: list[dict[str, Any]]) -> None:
    """A launch of a kernel without its statements of one kind, under several orders."""

    def without(s: Any) -> Any:
        return tirx.Evaluate(tirx.IntImm("int32", 0)) if name_of(s) == lost else s

    program, _ = pipeline.run(kernel.trace(), target("sm_90a"))
    program = program.with_body(structural_map(program.func.body, (tirx.Evaluate, without)))
    for seed in range(4):
        emulator.run_ranks(Lowering(program).run(), program, args, seed)


def test_what_is_refused() -> None:
    def of(**words: Any) -> None:
        @T.prim_func
        def kernel(X: T.SymmTensor((32,), "float32"), s: T.Signal((1,))):
            with T.Kernel(1, threads=32), T.Scale("device") as (rank, n):
                x = T.alloc_shared((32,), "float32")
                T.clear(x)
                given = {k: (s[0] if k == "signal" else v) for k, v in words.items()}
                T.copy(x, X, prefer_instruction="tma", blocking=False, **given)

        kernel.trace()

    for words, expected in (
        ({}, "a put to another rank"),
        ({"dst": 0, "disable_tma": True}, "neither disable_tma="),
        ({"dst": 0, "signal": 1}, "a signal of its own behind it"),
        ({"dst": 0, "op": "add"}, "the block's own threads"),
    ):
        with pytest.raises(TileError) as refused:
            of(**words)
        assert expected in str(refused.value), (words, str(refused.value))


def test_roles_of_a_block_that_end_leave_them_to_the_block() -> None:
    """On the simulator, where a producer and a consumer go through the loop, and the block goes on."""

    @T.prim_func
    def ring(
        X: T.Tensor((32, 64), "float32"),
        rows: T.SymmTensor((32, 64), "float32"),
        Y: T.Tensor((32, 64), "float32"),
    ):
        with T.Kernel(1, threads=128), T.Scale("device") as (rank, n):
            x = T.alloc_shared((16, 64), "float32")
            for r in T.Pipelined(2, num_stages=2):
                T.copy(X[r * 16, 0], x)
                to = rows[r * 16 : r * 16 + 16, 0:64]
                T.copy(x, to, dst=(rank + 1) % n, prefer_instruction="tma", blocking=False)
            T.barrier()
            T.copy(rows, Y)

    report = check(ring, 2, {"X": [data((32, 64), "float32", r) for r in range(2)]}, level="both", seeds=2)
    assert report, report


def test_a_result_that_two_warpgroups_have_computed() -> None:
    """Rows of a block with a producer, whose consumers meet in front of the signal."""

    @T.prim_func
    def product(
        A: T.Tensor((128, 128), "float16"),
        B: T.Tensor((128, 64), "float16"),
        C: T.SymmTensor((128, 64), "float32"),
        here: T.Signal((1,)),
        Y: T.Tensor((128, 64), "float32"),
    ):
        with T.Kernel(1, threads=256), T.Scale("device") as (rank, n):
            a, b = T.alloc_shared((128, 64), "float16"), T.alloc_shared((64, 64), "float16")
            c, there = T.alloc_fragment((128, 64), "float32"), (rank + 1) % n
            T.clear(c)
            for k in T.Pipelined(2, num_stages=2):
                T.copy(A[0, k * 64], a)
                T.copy(B[k * 64, 0], b)
                T.gemm(a, b, c)
            T.copy(c, C, dst=there, prefer_instruction="tma", blocking=False)
            T.signal(here[0], dst=there)
            T.wait(here[0], 1)
            T.copy(C, Y)

    assert lowered(product).program.schedule.roles == ["producer", "consumer"]
    args = [
        {
            "A": data((128, 128), "float16", r),
            "B": data((128, 64), "float16", r + 2),
            "C": empty((128, 64), "float32"),
            "here": np.zeros(1, np.int64),
            "Y": empty((128, 64), "float32"),
        }
        for r in range(2)
    ]
    agree_on_ranks(product, args)
