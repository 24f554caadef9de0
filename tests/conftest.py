"""What all tests share: GPU tests need a GPU, benchmarks are marked by their folder, and jobs of ranks have a
time limit."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tilescale.comm import bootstrap

pytest_plugins = ["tilescale.testing"]

# Each process of the tests has a core: threads of torch's and NumPy's own would only wait for one another,
# busily. Both read this when they are first imported, which is after this file.
for library in ("OMP", "OPENBLAS", "MKL"):
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parent.parent

# Compiling makes objects by the million and keeps a hundred thousand others alive (TVM, torch, the tests), which
# the collector would walk through again and again.
gc.set_threshold(200_000, 20, 100)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    # pytest collects ten times before it ends, four seconds of walking through what the tests have left.
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(ROOT).parts[1]
        if folder == "bench":
            item.add_marker("bench")
        if folder in ("gpu", "multigpu"):
            item.add_marker("gpu")
            if not Path("/dev/nvidiactl").exists() and not Path("/dev/kfd").exists():
                item.add_marker(pytest.mark.skip(reason="this machine has no GPU"))


@pytest.fixture(autouse=True, scope="module")
def freed_memory_goes_back() -> Iterator[None]:
    """To the system, behind each file: glibc keeps what is freed between blocks that are in use. One launch on
    the simulator leaves more than a gigabyte so."""
    yield
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@pytest.fixture
def clean_env() -> dict[str, str]:
    """This environment as a person's shell has it: no rank of anything, our variables unset, the checkout
    importable."""
    env = {
        k: v
        for k, v in bootstrap.without_ranks(os.environ).items()
        if not k.startswith(("TILESCALE_", "PYTEST_"))
    }
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    # The commands of the environment that runs the tests (mpiexec, torchrun) come first.
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
    return env


@pytest.fixture
def tilescale_launch(clean_env: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """``tilescale_launch(n, script, *args, env={}, timeout=60)``: runs a job of n ranks, returns code, stdout
    and stderr."""

    def run(n: int, script: object, *args: object, env: dict[str, str] | None = None, timeout: float = 60):
        command = [
            sys.executable,
            "-m",
            "tilescale.launch",
            "launch",
            "-n",
            str(n),
            str(script),
            *map(str, args),
        ]
        return subprocess.run(
            command,
            env=clean_env | (env or {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    return run
