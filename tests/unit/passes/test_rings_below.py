"""Pipelined loops inside T.Scale("warp") and T.Scale("warpgroup"): each executor has a ring of its own, whose
copies run ahead."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.unit.cuda.emulated import agree, data, empty, lowered
from tilescale.compiler.checks.run import check, launch
from tilescale.compiler.passes.pipeline import tile_level
from tilescale.compiler.passes.schedule import AHEAD, schedule


def rows(scale: str, stages: int, threads: int = 128, blocks: int = 2, wide: int = 64) -> Any:
    """Each executor moves rows of its own, some of them none."""
    t = T.dynamic("t")

    @T.prim_func
    def moved(X: T.Tensor((t, wide), "float32"), Y: T.Tensor((t, wide), "float32")):
        with T.Kernel(blocks, threads=threads) as b, T.Scale(scale) as (w, of):
            x = T.alloc_shared((wide,), "float32")
            for r in T.Pipelined(T.ceildiv(t - w * blocks - b, of * blocks), num_stages=stages):
                T.copy(X[w * blocks + b + r * of * blocks, 0:wide], x)
                for j in T.Parallel(wide):
                    Y[w * blocks + b + r * of * blocks, j] = 2 * x[j] + x[wide - 1 - j]

    return moved


def again(stages: int) -> Any:
    """A T.Scale that is gone through several times, with two loops, of which one has a nest of scales."""

    @T.prim_func
    def gathered(
        X: T.Tensor((40, 32), "float32"), at: T.Tensor((40,), "int32"), Y: T.Tensor((4, 32), "float32")
    ):
        with T.Kernel(1, threads=128):
            total = T.alloc_shared((4, 32), "float32")
            T.clear(total)
            for half in T.serial(2):
                with T.Scale("warp") as (w, _):
                    a, acc = T.alloc_shared((32,), "float32"), T.alloc_fragment((32,), "float32")
                    T.copy(total[w, 0:32], acc)
                    for part in T.serial(2):
                        for r in T.Pipelined(5 - half, num_stages=stages):
                            T.copy(X[at[w * 10 + half * 5 + r], 0:32], a)
                            for j in T.Parallel(32):
                                acc[j] += (part + 1) * a[j]
                    T.copy(acc, total[w, 0:32])
            T.copy(total, Y)

    return gathered


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("scale", ["warp", "warpgroup"])
def test_each_executor_has_a_ring(scale: str, stages: int) -> None:
    threads = 256 if scale == "warpgroup" else 128
    kernel, args = rows(scale, stages, threads), {"X": data((37, 64), "float32")}
    made = schedule(tile_level(kernel), depth=stages, ahead=True)
    assert [(r.form, r.below, r.depth) for r in made.schedule.rings] == [(AHEAD, 1, stages)]
    report = check(kernel, 1, args, level="both", seeds=2, depth=stages, roles=("all",), ahead=True)
    assert report, report
    agree(kernel, {**args, "Y": empty((37, 64), "float32")})


@pytest.mark.parametrize("stages", [2, 3])
def test_rounds_are_counted_anew_where_a_scale_is_gone_through_again(stages: int) -> None:
    args = {
        "X": data((40, 32), "float32"),
        "at": np.random.default_rng(3).permutation(40).astype(np.int32),
    }
    report = check(again(stages), 1, args, level="both", seeds=2, depth=stages, roles=("all",), ahead=True)
    assert report, report
    agree(again(stages), {**args, "Y": empty((4, 32), "float32")})
    x, at = args["X"], args["at"].reshape(4, 10)
    want = 3 * np.stack([x[np.r_[at[w, :5], at[w, 5:9]]].sum(0) for w in range(4)])
    np.testing.assert_allclose(launch(again(stages), 1, args).arrays[0]["Y"], want, rtol=1e-5, atol=1e-4)


def test_fewer_stages_where_all_warps_have_no_room() -> None:
    """A row of 48 KB for each of four warps fits once."""
    program = lowered(rows("warp", 4, wide=12 * 1024)).program
    assert not program.schedule.rings or program.schedule.rings[0].depth < 4


def handed_over(stages: int) -> Any:
    """A warp copies what another one has written, as a barrier of the two says round by round."""

    @T.prim_func
    def handed(X: T.Tensor((8, 64), "float32"), Y: T.Tensor((8, 64), "float32")):
        with T.Kernel(1, threads=64), T.Scale("warp") as (w, _):
            if w == 0:
                for r in T.serial(8):
                    for j in T.Parallel(64):
                        X[r, j] = 2 * X[r, j] + r
                    T.sync_threads(3, 64)
            else:
                x = T.alloc_shared((64,), "float32")
                for r in T.Pipelined(8, num_stages=stages):
                    T.sync_threads(3, 64)
                    T.copy(X[r, 0:64], x)
                    for j in T.Parallel(64):
                        Y[r, j] = x[63 - j]

    return handed


def test_copies_do_not_overtake_a_barrier_with_those_who_write_what_they_copy() -> None:
    kernel, args = handed_over(3), {"X": data((8, 64), "float32"), "Y": empty((8, 64), "float32")}
    report = check(kernel, 1, args, level="both", seeds=2, depth=3, roles=("all",), ahead=True)
    assert report, report
    for arch in ("sm_90a", "sm_80"):
        agree(kernel, args, arch=arch)
        said = [str(n) for n in lowered(kernel, arch).program.notes]
        assert any("may write X before the two meet in the loop" in n for n in said), said


def test_copies_that_wait_do_not_wait_ahead_of_a_barrier() -> None:
    """Who signals the next round comes to the barrier of this one before."""

    @T.prim_func
    def paced(X: T.Tensor((8, 64), "float32"), Y: T.Tensor((8, 64), "float32"), here: T.Signal((1,))):
        with T.Kernel(1, threads=64), T.Scale("device"), T.Scale("warp") as (w, _):
            if w == 0:
                for _r in T.serial(8):
                    T.signal(here[0])
                    T.sync_threads(1, 64)
            else:
                x = T.alloc_shared((64,), "float32")
                for r in T.Pipelined(8, num_stages=3):
                    T.wait(here[0], r + 1)
                    T.copy(X[r, 0:64], x)
                    for j in T.Parallel(64):
                        Y[r, j] = x[63 - j]
                    T.sync_threads(1, 64)

    args = {"X": data((8, 64), "float32")}
    report = check(paced, 1, args, level="both", seeds=2, depth=3, roles=("all",), ahead=True)
    assert report, report
    agree(paced, {**args, "Y": empty((8, 64), "float32"), "here": np.zeros(1, np.int64)})


def test_a_barrier_of_a_warps_lanes_is_none_with_others() -> None:
    @T.prim_func
    def kernel(X: T.Tensor((16, 32), "float32")):
        with T.Kernel(1, threads=64), T.Scale("warp") as (w, _):
            x, y = T.alloc_shared((32,), "float32"), T.alloc_shared((32,), "float32")
            for r in T.Pipelined(4, num_stages=2):
                T.copy(X[2 * r + w, 0:32], x)
                with T.Scale("thread") as (lane, _):
                    y[lane] = x[lane]
                    T.sync_warp()
            T.copy(y, X[8 + w, 0:32])

    made = schedule(tile_level(kernel), depth=2, ahead=True)
    assert [r.form for r in made.schedule.rings] == [AHEAD]
