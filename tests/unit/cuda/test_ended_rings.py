"""Tiles that are first touched behind a ring's last release share its bytes, where that is what lets the loop
have the stages that it asks for (passes/allocate_shared.py)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilescale
import tilescale.language as T
from tests.unit.cuda.emulated import agree, lowered
from tilescale.compiler.passes import gpu_schedule

ROUNDS = 7


def product(stages: int, persistent: bool = False, tiles: int = 2, between: bool = False) -> Any:
    """C = A · B through a tile that begins to live behind the loop; ``between``: and one that is read between
    the loop's products."""

    @T.macro
    def one(A, B, C, a, b, out, acc, tile):
        T.clear(acc)
        for k in T.Pipelined(ROUNDS, num_stages=stages):
            T.copy(A[tile * 128, k * 64], a)
            T.copy(B[k * 64, 0], b)
            T.gemm(a, b, acc)
            if between:
                T.copy(acc, out)
        T.copy(acc, out)
        T.copy(out, C[tile * 128, 0])

    @T.prim_func
    def gemm(
        A: T.Tensor((128 * tiles, 64 * ROUNDS), "float16"),
        B: T.Tensor((64 * ROUNDS, 128), "float16"),
        C: T.Tensor((128 * tiles, 128), "float32"),
    ):
        with T.Kernel(1 if persistent else tiles, threads=256) as block:
            a, b = T.alloc_shared((128, 64), "float16"), T.alloc_shared((64, 128), "float16")
            out, acc = T.alloc_shared((128, 128), "float32"), T.alloc_fragment((128, 128), "float32")
            if persistent:
                for tile in T.serial(tiles):
                    one(A, B, C, a, b, out, acc, tile)
            else:
                one(A, B, C, a, b, out, acc, block)

    return gemm


def drawn(tiles: int = 2) -> dict[str, Any]:
    g = np.random.default_rng(3)
    a, b = g.standard_normal((128 * tiles, 64 * ROUNDS)), g.standard_normal((64 * ROUNDS, 128))
    return {
        "A": a.astype("float16"),
        "B": b.astype("float16"),
        "C": np.full((128 * tiles, 128), np.nan, "f4"),
    }


def shared(program: Any) -> set[tuple[str, str]]:
    """Names of tiles that share bytes."""
    lies = [(b.name, at, at + n) for b, (at, n) in program.arena.items()]
    return {(x, y) for x, a, b in lies for y, c, d in lies if x < y and a < d and c < b}


def depth(made: Any) -> int:
    return int(made.program.schedule.rings[0].depth)


@pytest.mark.parametrize("seed", range(3))
def test_a_result_lies_where_a_ring_was(seed: int):
    """Six stages are 192 KB, and the result another 64."""
    kernel = product(6)
    made = lowered(kernel, "sm_90a")
    assert depth(made) == 6 and made.program.arena_bytes <= 232448
    assert shared(made.program) & {("a", "out"), ("b", "out")}
    agree(kernel, drawn(), seed=seed)


def test_the_threads_meet_before_they_write_there():
    """All have read the ring's last stage by then."""
    text = tilescale.compile(product(6), target="cuda:sm_90a").get_kernel_source()
    assert any("writes out, where " in line and "barrier_sync" in line for line in text.splitlines()), text


@pytest.mark.parametrize(
    "how", [{"stages": 5}, {"stages": 6, "persistent": True}, {"stages": 6, "between": True}]
)
def test_rings_that_do_not_end_share_nothing(how: dict[str, Any]):
    """Where everything fits; where the producer runs ahead into the next tile; where both are alive."""
    made = lowered(product(**how), "sm_90a")
    assert depth(made) == 5 and not shared(made.program)
    agree(product(**how), drawn(), seed=1)


def test_stages_that_do_not_fit_in_the_end_are_given_back(monkeypatch: pytest.MonkeyPatch):
    """How many fit is an estimate, before there are layouts."""
    monkeypatch.setattr(gpu_schedule, "EXCHANGED", -64 * 1024)
    assert depth(lowered(product(8), "sm_90a")) == 5
