"""Finding and ending the processes of a job, however far they have run from home, and what they left in /dev/shm."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from tilescale.comm import bootstrap
from tilescale.errors import CommError

SHM = Path("/dev/shm")

# prctl(2), <linux/prctl.h>
PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36


def prctl(option: int, value: object) -> None:
    """prctl(2) with one argument, an integer or bytes. Raises CommError where the kernel refuses."""
    libc = _libc()
    if libc.prctl(option, value if isinstance(value, bytes) else ctypes.c_ulong(int(str(value))), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise CommError(f"prctl({option}) failed: {os.strerror(code)}", expected="Linux 3.4 or newer")


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "prctl"):
        raise CommError("ranks cannot be tied to their launcher here", expected="Linux, which has prctl(2)")
    return libc


def tie_to_parent() -> Callable[[], None]:
    """A function for the child, between fork and exec: the kernel will kill it when this process, its parent, is gone.

    The setting survives exec and is not inherited, so each rank needs it itself, before it runs code of its own; there is no
    other place for it than here. The parent must fork from a thread that lives as long as itself: the signal is tied
    to the thread (prctl(2)).
    """
    libc, parent = _libc(), os.getpid()
    number = ctypes.c_ulong(signal.SIGKILL)

    def tie() -> None:
        # The second check is for a parent that died before the first call.
        if libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0) != 0 or os.getppid() != parent:
            os._exit(127)

    return tie


def find(job: str, sessions: Iterable[int], ancestor: int | None = None) -> list[int]:
    """Living processes of a job: in one of its sessions, with its name in their environment, or below ``ancestor``.

    Each rank leads a session, which its descendants leave only by setsid(2); then they still carry TILESCALE_JOB, unless
    they cleared it; then they are still below the launcher, which adopts orphans (PR_SET_CHILD_SUBREAPER). This
    process is never listed.
    """
    mark, leaders, me = f"\0TILESCALE_JOB={job}\0".encode(), set(sessions), os.getpid()
    parents: dict[int, int] = {}
    found = set()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        pid = int(entry.name)
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                # After the name in parentheses, which may hold anything: state, ppid, pgrp, session (proc(5)).
                state, ppid, _, session = file.read().rpartition(b")")[2].split()[:4]
            if state in b"ZX" or pid == me:
                continue
            parents[pid] = int(ppid)
            if int(session) in leaders or mark in b"\0" + _environ(pid):
                found.add(pid)
        except OSError:
            continue  # it ended meanwhile
    if ancestor is not None:
        found.update(pid for pid in parents if bootstrap.below(pid, ancestor, parents))
    return sorted(found)


def _environ(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read()
    except PermissionError:
        return b""  # another user's: not ours


def send(pids: Iterable[int], number: int) -> None:
    """A signal to each process that is still there."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


def end(living: Callable[[], list[int]], patience: float, limit: float = 1.0) -> tuple[set[int], list[int]]:
    """Waits ``patience`` seconds for the processes to end by themselves, then kills until none is left.

    Returns those that it killed, and those that still live ``limit`` seconds later (in the kernel, uninterruptible).
    """
    begin, killed = time.monotonic(), set[int]()
    while pids := living():
        waited = time.monotonic() - begin
        if waited > patience + limit:
            return killed, pids
        if waited >= patience:
            send(pids, signal.SIGKILL)
            killed.update(pids)
        time.sleep(0.01)
    return killed, []


def sweep(job: str) -> None:
    """Removes what the job's ranks left in /dev/shm: ``ts-<job>-*``."""
    if not SHM.is_dir():
        return
    for path in SHM.glob(f"ts-{job}-*"):
        path.unlink(missing_ok=True)
