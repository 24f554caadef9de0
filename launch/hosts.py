"""`tilescale launch --hosts FILE`: one launcher a line of the file, started by ssh, and the hub they meet
at."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from tilescale import env, lifetime
from tilescale.errors import CommError
from tilescale.launch.nodes import GONE, Hub

#: seconds in which launchers end whose job has failed (ranks.py), and the time that a network takes
ENDING = 10.0
#: names of this machine that no other machine can use
LOCAL = ("localhost", "127.0.0.1")


@dataclass(frozen=True)
class Host:
    """A node: a name for ssh, and how many ranks it gets."""

    name: str
    slots: int


def read(path: Path) -> list[Host]:
    """The nodes that a hosts file names: `HOST slots=N` a line, `#` begins a comment, a host that comes twice
    is two nodes. Raises CommError, naming the line."""
    found = []
    whole = path.read_text(encoding="utf-8", errors="replace")  # a line that is no text is refused below
    for number, line in enumerate(whole.splitlines(), 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = re.fullmatch(r"([\w.@-]+)\s+slots\s*=\s*([1-9]\d*)", text)
        if match is None or match[1].startswith("-"):
            raise CommError(f"{path}:{number}: {text!r}", expected="HOST slots=N, such as `node1 slots=8`")
        found.append(Host(match[1], int(match[2])))
    if not found:
        raise CommError(f"{path} names no host", expected="lines such as `node1 slots=8`")
    return found


def run(program: list[str], them: list[Host], place: tuple[str, int] | None) -> int:
    """Runs ``program`` (with its flags and arguments) on ``them`` and returns the exit code of the job.

    ``place``: where the launchers reach this process; else this host's name and a free port. Every host needs
    this Python and this folder under the same names. Variables TILESCALE_… go along, and PYTHONPATH; the rest
    of the environment is what ssh gives. Raises CommError where nobody can listen there.
    """
    near = all(_address(host) in LOCAL for host in them)
    name, port = place or ("127.0.0.1" if near else socket.gethostname(), 0)
    hub = Hub(len(them), name, port, [_address(host) for host in them])
    job = _Hosts(hub, program, them)
    try:
        return job.run()
    finally:
        job.close()


def _address(host: Host) -> str:
    """Of ssh's user@host."""
    return host.name.rpartition("@")[2]


class _Hosts:
    def __init__(self, hub: Hub, program: list[str], them: list[Host]):
        self.hub, self.program, self.them = hub, program, them
        self.launchers: list[subprocess.Popen[bytes]] = []

    def run(self) -> int:
        for stopper in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(stopper) != signal.SIG_IGN:
                signal.signal(stopper, self._stopped)
        tie = lifetime.tie_to_parent()
        for number in range(len(self.them)):
            command = [*env.SSH.get(), self.them[number].name, self._line(number)]
            try:
                self.launchers.append(
                    subprocess.Popen(
                        command,
                        stdin=None if number == 0 else subprocess.DEVNULL,
                        start_new_session=True,  # Ctrl-C is ours, and the launchers learn of it from the hub
                        preexec_fn=tie,
                    )
                )
            except OSError as error:
                raise CommError(
                    f"{command[0]} cannot be run: {error.strerror}", hint="TILESCALE_SSH"
                ) from None
        while any(launcher.poll() is None for launcher in self.launchers) and not self.hub.failure:
            self.hub.step(0.1)
            self._look()
        patience = (self.hub.failure and self.hub.failure.grace) or 0.0
        end = time.monotonic() + ENDING + patience
        while any(launcher.poll() is None for launcher in self.launchers) and time.monotonic() < end:
            self.hub.step(0.1)
        if self.hub.failure:
            sys.stderr.write(f"tilescale: {self.hub.failure.reason}; all nodes were ended\n")
            return self.hub.failure.code
        return 0 if self.hub.over else GONE

    def close(self) -> None:
        """No process of ours stays; launchers see the hub's end, should they still run."""
        self.hub.close()
        for launcher in self.launchers:
            launcher.kill()
            launcher.wait()

    def _look(self) -> None:
        """An ssh that ended before its launcher came, or with another code than the job's, ends the job."""
        for number, launcher in enumerate(self.launchers):
            if launcher.poll() is not None and number not in self.hub.done and not self.hub.over:
                how = f"exited with code {launcher.returncode}"
                if launcher.returncode < 0:
                    how = f"was killed by signal {-launcher.returncode}"
                self.hub.fail(GONE, f"node {number} ({self.them[number].name}): its launcher {how}")

    def _stopped(self, number: int, frame: FrameType | None) -> None:
        if self.hub.failure is not None:  # asked twice
            self.hub.hurry()
            return
        grace = env.STOP_GRACE.get() if number == signal.SIGTERM else None
        self.hub.fail(128 + number, f"ended by {signal.Signals(number).name}", grace)

    def _line(self, number: int) -> str:
        """What a shell on the host runs."""
        own = (env.JOB.name, env.SSH.name)
        kept = {k: v for k, v in os.environ.items() if k.startswith("TILESCALE_") and k not in own}
        if "PYTHONPATH" in os.environ:
            kept["PYTHONPATH"] = os.environ["PYTHONPATH"]
        place = f"{self.hub.host}:{self.hub.port}"
        words = [
            "env",
            *(f"{k}={v}" for k, v in kept.items()),
            sys.executable,
            "-m",
            "tilescale.launch",
            "launch",
        ]
        words += ["--nnodes", str(len(self.them)), "--node-rank", str(number), "--rendezvous", place]
        words += ["--hub-elsewhere", "-n", str(self.them[number].slots), *self.program]
        return f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(words)}"
