"""Kernels of the target "auto" on a machine that may have a GPU: whose memory the first call's tensors lie in decides what is compiled.

An `Undecided` becomes a kernel of its target in place, by taking over its class and its attributes. So who holds it holds that kernel from
then on, and calls go the same way and cost the same as if the target had been named.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from typing import Any

from tilescale import native
from tilescale.kernel import Kernel

#: the driver's device file, on Linux and under WSL
_DEVICES = ("/dev/nvidiactl", "/dev/dxg")
#: DLPack's device types of memory that a GPU's kernel takes: CUDA's and managed
_GPU = (2, 13)
_OWN = frozenset({"__class__", "__dict__", "_make", "_trace", "_lock", "program", "has_program"})


def may_have_gpu() -> bool:
    """Whether this machine has NVIDIA's driver. A look at files: cuInit takes a tenth of a second, and a fork behind it has no GPU."""
    return any(map(os.path.exists, _DEVICES))


def machine() -> str:
    """What a kernel that no tensor decides for runs on: "cuda" where there is a GPU, else "cpu". Opens the driver, makes no context."""
    return "cuda" if may_have_gpu() and native.cuda_capability() is not None else "cpu"


def device_of(values: Iterable[Any]) -> str | None:
    """"cuda" where a tensor lies on a GPU, "cpu" where none of the tensors does; None without tensors."""
    found = None
    for value in values:
        on_gpu = getattr(value, "is_cuda", None)
        if on_gpu is None and hasattr(value, "__dlpack_device__"):
            on_gpu = int(value.__dlpack_device__()[0]) in _GPU
        if on_gpu:
            return "cuda"
        found = found if on_gpu is None else "cpu"
    return found


class Undecided(Kernel):
    """A `Kernel` that is not compiled yet. A call decides by its tensors; without any, or where something else is asked of the kernel (its
    source, a report), the machine does. Later calls with tensors of the other kind run a second kernel, compiled for those."""

    def __init__(self, make: Callable[[str], Kernel], trace: Callable[[], Any]):
        self._make, self._trace, self._lock = make, trace, threading.RLock()

    def __getattribute__(self, name: str) -> Any:
        if name in _OWN:
            return object.__getattribute__(self, name)
        _decide(self, machine())
        return getattr(self, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _decide(self, device_of((*args, *kwargs.values())) or machine())
        return self(*args, **kwargs)

    def __repr__(self) -> str:
        _decide(self, machine())
        return repr(self)

    has_program = True

    def program(self) -> Any:
        return self._trace()


def _decide(kernel: Undecided, target: str) -> None:
    """The kernel becomes that of the target."""
    lock = kernel.__dict__.get("_lock")
    if lock is None:
        return
    with lock:
        if type(kernel) is not Undecided:
            return  # another thread's call has decided
        make, kept = kernel._make, dict[str, Kernel]()
        made = make(target)

        def elsewhere(other: str) -> Kernel:
            with lock:
                if other not in kept:
                    kept[other] = make(other)
                return kept[other]

        # What was said of it (a tuner's choice) stays. The lock goes last: who finds none finds a kernel of its target.
        kernel.__dict__.update(made.__dict__ | kernel.__dict__, elsewhere=elsewhere)
        kernel.__class__ = type(made)  # type: ignore[assignment]
        for name in ("_make", "_trace", "_lock"):
            del kernel.__dict__[name]


__all__ = ["Undecided", "device_of", "machine", "may_have_gpu"]
