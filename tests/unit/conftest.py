"""What unit tests share: a wait that never ends is a failure within seconds, not within the two minutes that
users have; CUDA C++ is compiled by NVRTC where it is there."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator

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
