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
import torch._dynamo  # these once here, not in each of the forked ranks
import torch.distributed.checkpoint
import torch.distributed.tensor  # noqa: F401

import tilescale.compiler.driver
import tilescale.nn  # noqa: F401
from tests.examples.test_examples import EXAMPLES, load
from tests.ranks.harness import RanksFailed, run_ranks
from tests.ranks.nn_checks import on_mesh, port
from tilescale import comm

#: example → arguments that make it small. A mixture at a high rate is chaotic: a rounding changes who is chosen
SMALL = {
    "train_tp_transformer": "--batch 2 --length 16 --layers 1 --features 48 --hidden 96 --lr 0.01",
    "train_moe": "--batch 2 --length 16 --layers 1 --features 48 --hidden 96 --lr 0.002",
}


def losses(name: str, *more: Any) -> list[float]:
    """Of one run on this rank."""
    return losses_of(name, *SMALL[name].split(), *more)


def losses_of(name: str, *args: Any) -> list[float]:
    """Of one run on this rank with these arguments alone."""
    module, seen = load(name), []
    whole = module.run
    module.run = lambda given: seen.append(whole(given)) or seen[0]
    try:
        module.main(["--device", "cpu", *map(str, args)])
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


#: the example, of which a rank fails in its fifth step
FAULTY = """
import os, sys
sys.path[:0] = [{examples!r}]
import train_tp_transformer, training
draw = training.batch_of
def faulty(text, step, *rest):
    if step == 4 and os.environ["RANK"] == "1":
        raise ValueError("a bad batch")
    return draw(text, step, *rest)
training.batch_of = faulty
raise SystemExit(train_tp_transformer.main())
"""


def dying(mesh: Any, name: str, folder: Path) -> list[float]:
    """The last rank is killed in its fifth step."""
    training = load("training")
    draw = training.batch_of

    def die(text: Any, step: int, *rest: Any) -> Any:
        if step == 4 and comm.rank() == comm.world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return draw(text, step, *rest)

    training.batch_of = die
    return losses(name, *SAVING, "--folder", folder)


SAVING = ("--steps", 6, "--save-every", 2)


def went_on(name: str, world: int, folder: Path, other: int | None = None) -> None:
    """The folder has a checkpoint of four steps, from which a job on as many ranks goes on bit for bit, and
    one on another number of ranks nearly."""
    assert (folder / "latest").read_text() == "step-4"
    every = [("--steps", 6), (*SAVING, "--folder", folder, "--resume")]
    for straight, resumed in run_ranks(world, on_mesh, port(), runs, name, every):
        assert len(straight) == 6 and resumed == straight
    (folder / "latest").write_text("step-4")
    for (got,) in run_ranks(other, on_mesh, port(), runs, name, every[1:]) if other else []:
        assert got[:4] == straight[:4] and near(got, straight)


def test_a_rank_that_fails_ends_the_job_with_its_name(
    tilescale_launch: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    script, folder, name = tmp_path / "faulty.py", tmp_path / "run", "train_tp_transformer"
    script.write_text(FAULTY.format(examples=str(EXAMPLES)))
    args = [*SMALL[name].split(), *SAVING, "--device", "cpu", "--folder", folder]
    done = tilescale_launch(2, script, *args)
    assert done.returncode != 0 and "step 6 of 6" not in done.stdout
    assert "rank 1" in done.stderr and "ValueError: a bad batch" in done.stderr
    went_on(name, 2, folder)


def resumed_with(mesh: Any, name: str, folder: Path) -> list[Any]:
    """Another learning rate, of which nothing is learnt, then checkpoints that cannot be read; other words."""
    resume = ("--folder", folder, "--resume", "--steps")
    first = losses(name, "--steps", 2, "--folder", folder)
    still = losses(name, *resume, 4, "--lr", 0)
    straight, said = losses(name, "--steps", 4), []
    here = folder / (folder / "latest").read_text()

    def wrong(*args: Any) -> None:
        comm.barrier()
        with pytest.raises(SystemExit) as ended:
            losses(name, *args)
        said.append(str(ended.value))
        comm.barrier()

    wrong(*resume, 6, "--features", 24)
    wrong("--steps", 1, "--length", 10**6)
    for file in ("losses.json", "__0_0.distcp", ".metadata"):
        if comm.rank() == 0:
            (here / file).write_text("[")
        wrong(*resume, 6)
    return [first == still[:2] == straight[:2], still[2:] != straight[2:], said]


def test_what_cannot_be_resumed_is_said(tmp_path: Path) -> None:
    run = (on_mesh, port(), resumed_with, "train_tp_transformer", tmp_path / "run")
    for kept, other, said in run_ranks(2, *run):
        assert kept and other
        assert said.pop(1).startswith("--length 1000000: expected ")
        assert all("step-4 cannot be read: " in text and "an older one" in text for text in said), said
        assert "Size mismatch" in said[0] and len(said) == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_a_rank_that_dies_ends_the_others(name: str, tmp_path: Path) -> None:
    world, folder = 3, tmp_path / "run"
    with pytest.raises(RanksFailed) as caught:
        run_ranks(world, on_mesh, port(), dying, name, folder)
    failures = caught.value.failures
    assert [f.rank for f in failures] == list(range(world)) and caught.value.seconds < 30
    assert failures[-1].kind == "Died" and "SIGKILL" in failures[-1].text
    assert all(f"rank {world - 1}" in f.text for f in failures[:-1]), [f.text for f in failures]
    went_on(name, world, folder, other=2)


@pytest.mark.parametrize("name", BOTH)
def test_launch_trains(name: str, tilescale_launch: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    args = (*SMALL[name].split(), "--steps", 4, "--device", "cpu")
    done = tilescale_launch(2, EXAMPLES / f"{name}.py", *args, env={"PYTHONDEVMODE": "1"})
    assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr
    assert "step 4 of 4, 2 ranks: loss" in done.stdout and "tokens/s" in done.stdout
