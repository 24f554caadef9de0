"""Kernels of the target "auto" on a machine that may have a GPU: whose memory the first call's tensors lie in
decides what is compiled.

An `Undecided` becomes a kernel of its target in place, by taking over its class and its attributes. So who
holds it holds that kernel from then on, and calls go the same way and cost the same as if the target had been
named.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tilescale.devices import device_of, machine
from tilescale.kernel import Kernel

if TYPE_CHECKING:
    from tilescale.compiler.ir.program import TileProgram

_OWN = frozenset({"__class__", "__dict__", "_make", "_trace", "_lock", "program", "has_program"})


class Undecided(Kernel):
    """A `Kernel` that is not compiled yet. A call decides by its tensors; without any, or where something
    else is asked of the kernel (its source, a report), the machine does. Later calls with tensors of the
    other kind run a second kernel, compiled for those."""

    def __init__(self, make: Callable[[str], Kernel], trace: Callable[[], TileProgram]):
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

    def program(self) -> TileProgram:
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

        # What was said of it (a tuner's choice) stays. The lock goes last: who finds none finds a kernel of
        # its target.
        kernel.__dict__.update(made.__dict__ | kernel.__dict__, elsewhere=elsewhere)
        kernel.__class__ = type(made)  # type: ignore[assignment]
        for name in ("_make", "_trace", "_lock"):
            del kernel.__dict__[name]
