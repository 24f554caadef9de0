"""The watcher: a small process that outlives a launcher killed by SIGKILL, ends its ranks and sweeps after
it.

The kernel kills the ranks themselves with their launcher (lifetime.tie_to_parent); their descendants and
their files are the watcher's. It is forked before the ranks, sits in a session of its own, out of reach of
what is sent to the launcher's process group or terminal, and reads a pipe whose only other end the launcher
holds: its end of file is the death.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress

from tilescale import lifetime
from tilescale.launch import processes

END = b"end\n"


class Watcher:
    """The launcher's end. The launcher must have one thread only: this forks without exec."""

    def __init__(self, job: str, node: int | None):
        reader, self._pipe = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                _watch(job, node, reader)
                status = 0
            finally:
                os._exit(status)
        os.close(reader)

    def add(self, pid: int) -> None:
        """A rank, leader of its session, has started."""
        self._tell(b"%d\n" % pid)

    def close(self) -> None:
        """The launcher has cleaned up by itself."""
        self._tell(END)
        os.close(self._pipe)
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)

    def _tell(self, line: bytes) -> None:
        # Somebody killed the watcher: then the launcher does what it can alone.
        with suppress(BrokenPipeError):
            os.write(self._pipe, line)


def _watch(job: str, node: int | None, reader: int) -> None:
    os.setsid()
    # The launcher's handlers were inherited: they do nothing but wake it, so here they keep this process from
    # being ended.
    signal.set_wakeup_fd(-1)
    lifetime.prctl(lifetime.PR_SET_NAME, b"tilescale-watch")
    # Only stderr stays open, for the last line; a reader of the launcher's output waits for this process no
    # longer than needed.
    for fd in os.listdir("/proc/self/fd"):
        if int(fd) not in (2, reader):
            with suppress(OSError):
                os.close(int(fd))
    told = b""
    while chunk := os.read(reader, 4096):
        told += chunk
    if told.endswith(END):
        return
    sessions = [int(line) for line in told.split()]
    _, left = processes.end(lambda: processes.find(job, sessions, node=node), patience=0)
    processes.sweep(job)
    more = f", except {left}, which cannot be killed" if left else ""
    with suppress(OSError):
        os.write(2, f"tilescale: the launcher was killed; all ranks were ended{more}\n".encode())
