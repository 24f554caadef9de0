"""The training examples on ranks: they follow one rank's losses, stop together and go on where they were."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tilescale.compiler.driver
import tilescale.nn  # noqa: F401  # once here, not in each of the forked ranks
from tests.examples.test_examples import EXAMPLES, load
from tests.ranks.harness import run_ranks
from tests.ranks.nn_checks import on_mesh, port
from tilescale import comm

#: example → arguments that make it small. A mixture at a high rate is chaotic: a rounding changes who is chosen
SMALL = {
    "train_tp_transformer": "--batch 2 --length 16 --layers 1 --features 48 --hidden 96 --lr 0.01",
    "train_moe": "--batch 2 --length 16 --layers 1 --features 48 --hidden 96 --lr 0.002",
}


def losses(name: str, *more: Any) -> list[float]:
    """Of one run on this rank."""
    args = [*SMALL[name].split(), "--device", "cpu", *map(str, more)]
    module, seen = load(name), []
    whole = module.run
    module.run = lambda given: seen.append(whole(given)) or seen[0]
    try:
        module.main(args)
    finally:
        module.run = whole
    return seen[0]


def runs(mesh: Any, name: str, every: list[tuple[Any, ...]]) -> list[list[float]]:
    """Several runs one after another in the same job."""
    return [losses(name, *more) for more in every]


def stopping(mesh: Any, name: str, folder: Path) -> list[list[float]]:
    """A run that goes through, and one of which one rank is asked to end in its fifth step and which then
    goes on."""
    training = load("training")
    straight = losses(name, "--steps", 10)
    draw = training.batch_of

    def ask(text: Any, step: int, *rest: Any) -> Any:
        if step == 4 and comm.rank() == comm.world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return draw(text, step, *rest)

    training.batch_of = ask
    try:
        cut = losses(name, "--steps", 10, "--folder", folder)
    finally:
        training.batch_of = draw
    return [straight, cut, losses(name, "--steps", 10, "--folder", folder, "--resume")]


def near(got: list[float], want: list[float]) -> bool:
    return len(got) == len(want) and all(abs(g - w) <= 0.01 * w for g, w in zip(got, want, strict=True))


#: the mixture's doubles of what the other example shows
BOTH = ["train_tp_transformer", pytest.param("train_moe", marks=pytest.mark.slow)]


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize(("world", "steps"), [(2, 30), pytest.param(4, 200, marks=pytest.mark.slow)])
def test_losses_are_those_of_one_rank(name: str, world: int, steps: int) -> None:
    ((want,),) = run_ranks(1, on_mesh, port(), runs, name, [("--steps", steps)], timeout=400)
    for (got,) in run_ranks(world, on_mesh, port(), runs, name, [("--steps", steps)], timeout=400):
        assert near(got, want), list(zip(got, want, strict=False))
    assert want[-1] < 0.9 * want[0]


@pytest.mark.parametrize("name", BOTH)
def test_a_job_that_is_asked_to_end_saves_and_goes_on(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = run_ranks(2, on_mesh, port(), stopping, name, folder)
    assert len({str(d) for d in done}) == 1  # losses have the same bits on all ranks
    straight, cut, resumed = done[0]
    assert cut == straight[:5] and resumed == straight
    assert json.loads((folder / "loss.json").read_text()) == straight
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    (folder / "latest").write_text("step-5")  # and on other ranks
    for (got,) in run_ranks(
        1, on_mesh, port(), runs, name, [("--steps", 10, "--folder", folder, "--resume")]
    ):
        assert got[:5] == cut and near(got, straight)


@pytest.mark.parametrize("name", BOTH)
def test_launch_trains(name: str, tilescale_launch: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = tilescale_launch(2, EXAMPLES / f"{name}.py", *SMALL[name].split(), "--steps", 4, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert "step 4 of 4, 2 ranks: loss" in done.stdout and "tokens/s" in done.stdout
