"""Processes that end with the one that started them (prctl(2), Linux)."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

from tilescale.errors import CommError

# prctl(2), <linux/prctl.h>
PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36


def prctl(option: int, value: object) -> None:
    """prctl(2) with one argument, an integer or bytes. Raises CommError where the kernel refuses."""
    libc = _libc()
    if (
        libc.prctl(option, value if isinstance(value, bytes) else ctypes.c_ulong(int(str(value))), 0, 0, 0)
        != 0
    ):
        code = ctypes.get_errno()
        raise CommError(f"prctl({option}) failed: {os.strerror(code)}", expected="Linux 3.4 or newer")


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "prctl"):
        raise CommError("ranks cannot be tied to their launcher here", expected="Linux, which has prctl(2)")
    return libc


def tie_to_parent() -> Callable[[], None]:
    """A function for the child, behind fork and in front of any exec: the kernel will kill it when this
    process, its parent, is gone.

    The setting survives exec and is not inherited, so each rank needs it itself, before it runs code of its
    own; there is no other place for it than here. The parent must fork from a thread that lives as long as
    itself: the signal is tied to the thread (prctl(2)).
    """
    libc, parent = _libc(), os.getpid()
    number = ctypes.c_ulong(signal.SIGKILL)

    def tie() -> None:
        # The second check is for a parent that died before the first call.
        if libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0) != 0 or os.getppid() != parent:
            os._exit(127)

    return tie
