"""TileLang's words for a cluster's blocks, the grid's, the launches around a kernel, and how many of its blocks
a multiprocessor holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilescale
import tilescale.language as T
from tests.kernels import refused, run
from tests.unit.cuda.emulated import agree, data, empty
from tests.unit.cuda.test_hopper import lowered
from tests.unit.ops.test_vote import on_all
from tilescale.compiler.cuda import toolchain
from tilescale.compiler.cuda.lower import Lowering
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.compiler.cuda.targets import target
from tilescale.compiler.passes import pipeline
from tilescale.errors import TileSyntaxError, TileValueError


def printed(kernel: Any, arch: str = "sm_90a") -> str:
    program, _ = pipeline.run(kernel.trace(), target(arch))
    return print_kernel(Lowering(program).run()).text


def neighbours(ordered: bool = True) -> Any:
    """Each block reads, behind the barrier, what its neighbour in the cluster wrote."""

    @T.prim_func
    def kernel(C: T.Tensor((8,), "int32"), D: T.Tensor((8,), "int32")):
        with T.ClusterKernel(8, threads=32, cluster_dims=(4, 1, 1)) as bx:
            rank = T.block_rank_in_cluster()
            C[bx] = bx * 10
            if ordered:
                T.cluster_sync()
            D[bx] = C[bx - rank + (rank + 1) % 4]

    return kernel


def test_blocks_of_a_cluster_synchronize():
    args = {"C": empty((8,), "int32"), "D": empty((8,), "int32")}
    got = on_all(neighbours(), args, "D")
    assert got.tolist() == [10, 20, 30, 0, 50, 60, 70, 40]
    assert neighbours().check(args=args, seeds=3)
    report = neighbours(False).check(args=args, seeds=3)
    assert any(f.kind == "race" for f in report.findings), report


def test_blocks_of_the_grid_synchronize():
    @T.prim_func
    def kernel(C: T.Tensor((4,), "int32"), D: T.Tensor((4,), "int32")):
        with T.Kernel(4, threads=32) as bx:
            C[bx] = bx
            T.sync_global()
            D[bx] = C[3 - bx]

    args = {"C": empty((4,), "int32"), "D": empty((4,), "int32")}
    assert kernel.check(args=args, seeds=3)
    run(kernel)(args["C"].copy(), out := args["D"].copy())
    assert out.tolist() == [3, 2, 1, 0]


def chained(*, sync: bool = True, trigger: bool = True) -> Any:
    @T.prim_func
    def kernel(A: T.Tensor((256,), "float32"), C: T.Tensor((256,), "float32")):
        with T.Kernel(2, threads=128) as bx:
            if sync:
                T.pdl_sync()
            for i in T.Parallel(128):
                C[bx * 128 + i] = A[bx * 128 + i] * 2
            if trigger:
                T.pdl_trigger()

    return kernel


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("trigger", [True, False])
def test_launches_that_overlap(sync: bool, trigger: bool):
    kernel = chained(sync=sync, trigger=trigger)
    args = {"A": data((256,), "float32", 1), "C": empty((256,), "float32")}
    got = on_all(kernel, args)
    assert (got == args["A"] * 2).all()
    made, _ = lowered(kernel)
    text = print_kernel(made).text
    assert made.dependent == sync
    assert text.count("ts::await_launches();") == sync
    assert text.count("ts::admit_launches();") == (sync or trigger)
    if trigger and not sync:
        assert text.index("ts::admit_launches") > text.index("C[") and "<ts/dependent.cuh>" in text
    assert "_launches();" not in printed(kernel, "sm_80")


def test_two_launches_of_one_program():
    @T.prim_func
    def kernel(
        A: T.Tensor((256,), "float32"), B: T.Tensor((256,), "float32"), C: T.Tensor((256,), "float32")
    ):
        with T.Kernel(2, threads=128) as bx:
            for i in T.Parallel(128):
                B[bx * 128 + i] = A[bx * 128 + i] + 1
            T.pdl_trigger()
        with T.Kernel(2, threads=128) as by:
            T.pdl_sync()
            for i in T.Parallel(128):
                C[by * 128 + i] = B[by * 128 + i] * 2

    assert [kernel.trace(k).launch.pdl for k in range(2)] == [False, True]
    a, out = data((256,), "float32", 1), empty((256,), "float32")
    tilescale.compile(kernel, target="cpu")(a, empty((256,), "float32"), out)
    assert (out == (a + 1) * 2).all()


def test_blocks_that_a_multiprocessor_holds():
    @T.prim_func
    def kernel(A: T.Tensor((256,), "float32"), C: T.Tensor((256,), "float32")):
        with T.Kernel(2, threads=128) as bx:
            T.annotate_min_blocks_per_sm(2)
            for i in T.Parallel(128):
                C[bx * 128 + i] = A[bx * 128 + i] * 2

    assert "__launch_bounds__(128, 2)" in printed(kernel) and "__launch_bounds__(128, 2)" in printed(
        kernel, "sm_80"
    )
    args = {"A": data((256,), "float32", 1), "C": empty((256,), "float32")}
    assert (on_all(kernel, args) == args["A"] * 2).all()


def test_roles_that_share_out_registers_leave_it_out(monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []
    monkeypatch.setattr("tilescale.log.say", lambda level, text, **_: said.append(text))

    @T.prim_func
    def product(A: T.Tensor((256, 256), "float16"), C: T.Tensor((256, 256), "float32")):
        with T.Kernel(2, 2, threads=128) as (bx, by):
            T.annotate_min_blocks_per_sm(2)
            a, b = T.alloc_shared((128, 64), "float16"), T.alloc_shared((64, 128), "float16")
            c = T.alloc_fragment((128, 128), "float32")
            T.clear(c)
            for k in T.Pipelined(4, num_stages=3):
                T.copy(A[by * 128, k * 64], a)
                T.copy(A[k * 64, bx * 128], b)
                T.gemm(a, b, c)
            T.copy(c, C[by * 128, bx * 128])

    assert ", 1)" in printed(product).split("__launch_bounds__")[1][:12]
    assert any("T.annotate_min_blocks_per_sm(2) decides nothing" in text for text in said), said


def test_an_arrival_that_announces_bytes():
    def kernel(word: bool) -> Any:
        @T.prim_func
        def loads(A: T.Tensor((64, 64), "float32"), C: T.Tensor((64, 64), "float32")):
            with T.Kernel(1, threads=128):
                a = T.alloc_shared((64, 64), "float32")
                full = T.alloc_barrier(128)
                if word:
                    T.mbarrier_arrive_expect_tx(full[0], 64 * 64 * 4)
                else:
                    T.mbarrier_expect_tx(full[0], 64 * 64 * 4)
                    T.mbarrier_arrive(full[0])
                T.tma_copy(A, a, barrier=full[0])
                T.mbarrier_wait_parity(full[0], 0)
                T.copy(a, C)

        return loads

    args = {"A": data((64, 64), "float32", 1), "C": empty((64, 64), "float32")}
    texts = [print_kernel(lowered(kernel(word))[0]).text for word in (True, False)]
    assert texts[0].count("ts::mbarrier_expect") == texts[1].count("ts::mbarrier_expect") > 0
    assert np.array_equal(agree(kernel(True), args, exact=True)["C"], args["A"])


def test_what_they_refuse():
    def refuse(kind: Any, message: str, statement: Any, **more: Any) -> None:
        @T.prim_func
        def kernel(A: T.Tensor((64,), "float32")):
            with T.Kernel(1, threads=128):
                for i in T.Parallel(64):
                    A[i] = 0.0
                    statement()

        with refused(kind, message, **more):
            kernel.trace()

    for word in ("cluster_sync", "sync_global", "pdl_sync", "pdl_trigger"):
        refuse(TileSyntaxError, f"T.{word} stands in T.Parallel", getattr(T, word))
    refuse(
        TileValueError,
        "T.annotate_min_blocks_per_sm(0)",
        lambda: T.annotate_min_blocks_per_sm(0),
        expected="blocks",
    )

    @T.prim_func
    def outside(A: T.Tensor((64,), "float32")):
        T.pdl_trigger()
        with T.Kernel(1) as bx:
            A[bx] = 0.0

    with refused(TileSyntaxError, "T.pdl_trigger stands outside T.Kernel"):
        outside.trace()


@pytest.mark.skipif(toolchain.find_nvcc() is None, reason="there is no nvcc on this machine")
def test_nvcc_takes_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TILESCALE_CUDA_COMPILER", "nvcc")
    for kernel in (chained(sync=False), neighbours()):
        toolchain.compile_cubin(print_kernel(lowered(kernel)[0]), "sm_90a")
