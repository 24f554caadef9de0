"""Finding and ending the processes of a job, however far they have run from home, and what they left in
/dev/shm."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from tilescale.comm import bootstrap

SHM = Path("/dev/shm")


def find(
    job: str, sessions: Iterable[int], ancestor: int | None = None, node: int | None = None
) -> list[int]:
    """Living processes of a job: in one of its sessions, with its name in their environment, or below
    ``ancestor``. ``node``: the number in the environment, too, where several nodes may be on this machine.

    Each rank leads a session, which its descendants leave only by setsid(2); then they still carry
    TILESCALE_JOB, unless they cleared it; then they are still below the launcher, which adopts orphans
    (PR_SET_CHILD_SUBREAPER). This process is never listed.
    """
    marks = [f"\0TILESCALE_JOB={job}\0".encode()]
    if node is not None:
        marks.append(f"\0NODE_RANK={node}\0".encode())
    leaders, me = set(sessions), os.getpid()
    parents: dict[int, int] = {}
    found = set()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        pid = int(entry.name)
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                # After the name in parentheses, which may hold anything: state, ppid, pgrp, session
                # (proc(5)).
                state, ppid, _, session = file.read().rpartition(b")")[2].split()[:4]
            if state in b"ZX" or pid == me:
                continue
            parents[pid] = int(ppid)
            if int(session) in leaders or _is_marked(pid, marks):
                found.add(pid)
        except OSError:
            continue  # it ended meanwhile
    if ancestor is not None:
        found.update(pid for pid in parents if bootstrap.below(pid, ancestor, parents))
    return sorted(found)


def _is_marked(pid: int, marks: list[bytes]) -> bool:
    environ = b"\0" + _environ(pid)
    return all(mark in environ for mark in marks)


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

    Returns those that it killed, and those that still live ``limit`` seconds later (in the kernel,
    uninterruptible).
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
