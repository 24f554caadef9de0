"""Rings by first reader, rings of one stage, and loops whose last product is moved into the next round, on
the simulator and as text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.unit.cuda.emulated import empty
from tests.unit.cuda.test_attention import arguments, chained, kernel
from tilescale.compiler.checks.run import check
from tilescale.compiler.cuda.targets import target
from tilescale.compiler.ir.operations import name_of
from tilescale.compiler.passes.pipeline import gpu_scheduled, tile_level
from tilescale.compiler.passes.schedule import schedule
from tilescale.compiler.tvm_compat import structural_walk, tirx
from tilescale.ops.attention import Tile
from tilescale.ops.fp8_gemm import by_tensor

BOTH = ("producer", "consumer")


def names(program: Any) -> list[str]:
    """The operations of a program in the order of its text, tokens with their rings."""
    found: list[str] = []

    def look(s: Any) -> None:
        if name := name_of(s):
            found.append(f"{name} {int(s.value.attrs['ring'])}" if name.startswith("ring_") else name)

    structural_walk(program.func.body, (tirx.Evaluate, look))
    return found


def inputs(n: int) -> dict[str, Any]:
    draw = np.random.default_rng(n)
    args = {
        name: draw.integers(-2, 3, (512, 64) if name in "BC" else (64, 64)).astype(
            "float32" if name == "A" else "float16"
        )
        for name in "ABC"
    }
    return {**args, "Y": empty((64, 64), "float32"), "n": n}


def test_a_ring_for_each_first_reader():
    """Awaited in front of it, released behind the last one, though the second copy stands behind the first
    one's reader."""
    program = schedule(tile_level(chained(None)), 2, BOTH, by_reader=True)
    assert [r.buffers for r in program.schedule.rings] == [["b"], ["c"]]
    consumer = [n for n in names(program) if n.split()[0] in ("ring_wait", "ring_release", "gemm")]
    assert consumer == ["ring_wait 0", "gemm", "ring_release 0", "ring_wait 1", "gemm", "ring_release 1"]
    kept = schedule(tile_level(chained(None)), 2, BOTH)
    assert not kept.schedule.rings and kept.schedule.kept, (
        "one ring for all of a loop has no place for a reader between its copies"
    )


def test_by_reader_needs_a_producer():
    with pytest.raises(ValueError, match="producer"):
        schedule(tile_level(chained(None)), 2, by_reader=True)


def test_a_tile_that_is_filled_once():
    """The queries: a ring of one stage where the target's copies can fill it, no ring elsewhere."""
    program = tile_level(kernel(1, 1, 32, False, Tile(64, 32, 128)))
    for answer, depths in ((True, [2, 2, 1]), (False, [2, 2])):
        made = schedule(program, 2, BOTH, by_reader=True, alone=lambda call, answer=answer: answer)
        assert [r.depth for r in made.schedule.rings] == depths
    assert names(made).count("ring_wait 0") == 1


@pytest.mark.parametrize("between, fresh", [(False, False), (True, False), (False, True)])
def test_the_overlap_keeps_the_meaning(between: bool, fresh: bool):
    """Both levels leave the same bits, whatever runs first, for no round and more."""
    made = chained(None, between, fresh)
    order = [
        n
        for n in names(gpu_scheduled(tile_level(made), target("sm_90a")))
        if n in ("wgmma", "await_products")
    ]
    assert order.count("wgmma") == (2 if between or fresh else 4), (
        "the overlapped loop has its first and its last product once more"
    )
    for n in (0, 1, 3):
        report = check(made, 1, inputs(n), level="both", arch="sm_90a", seeds=2)
        assert not report.findings, report


def test_attention_keeps_its_meaning():
    for tile in (Tile(64, 32, 128), Tile(64, 64, 128, 2, 2)):
        report = check(
            kernel(2, 1, 32, True, tile),
            1,
            arguments(100, 100, 2, 1, 32),
            level="both",
            arch="sm_90a",
            seeds=1,
        )
        assert not report.findings, report


@pytest.mark.parametrize(
    "parts, round_",
    [(1, ["wgmma", "pass", "await 0"]), (2, ["wgmma", "wgmma", "await 1", "pass", "await 0"])],
)
def test_turns(parts: int, round_: list[str]):
    """Two warpgroups that sum products in float32: a turn ends when no more than the last product is under
    way. The first turn is given once, in front of all tiles: one warpgroup may be done with a tile before the
    other has begun its last round."""
    cut = {"BM": 128, "BN": 64, "stages": 2, "threads": 256, "panel": 1, "stay": 1, "parts": parts}
    made = by_tensor(
        256, 64, 512, **cut, left="float8_e4m3fn", right="float8_e4m3fn", out="float32", fast=False
    )
    found: list[str] = []

    def look(s: Any) -> None:
        if name_of(s) in ("wgmma", "await_products", "ping_pong_barrier"):
            attrs = s.value.attrs
            texts = {
                "wgmma": lambda: "wgmma",
                "ping_pong_barrier": lambda: str(attrs["what"]),
                "await_products": lambda: f"await {int(attrs['pending'])}",
            }
            found.append(texts[name_of(s)]())

    body = gpu_scheduled(tile_level(made), target("sm_90a")).func.body
    structural_walk(body, (tirx.Evaluate, look))
    assert found == ["first", "take", *round_, "last"]
    found.clear()
    structural_walk(body, (tirx.For, lambda loop: structural_walk(loop.body, (tirx.Evaluate, look))))
    assert "first" not in found and "last" not in found
