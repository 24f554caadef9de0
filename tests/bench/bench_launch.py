"""`tilescale launch -n 4` of an empty script, beside plain `python` of the same script, in turn. Bar: under 1
s."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from tests.bench.record import record

ROUNDS = 9


def seconds(command: list[str], env: dict[str, str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, env=env, check=True, stdin=subprocess.DEVNULL)
    return time.perf_counter() - start


def test_launch(tmp_path: Path) -> None:
    script = tmp_path / "empty.py"
    script.write_text("")
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    ours, plain = [], []
    for _ in range(ROUNDS):
        ours.append(
            seconds([sys.executable, "-m", "tilescale.launch", "launch", "-n", "4", str(script)], env)
        )
        plain.append(seconds([sys.executable, str(script)], env))
    figures = {
        "launch_4_s": statistics.median(ours),
        "python_s": statistics.median(plain),
        "worst_s": max(ours),
    }
    record("launch", {**figures, "ratio": figures["launch_4_s"] / figures["python_s"], "bar_s": 1.0})
    print(figures)
