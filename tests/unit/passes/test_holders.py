"""Which warps and warpgroups have a tile: those that come to where it is used."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.unit.cuda.emulated import agree, data, empty, lowered
from tilescale.compiler.checks.run import check
from tilescale.compiler.ir.holders import holders
from tilescale.compiler.passes.pipeline import tile_level

W = 4


def some(choose: Any, before: Any = None) -> Any:
    """Warps copy rows through a tile of their own where ``choose`` says so of their index, and a second one where
    it does not. ``before``: reads a tile of all warps in front of it."""

    @T.prim_func
    def copied(X: T.Tensor((W, 32), "float32"), Y: T.Tensor((W, 32), "float32")):
        with T.Kernel(1, threads=32 * W), T.Scale("warp") as (w, _):
            chosen = T.alloc_shared((32,), "float32")
            if before:
                T.copy(X[w, 0:32], chosen)
            if choose(w):
                T.copy(X[w, 0:32], chosen)
                for j in T.Parallel(32):
                    Y[w, j] = 2 * chosen[31 - j]
            else:
                other = T.alloc_shared((32,), "float32")
                T.copy(X[w, 0:32], other)
                for j in T.Parallel(32):
                    Y[w, j] = 3 * other[31 - j]

    return copied


CHOICES: dict[str, tuple[Any, range, range]] = {
    "<": (lambda w: w < 3, range(3), range(3, 4)),
    "<=": (lambda w: w <= 1, range(2), range(2, 4)),
    ">": (lambda w: w > 2, range(3, 4), range(3)),
    ">=": (lambda w: w >= 2, range(2, 4), range(2)),
    "==": (lambda w: w == 1, range(1, 2), range(4)),
    "!=": (lambda w: w != 2, range(4), range(2, 3)),
    "no bare index": (lambda w: 2 * w < 4, range(4), range(4)),
    "both": (lambda w: (w >= 1) & (w < 3), range(1, 3), range(4)),
    "either": (lambda w: (w < 1) | (w > 2), range(4), range(4)),
    "beyond": (lambda w: w < 9, range(4), range(4)),
}


def held(kernel: Any) -> dict[str, range]:
    return {b.name: who for b, who in holders(tile_level(kernel)).items()}


@pytest.mark.parametrize("name", CHOICES)
def test_those_who_come_there_have_one(name: str) -> None:
    choose, chosen, other = CHOICES[name]
    kernel, args = some(choose), {"X": data((W, 32), "float32"), "Y": empty((W, 32), "float32")}
    assert held(kernel) == {"chosen": chosen, "other": other}
    agree(kernel, args)
    report = check(kernel, 1, args, level="both", seeds=2)
    assert report, report


def test_a_tile_that_all_use_is_all_of_theirs() -> None:
    assert held(some(lambda w: w < 1, before=True)) == {"chosen": range(4), "other": range(1, 4)}
    assert lowered(some(lambda w: w < 1)).program.arena_bytes < 4 * 4 * 32 * 4


def nested(kind: str) -> Any:
    """A tile of warps inside a T.Scale of warpgroups; of warpgroups that warps use; of the block; a view."""

    @T.prim_func
    def copied(X: T.Tensor((8, 32), "float32"), Y: T.Tensor((8, 32), "float32")):
        with T.Kernel(1, threads=256):
            whole = T.alloc_shared((32,), "float32")
            T.copy(X[7, 0:32], whole)
            with T.Scale("warpgroup") as (g, _):
                if g == 1:
                    mine = T.alloc_shared((4, 32), "float32")
                    part = T.view(mine, (2, 64)) if kind == "view" else mine
                    with T.Scale("warp") as (w, _):
                        x = T.alloc_shared((32,), "float32")
                        if w < 1:
                            T.copy(X[4, 0:32], x)
                            for j in T.Parallel(32):
                                Y[0, j] = x[31 - j] + whole[j]
                        for j in T.Parallel(32):
                            part[0, j] if kind == "view" else mine[w, j]
                            mine[w, j] = X[4 + w, j]
                            Y[4 + w, j] = mine[w, j]

    return copied


@pytest.mark.parametrize("kind", ["plain", "view"])
def test_executors_of_inner_scales_are_not_told_apart(kind: str) -> None:
    kernel = nested(kind)
    assert held(kernel) == {"whole": range(1), "mine": range(1, 2), "x": range(8)}
    agree(kernel, {"X": data((8, 32), "float32"), "Y": np.zeros((8, 32), np.float32)})


def test_a_ring_of_some_warps_takes_the_memory_of_some() -> None:
    @T.prim_func
    def rows(X: T.Tensor((40, 256), "float32"), Y: T.Tensor((40, 256), "float32")):
        with T.Kernel(1, threads=32 * W), T.Scale("warp") as (w, _):
            if w >= 3:
                x = T.alloc_shared((256,), "float32")
                for r in T.Pipelined(40, num_stages=3):
                    T.copy(X[r, 0:256], x)
                    for j in T.Parallel(256):
                        Y[r, j] = x[255 - j]

    made = lowered(rows)
    assert [(r.depth, r.below) for r in made.program.schedule.rings] == [(3, 1)]
    assert made.program.arena_bytes == 3 * 256 * 4
    agree(rows, {"X": data((40, 256), "float32"), "Y": empty((40, 256), "float32")})
