"""What unit tests share: a wait that never ends is a failure within seconds, not within the two minutes that
users have; CUDA C++ is compiled by NVRTC where it is there; LLVM optimises few kernels."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("TILESCALE_WAIT_TIMEOUT", "10")


@functools.cache
def has_nvrtc() -> bool:
    """Whether NVRTC is here, with the headers that some kernels include."""
    from tilescale.compiler.cuda import nvrtc, toolchain
    from tilescale.errors import TileError

    try:
        nvrtc.version()
    except TileError:
        return False
    return toolchain.headers() is not None


@pytest.fixture(autouse=True, scope="module")
def compiler_of_most() -> Iterator[None]:
    """NVRTC compiles a kernel in half of nvcc's time. Tests of what nvcc makes ask for nvcc; a run of all with
    TILESCALE_CUDA_COMPILER=nvcc has it everywhere."""
    with pytest.MonkeyPatch.context() as patch:
        if "TILESCALE_CUDA_COMPILER" not in os.environ and has_nvrtc():
            patch.setenv("TILESCALE_CUDA_COMPILER", "nvrtc")
        yield


@pytest.fixture(autouse=True)
def optimised_where_it_counts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """To optimise a kernel takes LLVM longer than all that a test does with it, and what it optimises was
    vectorised by our passes. So that is left to the tests of the CPU target, and to those that are slow or
    marked as optimised; tests/property and tests/fuzz have it everywhere, and so does a run of all with
    TILESCALE_CPU_OPTIMIZE=1."""
    asked = request.node.get_closest_marker("slow") or request.node.get_closest_marker("optimised")
    of_cpu = request.path.is_relative_to(Path(__file__).parent / "cpu")
    if "TILESCALE_CPU_OPTIMIZE" not in os.environ and not asked and not of_cpu:
        monkeypatch.setenv("TILESCALE_CPU_OPTIMIZE", "0")
