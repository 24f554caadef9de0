"""The target ``cuda``, as the runtime sees it: kernels on tensors that lie on an NVIDIA GPU, on the current
stream."""

from __future__ import annotations

import atexit
import functools
import os
import re
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tilescale import native
from tilescale.cache import Entry
from tilescale.device import Device
from tilescale.explain import explain, failure

#: the driver's device file, on Linux and under WSL
FILES = ("/dev/nvidiactl", "/dev/dxg")
#: how the sites begin at which a kernel can fail
_FAILING = ("assert|", "bounds|", "wait|", "signal|", "copy|", "barrier|", "collective|")


@functools.lru_cache(maxsize=1)
def architecture() -> str:
    """What kernels are compiled for when only "cuda" is said: this machine's first GPU, or Hopper (sm_90a)
    where there is none, so that anyone can compile and read the code."""
    return _architecture(native.cuda_capability())


@functools.cache
def _architecture(found: tuple[int, int] | None) -> str:
    from tilescale.compiler.cuda import targets, toolchain

    return targets.DEFAULT_ARCH if found is None else toolchain.arch_of(*found)


def synchronize() -> None:
    """Waits for the current GPU, like ``torch.cuda.synchronize()``, and names the line where a kernel failed,
    which torch cannot.

    Raises:
        LaunchError: a kernel failed (T.device_assert, an operand outside its tile, an error of the GPU's
        own).
    """
    try:
        native.cuda_synchronize()
    except RuntimeError as error:
        raise explain(CUDA, {"name": "a kernel", "loc": None}, (), (), str(error)) from None


def runs_on(arch: str, major: int, minor: int) -> bool:
    """Whether a GPU of a compute capability runs a cubin for ``arch``: one of the same major version and no
    older minor one; where the name ends in "a" that very one (CUDA C++ Programming Guide, "Binary
    Compatibility" and "Architecture-Specific Features")."""
    digits = re.sub(r"\D", "", arch)
    own, least = int(digits[:-1]), int(digits[-1])
    return major == own and (minor == least if arch.endswith("a") else minor >= least)


@functools.lru_cache(maxsize=1)
def _tell_at_exit() -> None:
    """A failure that only torch has met (an error without a line) is told when the process ends."""

    def tell() -> None:
        text = native.cuda_failure()
        if text:
            # As Python would: the launcher repeats it.
            print(f"tilescale.errors.LaunchError: {failure(text)}", file=sys.stderr)

    atexit.register(tell)


class Cuda(Device):
    """NVIDIA's GPUs. A call returns when the launch is on torch's current stream of the arguments' device; it
    may be captured in a CUDA graph. Without a GPU it raises LaunchError; everything that only looks at the
    code works."""

    def load(self, entry: Entry, label: str) -> Callable[..., Any]:
        desc = struct.pack(f"<{len(entry.desc)}q", *entry.desc)
        if any(line.startswith(_FAILING) for line in entry.sites):
            _tell_at_exit()
        return native.make_cuda_kernel(
            Path(entry.path).read_bytes(), desc, label, entry.meta["symbol"], "\n".join(entry.sites)
        )

    def architecture(self) -> str:
        return architecture()

    def code_key(self, arch: str) -> tuple[str, ...]:
        from tilescale.compiler.cuda import toolchain

        return (toolchain.fingerprint(arch),)

    def other_than(self, arch: str) -> str | None:
        gpu = native.cuda_capability()
        return None if gpu is None or runs_on(arch, *gpu) else f"sm_{gpu[0]}{gpu[1]}"

    def may_be_here(self) -> bool:
        """cuInit takes a tenth of a second, and a fork behind it has no GPU."""
        return any(map(os.path.exists, FILES))

    def is_here(self) -> bool:
        """Opens the driver, makes no context."""
        return native.cuda_capability() is not None

    def awaiting(self) -> Callable[[], Any] | None:
        torch = sys.modules.get("torch")
        return torch.cuda.synchronize if torch is not None and torch.cuda.is_initialized() else None


#: DLPack's types of memory: CUDA's and managed
CUDA = Cuda(
    "cuda",
    ("tile", "scheduled", "thread", "cuda", "ptx", "sass"),
    "cuda",
    nicknames=("gpu", "nvidia"),
    arch="sm_90a",
    suffix=".cu",
    memory="cuda",
    where="on a GPU",
    flag="is_cuda",
    dlpack=(2, 13),
    gpu=True,
    absent="no CUDA driver",
)
