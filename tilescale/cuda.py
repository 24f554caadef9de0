"""Kernels of the target ``cuda``: on tensors that lie on an NVIDIA GPU, on the current stream."""

from __future__ import annotations

import atexit
import functools
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from tilescale import log, native
from tilescale.cache import Entry
from tilescale.compiler.cuda import targets
from tilescale.explain import explain, failure
from tilescale.kernel import Kernel

#: how the sites begin at which a kernel can fail
_FAILING = ("assert|", "bounds|", "wait|", "signal|", "copy|", "barrier|", "collective|")


@functools.lru_cache(maxsize=1)
def architecture() -> str:
    """What kernels are compiled for when only "cuda" is said: this machine's first GPU, or Hopper (sm_90a) where there is none, so that
    anyone can compile and read the code."""
    from tilescale.compiler.cuda import toolchain

    found = native.cuda_capability()
    return targets.DEFAULT_ARCH if found is None else toolchain.arch_of(*found)


def code_key(target: str) -> tuple[str, ...]:
    """What decides a kernel's code beside its program, for the cache's key.

    Raises:
        TileError: there is no CUDA compiler.
    """
    from tilescale.compiler.cuda import toolchain

    return (toolchain.fingerprint(target.partition(":")[2]),)


def synchronize() -> None:
    """Waits for the current GPU, like ``torch.cuda.synchronize()``, and names the line where a kernel failed, which torch cannot.

    Raises:
        LaunchError: a kernel failed (T.device_assert, an operand outside its tile, an error of the GPU's own).
    """
    try:
        native.cuda_synchronize()
    except RuntimeError as error:
        raise explain({"name": "a kernel", "loc": None}, (), (), str(error)) from None


@functools.lru_cache(maxsize=1)
def _tell_at_exit() -> None:
    """A failure that only torch has met (an error without a line) is told when the process ends."""

    def tell() -> None:
        text = native.cuda_failure()
        if text:
            print(f"tilescale.errors.LaunchError: {failure(text)}", file=sys.stderr)  # as Python would: the launcher repeats it

    atexit.register(tell)


class CudaKernel(Kernel):
    """A `Kernel` of the target ``cuda``.

    A call returns when the launch is on torch's current stream of the arguments' device; it may be captured in a CUDA graph. Without a
    GPU it raises LaunchError; everything that only looks at the code works.

    Attributes:
        arch: the architecture, such as "sm_90a".
        resources: what ptxas and the launch take: ``registers`` and ``stack`` (bytes) a thread, ``spill_stores`` and ``spill_loads``
            (bytes; not there where the compiler did not tell), ``shared`` and ``dynamic_shared`` (bytes a block), ``threads`` a block;
            ``blocks`` a multiprocessor holds, ``occupancy`` (the share of its threads) and ``bound`` (what limits it), where the
            architecture's limits are known.
    """

    device_type: ClassVar[str] = "cuda"
    sources: ClassVar[tuple[str, ...]] = ("tile", "scheduled", "thread", "cuda", "ptx", "sass")
    default_source: ClassVar[str] = "cuda"

    def _launcher(self, entry: Entry) -> Callable[..., Any]:
        self.arch: str = entry.meta["arch"]
        if self.instrument:
            log.say("warning", f"{self.label}: launches on a GPU log no events (instrument=True has no effect)", once=True)
        desc = struct.pack(f"<{len(entry.desc)}q", *entry.desc)
        sites = "\n".join(entry.sites)
        if any(line.startswith(_FAILING) for line in entry.sites):
            _tell_at_exit()
        return native.make_cuda_kernel(Path(entry.path).read_bytes(), desc, self.label, entry.meta["symbol"], sites)

    @property
    def built_for(self) -> str:
        return f"cuda:{self.arch}"
