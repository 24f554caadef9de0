"""`tilescale trace`: an unmodified program's timeline, simulated and real; both say that the same went
between the ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.runtime import with_runtime
from tests.trace_events import validated
from tilescale.launch.cli import commands
from tilescale.launch.trace import merged

PROGRAM = """
import torch
import tilescale, tilescale.language as T
from tilescale import comm

@tilescale.jit
def ring(N, wait=True):
    @T.prim_func
    def main(A: T.SymmTensor((N,), "float32"), inbox: T.SymmTensor((N,), "float32"), got: T.Signal((2,)), B: T.Tensor((2, N), "float32")):
        with T.Kernel(2) as b, T.Scale("device") as rank, n:
            if b == 0:
                T.copy(A, inbox, dst=(rank + 1) % n, signal=got[1])
                T.copy(A, B[0, 0:N], src=(rank + 1) % n)
            else:
                if wait:
                    T.wait(got[1])
                T.copy(inbox, B[1, 0:N], src=rank)
            T.barrier()
    return main

@tilescale.jit
def double(A: T.Tensor((T.dynamic("n"),), "float32")):
    with T.Kernel(1):
        for i in T.Parallel(A.shape[0]):
            A[i] = A[i] * 2

comm.init()
rank, n = comm.rank(), comm.world_size()
a, inbox, got, b = comm.full((64,), rank, torch.float32), comm.empty((64,), torch.float32), comm.signals((2,)), torch.zeros(2, 64)
comm.barrier()
"""
SOUND = """
for _ in range(2):
    ring(64)(a, inbox, got, b)
double(b[0].clone())
assert (b[1] == (rank - 1) % n).all() and (b[0] == (rank + 1) % n).all()
print("sum", float(b.sum()))
"""
FAULTY = "ring(64, False)(a, inbox, got, b)\n"


def program(folder: Path, body: str) -> Path:
    path = folder / "program.py"
    path.write_text(PROGRAM + body)
    return path


def moved(events: list[dict[str, Any]]) -> Counter:
    """Bytes and messages by (kind, direction, rank, peer), all launches together."""
    out: Counter = Counter()
    for e in events:
        args = e.get("args", {})
        if e["ph"] == "X" and e["cat"] in ("copy", "signal") and args.get("peer", -1) not in (-1, e["pid"]):
            way = (e["cat"], args.get("direction"), e["pid"], args["peer"])
            out[(*way, "bytes")] += args.get("bytes", 8)
            out[(*way, "messages")] += 1
    return out


def test_both_targets_see_the_same_traffic(tmp_path: Path):
    script, simulated, real = program(tmp_path, SOUND), tmp_path / "sim.json", tmp_path / "cpu.json"
    done = CliRunner().invoke(commands, ["trace", "-n", "2", "-o", str(simulated), str(script)])
    assert done.exit_code == 0, done.output
    assert "[0] sum " in done.output and "ring(N=64" in done.output and "waits:" in done.output
    assert f"got at {script}:" in done.output and "4 launches are in" in done.output

    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "TILESCALE_CACHE_DIR": str(with_runtime(tmp_path / "cache")),
    }
    command = [
        sys.executable,
        "-m",
        "tilescale.launch",
        "trace",
        "-n",
        "2",
        "--target",
        "cpu",
        "-o",
        str(real),
        str(script),
    ]
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert "[0] sum " in ran.stdout and f"got at {script}:" in ran.stdout and "µs" in ran.stdout

    events = {"sim": validated(simulated), "cpu": validated(real)}
    counted = {target: moved(found) for target, found in events.items()}
    assert counted["sim"] == counted["cpu"]
    assert (
        counted["sim"]["copy", "put", 0, 1, "bytes"]
        == counted["sim"]["copy", "pull", 1, 0, "bytes"]
        == 2 * 256
    )
    for found in events.values():
        own = [e["args"] for e in found if e["ph"] == "X" and e["cat"] == "copy" and "peer" not in e["args"]]
        assert [args["bytes"] for args in own] == [256] * 4 and all("direction" not in args for args in own)
        kinds = Counter(e["cat"] for e in found if e["ph"] == "X")
        assert kinds["wait"] == 4 and kinds["barrier"] == 8 and kinds["signal"] == 4
        assert 1 <= sum(e["ph"] == "s" for e in found) <= 4
        assert {e["args"]["at"] for e in found if e["ph"] == "X" and e["cat"] == "wait"} == {
            f"{script}:{_line('T.wait')}"
        }


def test_packets_are_counted_alike_on_both_targets(tmp_path: Path):
    example = Path(__file__).resolve().parents[2] / "examples" / "15_small_all_reduce.py"
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "TILESCALE_CACHE_DIR": str(with_runtime(tmp_path / "cache")),
    }
    for target in ("sim", "cpu"):
        out = tmp_path / f"{target}.json"
        line = [
            sys.executable,
            "-m",
            "tilescale.launch",
            "trace",
            "-n",
            "2",
            "--target",
            target,
            "-o",
            str(out),
        ]
        ran = subprocess.run(
            [*line, str(example), "--n", "600"], env=environ, capture_output=True, text=True, timeout=300
        )
        assert ran.returncode == 0 and re.search(r"rank 0 +· +6,144 \(3\)", ran.stdout), ran
        kinds = Counter(e["cat"] for e in validated(out) if e["ph"] == "X")
        assert kinds["put_packets"] == 12 and kinds["get_packets"] == 6, kinds


def _line(text: str) -> int:
    return next(k for k, line in enumerate(PROGRAM.splitlines(), 1) if text in line)


def test_findings_are_told(tmp_path: Path):
    output = tmp_path / "trace.json"
    done = CliRunner().invoke(
        commands, ["trace", "-n", "2", "-o", str(output), str(program(tmp_path, FAULTY))]
    )
    assert done.exit_code == 1 and "race" in done.output
    assert validated(output)


@pytest.mark.parametrize("option", ["--output", "--svg"])
def test_a_folder_that_there_is_not(tmp_path: Path, option: str):
    script = tmp_path / "runs.py"
    script.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    words = ["trace", "-n", "1", "--target", "cpu", option, "/no/such/folder/file", str(script)]
    done = CliRunner().invoke(commands, words)
    assert done.exit_code == 2 and "there is no folder /no/such/folder" in done.output, done.output
    assert not (tmp_path / "ran").exists()


def test_a_missing_program():
    done = CliRunner().invoke(commands, ["trace", "-n", "2", "nowhere.py"])
    assert done.exit_code == 2 and "there is no file 'nowhere.py'" in done.output


def event(
    ns: int,
    phase: str,
    kind: str,
    block: int = 0,
    rank: int = -1,
    nbytes: int = 0,
    text: str = "",
    site: int = 0,
) -> dict[str, Any]:
    return {
        "ns": ns,
        "kernel": "k",
        "block": block,
        "phase": phase,
        "rank": rank,
        "bytes": nbytes,
        "thread": 0,
        "site": site,
        "kind": kind,
        "name": "got" if kind in ("wait", "signal") else "",
        "file": "f.py",
        "line": 3,
        "text": text,
        "waited": 0,
        "device": -1,
    }


def test_logs_of_ranks_become_one_timeline():
    """Two warps of a block wait at once: on two threads, since slices of one thread nest. Arrows only where
    the counter is known."""
    sender = [
        event(2000, "instant", "signal", rank=1, nbytes=8, text="0"),
        event(5000, "instant", "signal", rank=1, nbytes=8),
    ]
    waiter = [
        event(1000, "begin", "wait", text="0"),
        event(1500, "begin", "wait", text="0"),
        event(3000, "end", "wait", text="0"),
        event(3500, "end", "wait", text="0"),
        event(4000, "begin", "wait", site=1),
        event(6000, "end", "wait", site=1),
    ]
    (timeline,) = merged(
        [{"rank": 0, "lost": 0, "events": sender}, {"rank": 1, "lost": 0, "events": waiter}], 2
    )
    waits = sorted(
        (s.start, s.end, timeline.threads[1, s.thread], s.name) for s in timeline.slices if s.kind == "wait"
    )
    assert waits == [
        (0, 2, "block 0", "got[0]"),
        (0.5, 2.5, "block 0 (2)", "got[0]"),
        (3, 5, "block 0", "got"),
    ]
    assert [a.source[2] for a in timeline.arrows] == [1, 1]
    assert timeline.traffic.bytes[0, 1] == 16 and timeline.traffic.messages[0, 1] == 2
    assert timeline.unit == "µs" and timeline.end == 5
