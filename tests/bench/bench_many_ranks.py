"""Many ranks on few processors: examples/05_ring_shift.py as 16, 32 and 64 ranks, forked from one process and
each a process of its own.

Recorded: seconds by the clock and of the processors (user and system, of the whole job), MiB a rank at its
largest (proportional set size: what ranks share counts once), and how calm the machine was: its load before
and after, and how many other tasks wanted to run. The first run of each size, in which one rank checks the
kernel for so many ranks, is not measured. Bars: 10, 20 and 40 s, 60 MiB a rank.

    python -m tests.bench.bench_many_ranks
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tests.bench.record import record

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "05_ring_shift.py"
BARS = {16: 10.0, 32: 20.0, 64: 40.0}
MIB_A_RANK = 60.0


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def proportional(pid: int) -> float:
    """MiB of a process, of shared pages its part."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


class Largest(threading.Thread):
    """Watches a job: the most that its processes take together."""

    def __init__(self, pid: int):
        super().__init__(daemon=True)
        self.pid, self.mib, self.over = pid, 0.0, False

    def run(self) -> None:
        while not self.over:
            self.mib = max(self.mib, sum(map(proportional, [self.pid, *children(self.pid)])))
            time.sleep(1.0)  # a look costs each process tens of milliseconds in the kernel


def measure(count: int, forked: bool, watched: bool) -> dict[str, float]:
    """One job. The memory is watched in a run of its own, since that takes time."""
    env = {**os.environ, "TILESCALE_FORK": str(int(forked)), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tilescale", "launch", "-n", str(count), str(EXAMPLE)]
    begin = time.perf_counter()
    job = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
    watcher = Largest(job.pid)
    if watched:
        watcher.start()
    _, status, used = os.wait4(job.pid, 0)
    seconds = time.perf_counter() - begin
    watcher.over = True
    assert status == 0
    return {"s": seconds, "cpu_s": used.ru_utime + used.ru_stime, "mib_a_rank": watcher.mib / count}


def calm() -> dict[str, float]:
    """The load of a minute, and how many tasks run or want to just now, this one left out."""
    one, _, _, tasks, _ = Path("/proc/loadavg").read_text().split()
    return {"load": float(one), "running": int(tasks.partition("/")[0]) - 1}


def figures(counts: list[int]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for count in counts:
        measure(count, True, False)
        before = calm()
        made = measure(count, True, False)
        after = calm()
        memory = measure(count, True, True)["mib_a_rank"]
        found[str(count)] = {
            **made,
            "mib_a_rank": memory,
            "bar_s": BARS[count],
            "bar_mib": MIB_A_RANK,
            "before": before,
            "after": after,
        }
    smallest = counts[0]
    found["processes"] = {"ranks": smallest, **measure(smallest, False, True), "after": calm()}
    return found


def test_many_ranks() -> None:
    made = figures(sorted(BARS))
    record("many_ranks", made)
    print(made)


if __name__ == "__main__":
    test_many_ranks()
