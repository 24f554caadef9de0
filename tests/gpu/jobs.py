"""Jobs of several ranks as commands of their launchers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

#: each up to the number of ranks, and what starts a module
LAUNCHERS = {
    "tilescale": ([sys.executable, "-m", "tilescale.launch", "launch", "-n"], ["-m"]),
    "torchrun": (["torchrun", "--standalone", "--nproc-per-node"], ["-m"]),
    "mpirun": (
        ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n"],
        [sys.executable, "-m"],
    ),
}


class Job:
    """A launcher that starts a module as several ranks, from the root of the checkout."""

    def __init__(self, launcher: str, ranks: int, module: Sequence[str], env: dict[str, str]):
        before, behind = LAUNCHERS[launcher]
        self.process = subprocess.Popen(
            [*before, str(ranks), *behind, *module],
            env=env,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def wait(self, limit: float) -> tuple[int, str]:
        """Exit code and all that was printed; the code is 124 where the job had to be ended after ``limit``
        seconds."""
        try:
            said, _ = self.process.communicate(timeout=limit)
            return self.process.returncode, said
        except subprocess.TimeoutExpired:
            return 124, self._end()

    def _end(self) -> str:
        self.process.terminate()  # launchers end their ranks
        try:
            return self.process.communicate(timeout=20)[0]
        except subprocess.TimeoutExpired as error:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            return (error.stdout or b"").decode(errors="replace")
