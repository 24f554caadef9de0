"""run_ranks: ranks are told apart from what their parent had armed, say where they hang, and end with their
parent."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.ranks.harness import RanksFailed, run_ranks

ROOT = Path(__file__).resolve().parents[2]


def test_ranks_of_a_process_with_a_watchdog() -> None:
    """The watchdog is a thread that the ranks do not have; arming it there once more would wait for it for
    ever."""
    faulthandler.dump_traceback_later(60, file=sys.__stderr__)
    try:
        assert run_ranks(2, os.environ.get, "RANK", timeout=60) == ["0", "1"]
    finally:
        faulthandler.cancel_dump_traceback_later()


def stuck() -> None:
    while os.environ["RANK"] == "1":
        time.sleep(0.01)


def test_a_hanging_rank_says_where() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, stuck, timeout=1)
    (failure,) = caught.value.failures
    assert (failure.rank, failure.kind) == (1, "Timeout")
    assert "in stuck" in failure.trace, failure.trace


SLEEPERS = """
import os, sys, time
from tilescale.testing.processes import run_ranks

def work():
    os.write(1, f"{os.getpid()}\\n".encode())
    time.sleep(60)

run_ranks(2, work)
"""


def test_ranks_end_with_their_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", SLEEPERS], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert parent.stdout is not None
    pids = [int(parent.stdout.readline()) for _ in range(2)]
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    end = time.monotonic() + 10
    while any(running(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.02)
    assert not any(running(pid) for pid in pids)


def running(pid: int) -> bool:
    """Whether a process is there and not only waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
