"""Blocks of a cluster that arrive at one place and wait at another."""

from __future__ import annotations

from typing import Any

import pytest

import tilescale.language as T
from tests.kernels import refused
from tests.unit.cuda.emulated import agree, data, empty
from tests.unit.cuda.test_hopper import lowered
from tests.unit.ops.test_blocks_and_launches import printed
from tests.unit.ops.test_vote import on_all
from tilescale.compiler.cuda import toolchain
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.errors import TileSyntaxError


def neighbours(*, arrive: str = "cluster_arrive", wait: bool = True, late: bool = False) -> Any:
    """Each block reads, behind the wait, what its neighbour in the cluster wrote: in front of its arrival, or
    (``late``) behind it."""
    word = getattr(T, arrive)

    @T.prim_func
    def kernel(C: T.Tensor((8,), "int32"), D: T.Tensor((8,), "int32")):
        with T.ClusterKernel(8, threads=32, cluster_dims=4) as bx:
            rank = T.block_rank_in_cluster()
            for turn in T.serial(2):
                if not late:
                    C[bx] = bx * 10 + turn
                word()
                if late:
                    C[bx] = bx * 10 + turn
                if wait:
                    T.cluster_wait()
                D[bx] = C[bx - rank + (rank + 1) % 4]
                T.cluster_sync()

    return kernel


def args() -> dict[str, Any]:
    return {"C": empty((8,), "int32"), "D": empty((8,), "int32")}


def test_what_is_written_before_is_read_behind():
    assert on_all(neighbours(), args(), "D").tolist() == [11, 21, 31, 1, 51, 61, 71, 41]
    assert neighbours().check(args=args(), seeds=3)


@pytest.mark.parametrize("fault", [{"late": True}, {"arrive": "cluster_arrive_relaxed"}])
def test_what_no_arrival_releases_is_a_race(fault: dict[str, Any]):
    report = neighbours(**fault).check(args=args(), seeds=3)
    assert any(f.kind == "race" for f in report.findings), report


def test_the_whole_block_comes_and_its_results_are_stored():
    """No producer goes a way of its own, whose threads would not arrive."""

    @T.prim_func
    def product(
        A: T.Tensor((256, 256), "float16"), C: T.Tensor((256, 256), "float16"), D: T.Tensor((4,), "float16")
    ):
        with T.ClusterKernel(2, 2, threads=128, cluster_dims=(2, 1, 1)) as (bx, by):
            a, b = T.alloc_shared((128, 64), "float16"), T.alloc_shared((64, 128), "float16")
            c = T.alloc_fragment((128, 128), "float32")
            T.clear(c)
            for k in T.Pipelined(4, num_stages=3):
                T.copy(A[by * 128, k * 64], a)
                T.copy(A[k * 64, bx * 128], b)
                T.gemm(a, b, c)
            T.copy(c, C[by * 128, bx * 128])
            T.cluster_arrive()
            T.cluster_wait()
            D[by * 2 + bx] = C[by * 128, (1 - bx) * 128]

    given = {
        "A": data((256, 256), "float16", 1), "C": empty((256, 256), "float16"), "D": empty((4,), "float16"),
    }  # fmt: skip
    got = agree(product, given)
    assert (got["D"] == got["C"][[0, 0, 128, 128], [128, 0, 128, 0]]).all() and got["D"].all()
    assert lowered(product)[0].threads == 128


def test_who_is_missed():
    @T.prim_func
    def some(C: T.Tensor((8,), "int32")):
        with T.ClusterKernel(8, threads=32, cluster_dims=4) as bx:
            if bx % 4 > 0:
                T.cluster_arrive()
                T.cluster_wait()
            C[bx] = 1

    @T.prim_func
    def nobody(C: T.Tensor((8,), "int32")):
        with T.ClusterKernel(8, threads=32, cluster_dims=4) as bx:
            T.cluster_wait()
            C[bx] = 1

    for kernel, given, text in (
        (some, {"C": empty((8,), "int32")}, "1 more to come to T.cluster_arrive at T.cluster_wait"),
        (nobody, {"C": empty((8,), "int32")}, "T.cluster_arrive in front of it at T.cluster_wait"),
        (neighbours(wait=False), args(), "T.cluster_wait, of the last time"),
    ):
        report = kernel.check(args=given, seeds=1)
        assert any(f.kind == "deadlock" and text in str(f) for f in report.findings), report


def test_a_cluster_of_one_waits_for_nobody():
    @T.prim_func
    def kernel(C: T.Tensor((4,), "int32")):
        with T.Kernel(4, threads=32) as bx:
            T.cluster_arrive_relaxed()
            T.cluster_wait()
            C[bx] = bx

    assert on_all(kernel, {"C": empty((4,), "int32")}).tolist() == [0, 1, 2, 3]


def test_the_text_and_what_is_refused():
    text = printed(neighbours())
    assert text.index("ts::cluster_arrive();") < text.index("ts::cluster_wait();")
    assert "ts::cluster_arrive_relaxed();" in printed(neighbours(arrive="cluster_arrive_relaxed"))
    with pytest.raises(TileSyntaxError, match="clusters need sm_90"):
        printed(neighbours(), "sm_80")

    @T.prim_func
    def threads(C: T.Tensor((8,), "int32")):
        with T.ClusterKernel(8, threads=32, cluster_dims=4):
            with T.Scale("thread") as (t, n):
                T.cluster_arrive()

    with refused(TileSyntaxError, "T.cluster_arrive stands in a thread", write="T.cluster_sync()"):
        threads.trace()


@pytest.mark.skipif(toolchain.find_nvcc() is None, reason="there is no nvcc on this machine")
def test_nvcc_takes_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TILESCALE_CUDA_COMPILER", "nvcc")
    for arrive in ("cluster_arrive", "cluster_arrive_relaxed"):
        toolchain.compile_cubin(print_kernel(lowered(neighbours(arrive=arrive))[0]), "sm_90a")
