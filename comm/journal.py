"""What a launcher of ours and its ranks write down of who ended, in order: ``/dev/shm/ts-<job>-log``.

The launcher makes the file, and its sweep removes it; ranks under other launchers have none. Lines are
appended by single writes:

- ``left R``, ``stop R`` by rank R (tilescale/native/heap.c), before any other rank can learn of it. So where
  ranks fail because one of them did, its line comes first, whichever process ends first.
- ``ended R`` by the launcher: the process is gone. Ranks that wait in init() for R need not wait for its time
  limit.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def path(job: str) -> Path:
    """Where the journal of a job lies."""
    return Path(f"/dev/shm/ts-{job}-log")


def ended(job: str) -> set[int]:
    """The ranks whose processes the launcher has seen end; none where the job has no journal."""
    with contextlib.suppress(OSError):
        return {
            int(line.split()[1]) for line in path(job).read_text().splitlines() if line.startswith("ended ")
        }
    return set()


class Journal:
    """The launcher's end. Without /dev/shm there is nothing to write to, and no rank that could share
    memory."""

    def __init__(self, job: str, shared: bool = False):
        """``shared``: launchers of several nodes on this machine have one, made by the first of them."""
        self._unfinished = b""
        self._fd = -1
        #: the ranks that the lines read so far say have left or stopped the job, in order; and have ended
        self.told: list[int] = []
        self.gone: set[int] = set()
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | (0 if shared else os.O_EXCL)
        with contextlib.suppress(OSError):
            self._fd = os.open(path(job), flags, 0o600)

    def note_end(self, rank: int) -> None:
        """The process of ``rank`` has ended."""
        with contextlib.suppress(OSError):
            os.write(self._fd, b"ended %d\n" % rank)

    def read(self) -> list[int]:
        """The ranks that have left or stopped the job since the last call, first to last; a rank may come
        twice."""
        data = b""
        with contextlib.suppress(OSError):
            while piece := os.read(self._fd, 1 << 16):
                data += piece
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        self.gone.update(int(line.split()[1]) for line in lines if line.startswith(b"ended "))
        new = [int(line.split()[1]) for line in lines if line.startswith((b"left ", b"stop "))]
        self.told += new
        return new

    def close(self) -> None:
        """Closes it; the sweep of the job removes the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
