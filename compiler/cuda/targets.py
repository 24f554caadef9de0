"""NVIDIA's GPUs as targets, by architecture (CUDA C++ Programming Guide, "Compute Capabilities"; PTX ISA,
"Target ISA Notes")."""

from __future__ import annotations

import functools
import re

from tilescale.compiler.ir.scales import WARP
from tilescale.compiler.ir.target import Target
from tilescale.errors import TileError, TileValueError

DEFAULT_ARCH = "sm_90a"
#: the oldest architecture of CUDA 13's compilers
OLDEST = 75
#: bytes of shared memory that a block may have, by compute capability
SHARED = {
    75: 64 << 10,
    80: 163 << 10,
    86: 99 << 10,
    87: 163 << 10,
    89: 99 << 10,
    90: 227 << 10,
    100: 227 << 10,
    120: 99 << 10,
}


def check_arch(arch: str) -> str:
    """The architecture, if it looks like one.

    Raises:
        TileError: it does not, or no compiler has it any more.
    """
    if not re.fullmatch(r"sm_\d{2,3}[af]?", arch):
        raise TileError(f"the architecture {arch!r}", expected="one such as sm_90a or sm_80")
    if capability(arch) < OLDEST:
        raise TileError(
            f"{arch} is not compiled for: CUDA 13's nvcc and NVRTC begin at sm_{OLDEST}",
            expected=f"sm_{OLDEST} or newer (tensor cores from sm_80 on, TMA and wgmma with sm_90a)",
        )
    return arch


def capability(arch: str) -> int:
    """Ten times the compute capability: 90 of sm_90a."""
    return int(re.sub(r"\D", "", arch))


@functools.cache
def target(arch: str = DEFAULT_ARCH, remote: str = "") -> Target:
    """The GPUs of an architecture, whose ranks reach each other as ``remote`` says (`Target.remote`).

    Raises:
        TileError, TileValueError: an architecture that is not known.
    """
    number = capability(check_arch(arch))
    if number not in SHARED:
        raise TileValueError(
            f"there is no architecture {arch!r}", expected="one of " + ", ".join(f"sm_{n}" for n in SHARED)
        )
    hopper = arch == "sm_90a"  # what is that chip's alone
    newer = number >= 90
    return Target(
        "cuda",
        arch,
        "gpu",
        shared_bytes=SHARED[number],
        wave=WARP,
        named_barriers=True,
        async_copies=number >= 80,
        matrix_products=number >= 80,
        tensor_copies=hopper,
        group_products=hopper,
        counting_barriers=newer,
        proxies=newer,
        moves_registers=newer,
        clusters=newer,
        dependent_launches=newer,
        matrix_stores=newer,
        wide_atomics=newer,
        float8_pairs=number >= 89,
        remote=remote,
    )
