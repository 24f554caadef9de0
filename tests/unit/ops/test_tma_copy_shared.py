"""Copies by TMA that blocks of a cluster share, and those that several threads issue."""

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

ROUNDS, STAGES = 5, 2


def shared(
    mask: int = 0b11,
    *,
    blocks: int = 2,
    free: bool = True,
    wait: bool = True,
    fence: bool = True,
    told: Any = None,
) -> Any:
    """Stages that the first block of a mask brings to all of it. Every block tells those that may write its
    stages when it has read one; who is in no mask copies its own."""

    @T.prim_func
    def kernel(A: T.Tensor((ROUNDS, 16, 32), "float32"), C: T.Tensor((blocks, ROUNDS, 16, 32), "float32")):
        with T.ClusterKernel(blocks, threads=64, cluster_dims=blocks) as bx:
            stages = T.alloc_shared((STAGES, 16, 32), "float32")
            full = T.alloc_barrier([64] * STAGES)
            empty_ = T.alloc_cluster_barrier([64 * blocks] * STAGES)
            for k in T.serial(ROUNDS):
                s = k % STAGES
                if free:
                    T.mbarrier_wait_parity(empty_[s], k // STAGES % 2 ^ 1)
                if told is not None:
                    T.mbarrier_expect_tx(full[s], told)
                T.tma_copy(A[k, :, :], stages[s, :, :], barrier=full[s], cluster_mask=mask)
                T.mbarrier_arrive(full[s])
                if wait:
                    T.mbarrier_wait_parity(full[s], k // STAGES % 2)
                for i, j in T.Parallel(16, 32):
                    C[bx, k, i, j] = stages[s, i, j] * 2.0
                if fence:
                    T.fence_proxy_async()
                for other in T.serial(blocks):
                    T.mbarrier_arrive(empty_[s], other)

    return kernel


def args(blocks: int = 2) -> dict[str, Any]:
    a = np.arange(ROUNDS * 16 * 32, dtype=np.float32).reshape(ROUNDS, 16, 32)
    return {"A": a, "C": empty((blocks, ROUNDS, 16, 32), "float32")}


@pytest.mark.parametrize(("mask", "blocks"), [(0b11, 2), (0b10, 2), (0b0110, 4), (0b1111, 4), (1, 2)])
def test_every_block_has_the_tiles(mask: int, blocks: int):
    kernel = shared(mask, blocks=blocks)
    for seed in (0, 1):
        got = agree(kernel, args(blocks), exact=True, seed=seed)
        np.testing.assert_array_equal(got["C"], np.broadcast_to(args()["A"] * 2, got["C"].shape))
    assert (report := kernel.check(args=args(blocks), seeds=3)), report


def test_levels_agree():
    assert (report := check(shared(), 1, args(), seeds=2, level="both", arch="sm_90a")), report


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ({"free": False}, "race"),
        ({"wait": False}, "race"),
        ({"fence": False}, "schedule"),
        ({"told": 16 * 32 * 2}, "schedule"),
        ({"told": 16 * 32 * 8}, "deadlock"),
    ],
)
def test_faults_are_named(fault: dict[str, Any], kind: str):
    report = shared(**fault).check(args=args(), seeds=8)
    assert any(f.kind == kind for f in report.findings), report


def _named(name: str, what: str) -> bool:
    return name in (what, f"{what}_cluster")


@pytest.mark.parametrize(
    "fault",
    [
        lambda n, a: None if n == "ts::mbarrier_wait_cluster" else ...,
        lambda n, a: None if n == "ts::mbarrier_wait" else ...,
        lambda n, a: None if n == "ts::fence_proxy_async" else ...,
        lambda n, a: None if n == "ts::mbarrier_expect_tx" else ...,
    ],
    ids=["a stage that is not free", "a stage that is not full", "no proxy fence", "no bytes are expected"],
)
def test_faults_are_found_on_emulated_threads(fault: Any):
    made, program = lowered(shared())
    broken = edited(made, fault)
    for seed in range(8):
        try:
            got = emulator.run(broken, program, args(), seed)["C"]
        except emulator.EmulationError:
            return
        if not (got == args()["A"] * 2).all():
            return
    pytest.fail("no schedule shows it")


def per_warp(threads: int, width: int, scope: Any = None) -> Any:
    """Each warp, or group of warps, copies a row and waits for it alone."""
    groups = threads // width

    @T.prim_func
    def kernel(A: T.Tensor((16, 64), "float32"), C: T.Tensor((16,), "float32")):
        with T.Kernel(16 // groups, threads=threads) as bx:
            t = T.get_thread_binding()
            g = t // width
            rows = T.alloc_shared((groups, 64), "float32")
            b = T.alloc_barrier([width] * groups)
            T.tma_copy(
                A[bx * groups + g, 0:64], rows[g, 0:64], barrier=b[g], leader_scope_threads=scope or width
            )
            T.mbarrier_arrive(mbarrier=b[g])
            T.mbarrier_wait_parity(mbarrier=b[g], parity=0)
            if t % width == 0:
                C[bx * groups + g] = rows[g, 0] + rows[g, 63]

    return kernel


@pytest.mark.parametrize(("threads", "width"), [(128, 32), (256, 64)])
def test_each_warp_copies_a_row(threads: int, width: int):
    a = np.arange(16 * 64, dtype=np.float32).reshape(16, 64)
    given = {"A": a, "C": empty((16,), "float32")}
    for seed in (0, 1):
        got = agree(per_warp(threads, width), given, exact=True, seed=seed)
        np.testing.assert_array_equal(got["C"], a[:, 0] + a[:, 63])
    assert (report := per_warp(threads, width).check(args=given, seeds=2)), report
    text = printed(per_warp(threads, width))
    mask = width - 1
    assert f"& {mask}) == 0" in text and text.count("ts::tma_load(") == 1


def test_one_thread_of_the_block():
    """All threads: as without the word."""

    def kernel(**words: Any) -> Any:
        @T.prim_func
        def kernel(A: T.Tensor((8, 64), "float32"), C: T.Tensor((8, 64), "float32")):
            with T.Kernel(1, threads=64):
                tile, b = T.alloc_shared((8, 64), "float32"), T.alloc_barrier(64)
                T.tma_copy(A, tile, barrier=b, **words)
                T.mbarrier_arrive(b)
                T.mbarrier_wait_parity(b, 0)
                T.copy(tile, C)

        return kernel

    without, whole = (printed(kernel(**w)).split("extern")[1] for w in ({}, {"leader_scope_threads": 64}))
    assert without == whole


def test_the_text():
    text = printed(shared())
    assert "ts::tma_load_multicast(" in text and "ts::tma_load(" not in text
    assert text.count("ts::cluster_sync();") == 2
    both = printed(shared(0b0110, blocks=4))
    assert "ts::tma_load_multicast(" in both and "ts::tma_load(" in both
    with pytest.raises(TileSyntaxError, match="sm_90"):
        printed(shared(), "sm_80")
    with pytest.raises(TileSyntaxError, match="not there on the cpu target"):
        run(shared())


def one(act: Any) -> Any:
    @T.prim_func
    def kernel(A: T.Tensor((8, 64), "float32")):
        with T.ClusterKernel(2, threads=128, cluster_dims=2):
            act(A, T.alloc_shared((8, 64), "float32"), T.alloc_barrier(1))

    return kernel


@pytest.mark.parametrize(
    ("act", "kind", "message", "expected"),
    [
        (lambda A, t, b: T.tma_copy(A, t, b, cluster_mask=4), TileValueError, "cluster_mask=4 of T.tma_copy", "1 to 0b11"),
        (lambda A, t, b: T.tma_copy(A, t, b, cluster_mask=0), TileValueError, "cluster_mask=0", "1 to 0b11"),
        (lambda A, t, b: T.tma_copy(t, A, cluster_mask=3), TileTypeError, "into a tensor with cluster_mask=", "blocks of the cluster share"),
        (lambda A, t, b: T.tma_copy(A, t, b, leader_scope_threads=48), TileValueError, "leader_scope_threads=48", "a multiple of 32"),
        (lambda A, t, b: T.tma_copy(A, t, b, leader_scope_threads=256), TileValueError, "of 128 threads", "a multiple of 32"),
    ],
)  # fmt: skip
def test_refused(act: Any, kind: Any, message: str, expected: str):
    with refused(kind, message, expected=expected):
        one(act).trace()


def test_a_leader_inside_a_warpgroup_is_refused():
    def act(A: Any, t: Any, b: Any) -> None:
        with T.Scale("warpgroup"):
            T.tma_copy(A, t, b, leader_scope_threads=32)

    with refused(TileSyntaxError, "in a warpgroup", write='T.Scale("warp")'):
        one(act).trace()


@pytest.mark.skipif(toolchain.find_nvcc() is None, reason="there is no nvcc on this machine")
@pytest.mark.parametrize("kernel", [shared(), shared(0b0110, blocks=4), per_warp(128, 32)])
def test_nvcc_takes_it(kernel: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TILESCALE_CUDA_COMPILER", "nvcc")
    toolchain.compile_cubin(print_kernel(lowered(kernel)[0]), "sm_90a")
