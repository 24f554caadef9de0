"""What training on several ranks computes beside one rank, on the processor: losses of the examples as they
are, of three seeds, also of jobs that go on from a checkpoint, and results and gradients of layers in float64.

Bars: losses of 200 steps within 1 % of one rank's at each step; those of a job that goes on the same bits on
as many ranks, and within 1 % on another number; errors of layers, relative to the greatest number, 1e-10.

    python -m tests.bench.bench_training
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.bench.record import record
from tests.examples.test_training import SMALL, losses_of
from tests.ranks import nn_checks, nn_heads
from tests.ranks.harness import run_ranks

RANKS, OTHER, STEPS, SAVED = 4, 2, 200, 100
WORLDS = (1, 2, 3, 4, 8)
SEEDS = (0, 1, 2)
NEAR, SMALL_ERROR, ROUNDING = 0.01, 1e-10, 1e-6


def runs(mesh: Any, name: str, every: list[tuple[Any, ...]]) -> list[list[float]]:
    """Losses of several runs of an example one after another."""
    return [losses_of(name, *args) for args in every]


def on(ranks: int, name: str, *every: tuple[Any, ...]) -> list[list[float]]:
    """The same from a job of so many ranks, whose losses are alike on all of them."""
    told = run_ranks(ranks, nn_checks.on_mesh, nn_checks.port(), runs, name, list(every), timeout=3000)
    assert all(t == told[0] for t in told)
    return told[0]


def apart(got: list[float], want: list[float]) -> list[float]:
    """The relative difference at each step."""
    assert len(got) == len(want) == STEPS
    return [abs(g - w) / w for g, w in zip(got, want, strict=True)]


def beside_one(name: str, seed: int) -> dict[str, Any]:
    """Several ranks beside one. ``same_steps``: before a rounding has grown; a mixture's chooses another
    expert once."""
    (want,), (got,) = (on(ranks, name, ("--steps", STEPS, "--seed", seed)) for ranks in (1, RANKS))
    found = apart(got, want)
    return {
        "losses_of_one_rank": [want[0], want[-1]],
        "largest_relative": max(found),
        "at_step": 1 + found.index(max(found)),
        "same_steps": next((k for k, e in enumerate(found) if e > ROUNDING), STEPS),
    }


def resumed(name: str, folder: Path) -> dict[str, float]:
    """A job that goes on from a checkpoint on as many ranks and on fewer, beside one that goes through."""
    further = ("--steps", STEPS, "--folder", folder, "--resume")
    saved = ("--steps", SAVED, "--folder", folder)
    straight, _, as_many = on(RANKS, name, ("--steps", STEPS), saved, further)
    (folder / "latest").write_text(f"step-{SAVED}")
    (fewer,) = on(OTHER, name, further)
    assert as_many[:SAVED] == fewer[:SAVED] == straight[:SAVED]
    return {
        "as_many_largest_difference": max(abs(a - b) for a, b in zip(as_many, straight, strict=True)),
        "fewer_largest_relative": max(apart(fewer, straight)),
    }


def layers(ranks: int) -> dict[str, Any]:
    """The largest errors of results and gradients."""
    checks: dict[str, tuple[Any, ...]] = {
        "layers": (nn_checks.everything,), "experts": (nn_checks.experts, True)
    }  # fmt: skip
    if ranks > 1 and nn_heads.HEADS % ranks == 0:
        checks["key heads fewer than ranks"] = (nn_heads.everything,)
    found: dict[str, Any] = {}
    for name, check in checks.items():
        told = run_ranks(ranks, nn_checks.on_mesh, nn_checks.port(), *check, timeout=3000)
        worst = max((e, k) for errors in told for k, e in errors.items())
        found[name] = {"compared": sum(map(len, told)), "largest": worst[0], "of": worst[1]}
    return found


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)  # one rank would use all cores, and several share them
    torch.compile(torch.sin, backend="aot_eager")(torch.ones(2))  # loads its parts before ranks are forked
    figures: dict[str, Any] = {"ranks": RANKS, "other_ranks": OTHER, "steps": STEPS, "saved_at": SAVED}
    missed = []
    for name in SMALL:
        beside = {str(seed): beside_one(name, seed) for seed in SEEDS}
        with tempfile.TemporaryDirectory() as folder:
            again = resumed(name, Path(folder))
        figures[name] = {"beside_one_rank_by_seed": beside, "resumed": again}
        print(name, figures[name], flush=True)
        near = [*(of["largest_relative"] for of in beside.values()), again["fewer_largest_relative"]]
        missed += [] if max(near) <= NEAR and again["as_many_largest_difference"] == 0 else [name]
    figures["float64_errors_relative"] = errors = {}
    for ranks in WORLDS:
        errors[str(ranks)] = of = layers(ranks)
        print(ranks, of, flush=True)
        missed += [f"{k} on {ranks}" for k, e in of.items() if not e["largest"] <= SMALL_ERROR]
    record("training", figures)
    if missed:
        raise SystemExit(f"bars not reached: {missed}")


if __name__ == "__main__":
    main()
