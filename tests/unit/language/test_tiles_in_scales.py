"""Tiles that are allocated inside T.Scale: each executor has its own, on the simulator, the CPU and the
emulated GPU alike."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.kernels import refused, run
from tests.unit.cuda.emulated import agree
from tilescale.compiler.checks.run import launch
from tilescale.compiler.cuda.targets import target
from tilescale.compiler.passes.gpu_schedule import gpu_schedule
from tilescale.compiler.passes.pipeline import tile_level
from tilescale.compiler.passes.residency import shared_bytes
from tilescale.compiler.passes.schedule import BELOW
from tilescale.errors import TileSyntaxError


def everywhere(kernel: Any, args: dict[str, Any], want: dict[str, Any]) -> None:
    """The results on all three, to the bit."""
    on_cpu = {name: array.copy() for name, array in args.items()}
    run(kernel)(*on_cpu.values())
    for made in (on_cpu, agree(kernel, args, exact=True)):
        for name, array in want.items():
            np.testing.assert_array_equal(made[name], array)


def numbers(*shape: int) -> Any:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


@T.prim_func
def own_rows(A: T.Tensor((64, 64), "float32"), D: T.Tensor((64, 64), "float32")):
    with T.Kernel(1, threads=256):
        with T.Scale("warpgroup") as (w, n):
            s, f = T.alloc_shared((32, 64), "float32"), T.alloc_fragment((32, 64), "float32")
            T.copy(A[w * 32, 0], s)
            T.sync_threads()  # the others have filled theirs by now
            for i, j in T.Parallel(32, 64):
                f[i, j] = s[31 - i, j]
            T.copy(f, D[w * 32, 0])


def test_a_shared_tile_of_a_warpgroup_is_its_own():
    a = numbers(64, 64)
    everywhere(own_rows, {"A": a, "D": np.zeros_like(a)}, {"D": np.concatenate([a[31::-1], a[:31:-1]])})
    found = own_rows.check(ranks=1, args={"A": a}, seeds=3)
    assert "no finding" in str(found)


def test_the_warps_of_a_warpgroup_share_its_tile():
    @T.prim_func
    def kernel(D: T.Tensor((2, 4, 32), "int32")):
        with T.Kernel(1, threads=256):
            with T.Scale("warpgroup") as (g, n):
                s = T.alloc_shared((4, 32), "int32")
                v = T.view(s, (128,), "int32")
                with T.Scale("warp") as (w, m):
                    T.fill(s[w, 0:32], g * 100 + w)
                    T.sync_threads()
                    f = T.alloc_fragment((32,), "int32")
                    T.copy(s[3 - w, 0:32], f)
                    T.copy(f, D[g, w, 0:32])
                T.sync_threads()
                v[0] = 7
                T.sync_threads()
                D[g, 0, 0] = v[0] + v[1]

    want = (
        np.arange(2)[:, None, None] * 100 + (3 - np.arange(4))[None, :, None] + np.zeros((1, 1, 32))
    ).astype(np.int32)
    want[:, 0, 0] = 7 + np.arange(2) * 100
    everywhere(kernel, {"D": np.zeros((2, 4, 32), np.int32)}, {"D": want})


def test_what_another_executor_left_in_its_own_tile_is_not_seen():
    @T.prim_func
    def kernel(D: T.Tensor((2, 64), "float32")):
        with T.Kernel(1, threads=256):
            with T.Scale("warpgroup") as (w, n):
                s, f = T.alloc_shared((64,), "float32"), T.alloc_fragment((64,), "float32")
                if w == 0:
                    T.fill(s, 7)
                T.sync_threads()
                T.copy(s, f)
                T.copy(f, D[w, 0:64])

    found = str(kernel.check(ranks=1, args={"D": np.zeros((2, 64), np.float32)}, seeds=2))
    assert "s[0:64] is read, and nothing has written it" in found and "warpgroup 1" in found


def test_each_threads_own():
    @T.prim_func
    def kernel(D: T.Tensor((64, 4), "int32")):
        with T.Kernel(1, threads=64):
            with T.Scale("warp") as (w, n):
                with T.Scale("thread") as (t, m):
                    s = T.alloc_shared((4,), "int32")
                    for i in T.serial(4):
                        s[i] = t * 10 + i + w
                    T.sync_threads()
                    for i in T.serial(4):
                        D[w * 32 + t, i] = s[3 - i]

    t = np.arange(64, dtype=np.int32)[:, None]
    everywhere(
        kernel,
        {"D": np.zeros((64, 4), np.int32)},
        {"D": t % 32 * 10 + 3 - np.arange(4, dtype=np.int32) + t // 32},
    )


def test_operations_on_own_tiles_and_the_blocks_behind_them_in_the_same_bytes():
    @T.prim_func
    def kernel(
        A: T.Tensor((128, 32), "float16"), D: T.Tensor((128, 16), "float32"), H: T.Tensor((4, 8), "int32")
    ):
        with T.Kernel(1, threads=128):
            with T.Scale("warp") as (w, n):
                s, t = T.alloc_shared((32, 32), "float16"), T.alloc_shared((32, 32), "float32")
                c, r, h = (
                    T.alloc_fragment((32, 32), "float32"),
                    T.alloc_fragment((32,), "float32"),
                    T.alloc_shared((8,), "int32"),
                )
                T.copy(A[w * 32, 0], s)
                T.clear(c)
                T.clear(h)
                T.gemm(s, s, c, transpose_B=True)
                T.copy(c, t)
                T.cumsum(t, dim=1)
                T.reduce_max(t, r, dim=1)
                for i, j in T.Parallel(32, 16):
                    D[w * 32 + i, j] = t[i, j] + r[i]
                for i in T.Parallel(32):
                    T.atomic_add(h[i % 8], i)
                T.copy(h, H[w, 0:8])
            u = T.alloc_shared((128, 16), "float32")
            T.copy(D, u)
            for i, j in T.Parallel(128, 16):
                D[i, j] = u[127 - i, j]

    a = np.random.default_rng(0).integers(-3, 4, (128, 32)).astype(np.float16)
    own = a.reshape(4, 32, 32).astype(np.float32)
    sums = np.cumsum(own @ own.transpose(0, 2, 1), 2)
    want = (sums[:, :, :16] + sums.max(2, keepdims=True)).reshape(128, 16)[::-1]
    counts = np.arange(32).reshape(4, 8).sum(0, dtype=np.int32) + np.zeros((4, 1), np.int32)
    args = {"A": a, "D": np.zeros((128, 16), np.float32), "H": np.zeros((4, 8), np.int32)}
    everywhere(kernel, args, {"D": want, "H": counts})


def test_the_block_has_room_for_all_of_them():
    assert shared_bytes(own_rows.trace()) == 2 * 32 * 64 * 4


def test_a_block_of_the_cluster_reaches_the_same_executors_tile():
    @T.prim_func
    def kernel(D: T.Tensor((2, 2, 32), "int32")):
        with T.Kernel(2, threads=64, cta_cluster=2) as b:
            with T.Scale("cta_cluster") as (c, m):
                with T.Scale("warp") as (w, n):
                    s, t = T.alloc_shared((32,), "int32"), T.alloc_shared((32,), "int32")
                    T.fill(s, b * 10 + w)
                    T.barrier()
                    T.copy(s, t, src=1 - c)
                    T.barrier()
                    T.copy(t, D[b, w, 0:32])

    want = np.repeat(np.array([[10, 11], [0, 1]], np.int32)[:, :, None], 32, 2)
    everywhere(kernel, {"D": np.zeros((2, 2, 32), np.int32)}, {"D": want})


def test_signals_are_the_blocks():
    @T.prim_func
    def kernel(D: T.Tensor((4,), "int32")):
        with T.Kernel(1, threads=128):
            with T.Scale("warp") as (w, n):
                s = T.alloc_signal((1,))
                T.signal(s[0])

    with refused(TileSyntaxError, "T.alloc_signal inside T.Scale", write="allocate it in front of T.Scale"):
        kernel.trace()


def product(scale: str, rows: int, stages: int = 3, ring: bool = False) -> Any:
    """Every executor its own rows of A·B, by a pipelined loop of its own; ``ring``: behind one of the
    block's, which adds 1 + 2 + … to them."""

    @T.prim_func
    def kernel(
        A: T.Tensor((128, 128), "float16"),
        B: T.Tensor((128, 64), "float16"),
        C: T.Tensor((128, 64), "float32"),
    ):
        with T.Kernel(1, threads=128 * 128 // rows // (4 if scale == "warp" else 1)):
            if ring:
                t, total = T.alloc_shared((128, 64), "float16"), T.alloc_fragment((128, 64), "float32")
                T.clear(total)
                for k in T.Pipelined(2, num_stages=2):
                    T.copy(A[0, k * 64], t)
                    for i, j in T.Parallel(128, 64):
                        total[i, j] += t[i, j]
                T.copy(total, C)
                T.sync_threads()
            with T.Scale(scale) as (w, n):
                a, b = T.alloc_shared((rows, 32), "float16"), T.alloc_shared((32, 64), "float16")
                c = T.alloc_fragment((rows, 64), "float32")
                if ring:
                    T.copy(C[w * rows, 0], c)
                else:
                    T.clear(c)
                for k in T.Pipelined(4, num_stages=stages):
                    T.copy(A[w * rows, k * 32], a)
                    T.copy(B[k * 32, 0], b)
                    T.gemm(a, b, c)
                T.copy(c, C[w * rows, 0])

    return kernel


@pytest.mark.parametrize(
    "scale, rows, ring", [("warp", 16, False), ("warpgroup", 64, False), ("warp", 32, True)]
)
def test_a_pipelined_loop_below_the_block_copies_ahead_or_says_why_not(scale: str, rows: int, ring: bool):
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-3, 4, shape).astype(np.float16) for shape in ((128, 128), (128, 64)))
    want = a.astype(np.float32) @ b.astype(np.float32) + (a[:, :64] + a[:, 64:] if ring else 0)
    kernel = product(scale, rows, ring=ring)
    everywhere(kernel, {"A": a, "B": b, "C": np.zeros((128, 64), np.float32)}, {"C": want})
    own = [("ahead", 1, 3)]
    for arch, of_block in (("sm_90a", "roles"), ("sm_80", "ahead")):
        level = gpu_schedule(replace(tile_level(kernel), target=target(arch)))
        rings = [(r.form, r.below, r.depth) for r in level.schedule.rings]
        alone = ring and of_block == "roles"  # a producer fills rings of the block, and no others
        assert rings == ([(of_block, 0, 2)] if ring else []) + ([] if alone else own)
        said = [n for n in level.notes if "copies in turn, not ahead (line" in n and BELOW in n]
        assert len(said) == alone, level.notes
    found = launch(level, 1, {"A": a, "B": b, "C": np.zeros((128, 64), np.float32)})
    assert not found.report.findings and np.array_equal(found.arrays[0]["C"], want)


@T.prim_func
def kept(D: T.Tensor((2, 64), "float32")):
    with T.Kernel(1, threads=256):
        for r in T.serial(3):
            with T.Scale("warpgroup") as (w, n):
                s = T.alloc_shared((64,), "float32")
                if r == 0:
                    T.fill(s, 1)
                T.copy(s, D[w, 0:64])


def test_what_a_round_left_in_an_executors_tile_is_no_value_of_the_next():
    found = str(kept.check(ranks=1, args={"D": np.zeros((2, 64), np.float32)}, seeds=2))
    assert "uninitialised: s[0:64] is read, and nothing has written it" in found
