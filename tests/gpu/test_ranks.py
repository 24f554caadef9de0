"""Ranks on GPUs, as processes: every launcher, every example, both heaps, and what is said when ranks do not
agree.

A job starts in some five seconds and compiles what no cache has yet, so what ends well shares one: the file
takes about two minutes on one GPU, and less with ``TILESCALE_CUDA_COMPILER=nvrtc`` or several workers (``-n
4``).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.gpu.jobs import ROOT, Job
from tests.gpu.ranks import VARIANTS
from tilescale.ops import RANK_MODULES, load_ranks

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]

#: of torchrun and of torch's errors: nothing of ours
NOISE = re.compile(
    r"^(\[\d\] )?(W\d{4} |\s*$|For debugging consider|Compile with `TORCH_USE|Search for `cudaError|CUDA kernel errors might)"
)
#: of the environment, which jobs have otherwise as a person's shell has it
KEPT = ("TILESCALE_CACHE_DIR", "TILESCALE_CUDA_COMPILER")


class Said:
    """What a job printed, and its exit code."""

    def __init__(
        self, env: dict[str, str], launcher: str, ranks: int, *module: str, limit: float = 60, **more: str
    ):
        if launcher != "tilescale" and shutil.which(launcher) is None:
            pytest.skip(f"there is no {launcher}")
        own = {"TILESCALE_TARGET": "cuda", "TILESCALE_HEAP_SIZE": "128M", "TILESCALE_WAIT_TIMEOUT": "20"}
        env = env | {name: os.environ[name] for name in KEPT if name in os.environ} | own | more
        self.code, self.text = Job(launcher, ranks, module, env).wait(limit)

    def must(self, holds: bool, what: str) -> None:
        """Fails the test with the end of what was printed."""
        if holds:
            return
        lines = [line[:300] for line in self.text.splitlines() if not NOISE.match(line)]
        pytest.fail(
            "\n".join([f"expected {what}; exit code {self.code}, and the last lines:", *lines[-40:]]),
            pytrace=False,
        )

    def must_fail(self, *texts: str) -> None:
        """It ended by itself, and said each of these."""
        for text in texts:
            self.must(text in self.text, repr(text))
        self.must(self.code not in (0, 124), "a failure")

    def must_be_right(self, names: list[str]) -> None:
        """Every variant of these examples."""
        wrong = [
            n for n in names if len(re.findall(rf"{n} .*, ok$", self.text, re.MULTILINE)) != len(VARIANTS[n])
        ]
        self.must(self.code == 0 and not wrong, f"right results of {', '.join(wrong or names)}")


def program(
    env: dict[str, str], *names: str, ranks: int = 2, launcher: str = "tilescale", **more: str
) -> Said:
    return Said(env, launcher, ranks, "tests.gpu.rank_programs", *names, **more)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_examples(clean_env: dict[str, str], ranks: int):
    Said(clean_env, "tilescale", ranks, "tests.gpu.ranks", "--launches", "10", limit=120).must_be_right(
        list(VARIANTS)
    )


@pytest.mark.parametrize("heap", ["symm_mem", "nvshmem"])
@pytest.mark.parametrize("launcher", ["tilescale", "torchrun", "mpirun"])
def test_launchers(clean_env: dict[str, str], launcher: str, heap: str):
    if heap == "nvshmem":
        pytest.importorskip("nvshmem")
    names = ["05_ring_shift", "06_all_gather"]
    Said(
        clean_env, launcher, 2, "tests.gpu.ranks", "--launches", "10", *names, TILESCALE_HEAP=heap
    ).must_be_right(names)


def test_ranks_by_nvshmems_calls(clean_env: dict[str, str]):
    """As if GPUs did not address each other's memory."""
    pytest.importorskip("nvshmem")
    names = ["05_ring_shift", "06_all_gather"]
    more = {"TILESCALE_HEAP": "nvshmem", "TILESCALE_REMOTE": "nvshmem"}
    Said(clean_env, "tilescale", 2, "tests.gpu.ranks", "--launches", "10", *names, **more).must_be_right(
        names
    )


def test_programs(clean_env: dict[str, str]):
    names = [
        "graph",
        "packets",
        "sums",
        "tuned",
        "streams",
        "teams",
        "inside",
        "barriers",
        "meets",
        "unordered",
    ]
    job = program(clean_env, *names, ranks=3)
    for name in names:
        job.must(f"{name}: 0 wrong" in job.text, f"no wrong result of {name}")
    job.must(job.code == 0, "success")


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_operations_of_several_ranks(clean_env: dict[str, str], ranks: int):
    more = {"TILESCALE_HEAP_SIZE": "1G"}
    job = Said(clean_env, "tilescale", ranks, "tests.gpu.rank_ops", "--graph", limit=400, **more)
    for module in RANK_MODULES:
        job.must(f"{load_ranks(module).name}: " in job.text, f"the cases of {module}")
    job.must(job.code == 0 and not re.search(r" [1-9]\d* wrong", job.text), "right results")


def test_launches_of_a_team_that_overlap(clean_env: dict[str, str]):
    program(clean_env, "overlap", TILESCALE_WAIT_TIMEOUT="5").must_fail(
        "two launches of one team ran at once"
    )


def test_streams_and_teams_and_nccl(clean_env: dict[str, str]):
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL takes a GPU for each rank")
    own = {"NCCL_MAX_CTAS": "8", "TILESCALE_SPARE": "16"}
    for more in ({}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}):
        job = Said(clean_env, "tilescale", 2, "tests.gpu.streams", limit=240, **own, **more)
        job.must(job.code == 0 and job.text.count("PASS") == 5, "right results")


def test_ranks_go_on_without_one_that_was_killed(clean_env: dict[str, str]):
    env = clean_env | {"TILESCALE_TARGET": "cuda"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.recover", "3"],
        env=env, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.count("PASS rank") == 2, done.stdout + done.stderr[-3000:]


def test_what_waits_leaves_room_for_a_kernel_that_needs_shared_memory(clean_env: dict[str, str]):
    job = program(clean_env, "room", ranks=1, TILESCALE_WAIT_TIMEOUT="5")
    job.must(job.code == 0 and "room: 0 wrong" in job.text, "success")


def test_a_wait_in_vain_says_who_waits_for_what(clean_env: dict[str, str]):
    job = program(clean_env, "lonely", TILESCALE_WAIT_TIMEOUT="2")
    job.must_fail(
        "block (0, 0, 0): waited 2 s for s[1, 2]: expected >= 2, the value is 1", "rank_programs.py"
    )


def test_a_rank_that_there_is_not(clean_env: dict[str, str]):
    program(clean_env, "far").must_fail("is out of range: the team has 2 ranks")


def test_ranks_that_launch_different_things(clean_env: dict[str, str]):
    program(clean_env, "different").must_fail(
        "launched the same kernel with different code or constants", "threads=128"
    )


def test_a_rank_that_fails_ends_the_others_launches(clean_env: dict[str, str]):
    program(clean_env, "raises").must_fail(
        "after less than 60 s", "rank 1 stopped the job: ValueError: no more"
    )


def test_a_kernel_that_fails_ends_the_others_launches(clean_env: dict[str, str]):
    program(clean_env, "asserts").must_fail(
        "after less than 60 s", "rank 1 stopped the job: checked: ", "assert failed: A is positive"
    )


def test_a_rank_that_does_not_come(clean_env: dict[str, str]):
    program(clean_env, "late", TILESCALE_WAIT_TIMEOUT="2").must_fail("rank 1 to reach launch 1 of their team")


def test_packets_of_a_rank_that_does_not_come(clean_env: dict[str, str]):
    program(clean_env, "unsent", TILESCALE_WAIT_TIMEOUT="2").must_fail(
        "waited 2 s for packets of box in launch 1 of those that use it", "T.get_packets"
    )


def test_a_rank_that_has_ended(clean_env: dict[str, str]):
    job = program(clean_env, "ends", TILESCALE_WAIT_TIMEOUT="2")
    job.must_fail("rank 1 to reach launch 1 of their team", "by now rank 1 has ended")


def living(mark: str) -> list[str]:
    """Processes with this in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in entry.read_bytes():
                found.append(entry.parent.name)
    return found


def test_a_rank_that_is_killed_inside_fused_kernels_ends_the_job(clean_env: dict[str, str]):
    job = program(
        clean_env, "killed_inside", ranks=3, TILESCALE_HEAP_SIZE="256M", TILESCALE_WAIT_TIMEOUT="100"
    )
    ended = time.time()
    job.must_fail("rank 2 was killed by signal 9")
    at = re.search(r"killed at ([0-9.]+)", job.text)
    job.must(at is not None and ended - float(at[1]) < 10, "an end within ten seconds")


def test_many_launches_with_delays(clean_env: dict[str, str]):
    more = {"TILESCALE_HEAP_SIZE": "256M"}
    job = Said(clean_env, "tilescale", 2, "tests.gpu.stress", "--launches", "1000", limit=400, **more)
    job.must(job.code == 0 and not re.search(r" [1-9]\d* wrong", job.text), "right results")


@pytest.mark.parametrize("launcher", ["tilescale", "torchrun", "mpirun"])
def test_a_rank_that_is_killed_takes_the_others_with_it(clean_env: dict[str, str], launcher: str):
    mark = f"{launcher}-{os.getpid()}"
    job = program(clean_env, "killed", launcher=launcher, RANKS_OF_A_TEST=mark, TILESCALE_WAIT_TIMEOUT="100")
    job.must_fail("ignal 9")
    until = time.monotonic() + 5
    while living(f"RANKS_OF_A_TEST={mark}") and time.monotonic() < until:
        time.sleep(0.1)
    job.must(not living(f"RANKS_OF_A_TEST={mark}"), "no process that lives on")
