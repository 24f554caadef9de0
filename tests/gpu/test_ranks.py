"""Ranks on GPUs, as processes: every launcher, every example, both heaps, and what is said when ranks do not agree."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.ranks import VARIANTS

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]
ROOT = Path(__file__).resolve().parent.parent.parent
LAUNCH = [sys.executable, "-m", "tilescale.launch", "launch", "-n"]


def run(env: dict[str, str], *line: str, limit: int = 120, **more: str) -> tuple[int, str]:
    env = env | {"PYTHONPATH": str(ROOT), "TILESCALE_TARGET": "cuda", "TILESCALE_HEAP_SIZE": "128M", "TILESCALE_WAIT_TIMEOUT": "20"} | more
    done = subprocess.run(line, env=env, cwd=ROOT, capture_output=True, text=True, timeout=limit, check=False)
    return done.returncode, done.stdout + done.stderr


def program(env: dict[str, str], name: str, ranks: int = 2, **more: str) -> tuple[int, str]:
    return run(env, *LAUNCH, str(ranks), "-m", "tests.gpu.rank_programs", name, **more)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", VARIANTS)
def test_examples(clean_env: dict[str, str], name: str, ranks: int):
    code, said = run(clean_env, *LAUNCH, str(ranks), "-m", "tests.gpu.ranks", "--launches", "10", name)
    assert code == 0 and said.count(", ok") == len(VARIANTS[name]), said[-2000:]


@pytest.mark.parametrize("heap", ["symm_mem", "nvshmem"])
@pytest.mark.parametrize("launcher", ["tilescale", "torchrun", "mpirun"])
def test_launchers(clean_env: dict[str, str], launcher: str, heap: str):
    if launcher != "tilescale" and shutil.which(launcher) is None:
        pytest.skip(f"there is no {launcher}")
    if heap == "nvshmem":
        pytest.importorskip("nvshmem")
    lines = {
        "tilescale": [*LAUNCH, "2", "-m"], "torchrun": ["torchrun", "--nproc-per-node", "2", "-m"],
        "mpirun": ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, "-m"],
    }  # fmt: skip
    code, said = run(clean_env, *lines[launcher], "tests.gpu.ranks", "--launches", "10", "05", "06", TILESCALE_HEAP=heap)
    assert code == 0 and said.count(", ok") == 3, said[-2000:]


@pytest.mark.parametrize("name", ["graph", "streams", "teams", "barriers", "unordered"])
def test_programs(clean_env: dict[str, str], name: str):
    code, said = program(clean_env, name, 3)
    assert code == 0 and f"{name}: 0 wrong" in said, said[-2000:]


def test_a_wait_in_vain_says_who_waits_for_what(clean_env: dict[str, str]):
    code, said = program(clean_env, "lonely", TILESCALE_WAIT_TIMEOUT="2")
    assert code != 0 and "block (0, 0, 0): waited 2 s for s[1, 2]: expected >= 2, the value is 1" in said, said[-2000:]
    assert "rank_programs.py" in said


def test_a_rank_that_there_is_not(clean_env: dict[str, str]):
    code, said = program(clean_env, "far")
    assert code != 0 and "is out of range: the team has 2 ranks" in said, said[-2000:]


def test_ranks_that_launch_different_things(clean_env: dict[str, str]):
    code, said = program(clean_env, "different")
    assert code != 0 and "launched the same kernel with different code or constants" in said and "threads=128" in said, said[-2000:]


def test_a_rank_that_fails_ends_the_others_launches(clean_env: dict[str, str]):
    code, said = program(clean_env, "raises")
    assert code != 0 and "after less than 10 s" in said and "rank 1 stopped the job: ValueError: no more" in said, said[-2000:]


def test_a_rank_that_does_not_come(clean_env: dict[str, str]):
    code, said = program(clean_env, "late", TILESCALE_WAIT_TIMEOUT="2")
    assert code != 0 and "rank 1 to reach launch 1 of their team" in said, said[-2000:]
