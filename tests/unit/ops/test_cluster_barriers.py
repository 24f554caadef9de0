"""Barriers at which threads of other blocks of a cluster arrive."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.kernels import refused, run
from tests.unit.cuda.emulated import agree, empty
from tests.unit.cuda.test_hopper import edited, lowered
from tests.unit.ops.test_blocks_and_launches import printed
from tilescale.compiler import emulator
from tilescale.compiler.checks.run import check
from tilescale.compiler.cuda import toolchain
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.errors import TileSyntaxError, TileTypeError, TileValueError


def gathered(*, arrive: bool = True, wait: bool = True, early: bool = False, count: int = 128) -> Any:
    """The first block of each cluster gets a row of each block in its shared memory, in each round anew; the
    others go on when it has read them."""

    @T.prim_func
    def kernel(C: T.Tensor((3, 8, 32), "int32")):
        with T.ClusterKernel(8, threads=32, cluster_dims=4) as bx:
            rank = T.block_rank_in_cluster()
            rows, own = T.alloc_shared((4, 32), "int32"), T.alloc_shared((1, 32), "int32")
            full, free = T.alloc_cluster_barrier(count), T.alloc_cluster_barrier([32])
            for turn in T.serial(3):
                T.mbarrier_wait_parity(free, (turn & 1) ^ 1)
                for i in T.Parallel(32):
                    own[0, i] = bx * 100 + turn * 1000 + i
                if early:
                    T.mbarrier_arrive(full, 0)
                with T.Scale("cta_cluster"):
                    T.copy(own, rows[rank : rank + 1, :], dst=0)
                if arrive and not early:
                    T.mbarrier_arrive(full, 0)
                if rank == 0:
                    if wait:
                        T.mbarrier_wait_parity(full, turn & 1)
                    T.copy(rows, C[turn, bx : bx + 4, :])
                    for k in T.serial(4):
                        T.mbarrier_arrive(free, k)

    return kernel


def args() -> dict[str, Any]:
    return {"C": empty((3, 8, 32), "int32")}


WANT = (np.arange(3)[:, None, None] * 1000 + np.arange(8)[:, None] * 100 + np.arange(32)).astype(np.int32)


def test_rows_of_all_blocks():
    for seed in (0, 1, 2):
        got = agree(gathered(), args(), exact=True, seed=seed)
        np.testing.assert_array_equal(got["C"], WANT)
    assert (report := gathered().check(args=args(), seeds=5)), report
    assert (report := check(gathered(), 1, args(), seeds=2, level="both", arch="sm_90a")), report


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ({"wait": False}, "race"),
        ({"early": True}, "race"),
        ({"arrive": False}, "deadlock"),
        ({"count": 160}, "deadlock"),
        ({"count": 112}, "schedule"),
    ],
)
def test_faults_are_named(fault: dict[str, Any], kind: str):
    report = gathered(**fault).check(args=args(), seeds=5)
    assert any(f.kind == kind for f in report.findings), report


def _own_scope(name: str, args: Any) -> Any:
    return ("ts::mbarrier_wait", args) if name == "ts::mbarrier_wait_cluster" else ...


def test_the_scope_of_the_wait_matters():
    """A wait at the scope of the block acquires nothing of other blocks."""
    made, program = lowered(gathered())
    changed = edited(made, lambda n, a: None if n == "ts::mbarrier_arrive_at" else ...)
    with pytest.raises(emulator.EmulationError):
        emulator.run(changed, program, args(), 0)
    with pytest.raises(emulator.EmulationError, match="race|ordered|met"):
        emulator.run(edited(made, _own_scope), program, args(), 0)


def test_a_thread_s_own_arrival():
    """One thread of each block arrives, at the block beside it."""

    @T.prim_func
    def kernel(C: T.Tensor((4,), "int32"), D: T.Tensor((4,), "int32")):
        with T.ClusterKernel(4, threads=64, cluster_dims=2) as bx:
            b = T.alloc_cluster_barrier([1, 64])
            t = T.get_thread_binding()
            if t == 0:
                C[bx] = bx + 1
                T.mbarrier_arrive(mbarrier=b[0], cta_id=T.block_rank_in_cluster() ^ 1)
            T.mbarrier_arrive(b[1])
            T.mbarrier_wait_parity(b[1], 0)
            T.mbarrier_wait_parity(b[0], 0)
            if t == 0:
                D[bx] = C[bx ^ 1]

    got = agree(kernel, {"C": empty((4,), "int32"), "D": empty((4,), "int32")}, exact=True)
    assert got["D"].tolist() == [2, 1, 4, 3]


def by_one(scale: str, what: str) -> Any:
    """One thread, or a warp, tells of what all threads of its block wrote (``what``: told), or hears for all of
    them (heard)."""
    alone = what == "told"

    @T.prim_func
    def kernel(C: T.Tensor((4, 2, 64), "int32")):
        with T.ClusterKernel(4, threads=64, cluster_dims=2) as bx:
            rank = T.block_rank_in_cluster()
            rows, own = T.alloc_shared((2, 64), "int32"), T.alloc_shared((1, 64), "int32")
            count = {"thread": 2, "warp": 64}[scale] if alone else 128
            full = T.alloc_cluster_barrier(count)
            for i in T.Parallel(64):
                own[0, 63 - i] = bx * 100 + 63 - i
            with T.Scale("cta_cluster"):
                T.copy(own, rows[rank : rank + 1, :], dst=0)
                T.copy(own, rows[rank : rank + 1, :], dst=1)
            if not alone:
                T.sync_threads()
            for block in T.serial(2):
                if alone and scale == "thread":
                    if T.get_thread_binding() == 0:
                        T.mbarrier_arrive(full, block)
                elif alone:
                    with T.Scale("warp") as (w, n):
                        if w == 1:
                            T.mbarrier_arrive(full, block)
                else:
                    T.mbarrier_arrive(full, block)
            if alone:
                T.mbarrier_wait_parity(full, 0)
            elif scale == "thread":
                if T.get_thread_binding() == 0:
                    T.mbarrier_wait_parity(full, 0)
            else:
                with T.Scale("warp") as (w, n):
                    if w == 1:
                        T.mbarrier_wait_parity(full, 0)
            T.copy(rows, C[bx, :, :])

    return kernel


@pytest.mark.parametrize("what", ["told", "heard"])
@pytest.mark.parametrize("scale", ["thread", "warp"])
def test_one_for_all_threads(scale: str, what: str):
    """The others' writes come before its arrival, and their reads behind its wait, by barriers of the block."""
    kernel, given = by_one(scale, what), {"C": empty((4, 2, 64), "int32")}
    for seed in range(4):
        got = agree(kernel, given, exact=True, seed=seed)
    np.testing.assert_array_equal(got["C"][:, :, 5], [[5, 105], [5, 105], [205, 305], [205, 305]])
    assert (report := kernel.check(args=given, seeds=3)), report
    text = printed(kernel)
    assert ("tells of what all threads did" if what == "told" else "behind T.mbarrier_wait_parity") in text


def test_the_text():
    text = printed(gathered())
    assert "ts::mbarrier_arrive_at(&full[0], 0);" in text and "ts::mbarrier_wait_cluster(&full[0]," in text
    assert text.count("ts::cluster_sync();") == 2  # before a barrier is arrived at, and behind all that do
    with pytest.raises(TileSyntaxError, match="sm_90"):
        printed(gathered(), "sm_80")
    with pytest.raises(TileSyntaxError, match="not there on the cpu target"):
        run(gathered())


def one(act: Any, cluster: int = 2) -> Any:
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32")):
        with T.ClusterKernel(2, threads=32, cluster_dims=cluster) as bx:
            act(T.alloc_cluster_barrier([32, 1]), T.alloc_barrier(1), A)

    return kernel


def test_refused():
    with refused(TileTypeError, "at plain of another block", expected="T.alloc_cluster_barrier"):

        @T.prim_func
        def kernel():
            with T.ClusterKernel(2, threads=32, cluster_dims=2):
                plain = T.alloc_barrier(32)
                T.mbarrier_arrive(plain, 1)

        kernel.trace()
    with refused(
        TileValueError, "cta_id=2 of T.mbarrier_arrive, in a cluster of 2", expected="0 ≤ cta_id < 2"
    ):
        one(lambda b, p, A: T.mbarrier_arrive(b[0], 2)).trace()
    with refused(TileValueError, "cta_id=1", expected="cluster_dims="):
        one(lambda b, p, A: T.mbarrier_arrive(b[0], 1), 1).trace()
    with refused(TileValueError, "T.alloc_cluster_barrier(0)", expected="a number of threads"):
        one(lambda b, p, A: T.alloc_cluster_barrier(0)).trace()

    @T.prim_func
    def beyond():
        with T.ClusterKernel(2, threads=32, cluster_dims=2) as bx:
            b = T.alloc_cluster_barrier(32)
            T.mbarrier_arrive(b, bx + 1)

    report = beyond.check(args={}, seeds=1)
    assert any(f.kind == "no-such-rank" for f in report.findings), report


@pytest.mark.skipif(toolchain.find_nvcc() is None, reason="there is no nvcc on this machine")
def test_nvcc_takes_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TILESCALE_CUDA_COMPILER", "nvcc")
    toolchain.compile_cubin(print_kernel(lowered(gathered())[0]), "sm_90a")
