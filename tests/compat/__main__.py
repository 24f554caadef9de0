"""Measures how far TileLang's programs run after their import lines are changed.

    python -m tests.compat CHECKOUT [--only GLOB…] [--table FILE.md] [--json FILE] [--device cpu|cuda]
    python -m tests.compat CHECKOUT --device cuda --no-compile --jobs 12 --total-limit 540 --speed --peer-site FOLDER

Every example of the checkout is copied with ``tilelang`` replaced by ``tilescale`` in its import lines, and
nothing else. In a process of its own each is imported and run with tensors that have no data, so that every
kernel that it makes is compiled for sm_90a (``--nvcc``: by nvcc, too). With ``--device`` it is also run for
real, and counts as right where its own check says so. Results are kept by the hash of the file and of this
tree, so that a second call only repeats what has changed or was not done when ``--total-limit`` was over.

``--peer-site``: the programs as they were run, too, under the TileLang in that folder. ``--speed``: what programs
measure is measured in the same way under both (figures.py), each with the GPU to itself.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.bench.record import record
from tests.compat import child, programs
from tests.compat.programs import Program
from tests.compat.runs import ROOT, Event, Job, Runner
from tests.compat.table import recorded, right_of, rows_of, summary, table


def tree_hash() -> str:
    """What decides the result beside the program."""
    digest = hashlib.blake2b(digest_size=8)
    for folder in ("tilescale", "compiler", "comm", "tests/compat"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".cuh", ".h", ".c") and "__pycache__" not in path.parts:
                digest.update(path.as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def chosen_programs(patterns: list[str], found: list[Program]) -> list[Program]:
    """Those that fit one of the patterns; a pattern that begins with @ is a file of patterns, one a line."""
    every = [
        line.strip()
        for p in patterns
        for line in (Path(p[1:]).read_text().splitlines() if p.startswith("@") else [p])
    ]
    return [p for p in found if any(fnmatch.fnmatch(p.path, pattern) for pattern in every if pattern)]


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m tests.compat", description="TileLang's programs, run by TileScale."
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument(
        "--only",
        nargs="+",
        default=["*"],
        help="programs whose path within examples/ fits a pattern; @FILE: patterns of a file, one a line",
    )
    parser.add_argument("--table", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--record", help="keep the figures as tests/bench/results/NAME.json, or in $OUT")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="run the programs for real, too")
    parser.add_argument(
        "--no-compile", action="store_true", help="only run them: nothing is lowered for sm_90a"
    )
    parser.add_argument("--nvcc", action="store_true", help="compile the CUDA text by nvcc, too")
    parser.add_argument("--speed", action="store_true", help="on cuda: then measure, one program at a time")
    parser.add_argument("--peer-site", help="also under the TileLang that is installed in this folder")
    parser.add_argument("--jobs", type=int, default=1, help="programs at a time")
    parser.add_argument("--limit", type=float, default=180, help="seconds for a program")
    parser.add_argument("--total-limit", type=float, default=float("inf"), help="seconds for everything")
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir()) / "tilescale-compat")
    parser.add_argument("--reasons", action="store_true", help="print what kernels wait for, most first")
    return parser


def checked(argv: list[str] | None = None) -> argparse.Namespace:
    parser = arguments()
    chosen = parser.parse_args(argv)
    if chosen.no_compile and not chosen.device:
        parser.error("--no-compile leaves nothing to do without --device")
    if (chosen.speed or chosen.peer_site) and chosen.device != "cuda":
        parser.error("--speed and --peer-site need --device cuda")
    return chosen


def measured(p: Program, results: dict[tuple[str, str], list[Event]]) -> bool:
    """Whether a program is measured: it has run, and called do_bench of a kernel. Tests repeat programs."""
    events = results.get((p.path, "cuda"), ())
    return not p.tests and any(e["kind"] == "speed" for e in events)


def run_all(tried: list[Program], chosen: argparse.Namespace, runner: Runner, lowered: str) -> None:
    """Everything that was asked for, in this order: what can go several at a time, then the measurements. Those
    of one program under both packages follow one another, so that the GPU is in one state."""
    if not chosen.no_compile:
        runner.run(Job(p, lowered) for p in tried)
    if not chosen.device:
        return
    jobs = [Job(p, chosen.device) for p in tried]
    runner.run(jobs)
    if chosen.peer_site:  # a test repeats programs: it only says something new where it fails
        wrong = [p for p in tried if not right_of(runner.results.get((p.path, chosen.device), ()))]
        jobs += (peers := [Job(p, "peer") for p in tried if not p.tests or p in wrong])
        runner.run(peers)
    if chosen.device == "cuda" and runner.jobs > 1:  # they shared the GPU's memory with others
        full = [
            j for j in jobs if "out of memory" in json.dumps(runner.results.get((j.program.path, j.mode)))
        ]
        runner.run(full, at_once=1, again=True)
    if chosen.speed:
        timed = ["time", *(["peer-time"] if chosen.peer_site else [])]
        # More than one at a time: only one has the GPU, the others import meanwhile.
        runner.run(Job(p, mode) for p in tried if measured(p, runner.results) for mode in timed)


def main() -> None:
    chosen = checked()
    start = time.monotonic()
    folder, originals = chosen.keep / "examples", chosen.keep / "originals"
    programs.copy(chosen.checkout, folder)
    if chosen.peer_site:
        programs.copy(chosen.checkout, originals, change=False)
    found = chosen_programs(chosen.only, programs.programs(chosen.checkout / "examples"))
    tried, left = [p for p in found if not p.left_out], [p for p in found if p.left_out]
    tried.sort(key=lambda p: p.tests)  # a test repeats programs
    keep = chosen.keep / tree_hash()
    keep.mkdir(parents=True, exist_ok=True)
    child.preload(chosen.device, chosen.jobs)
    runner = Runner(
        keep, folder, originals, chosen.jobs, chosen.limit, start + chosen.total_limit, chosen.peer_site
    )

    def over(*_: object) -> None:
        runner.until = 0.0

    signal.signal(signal.SIGTERM, over)  # what is done is written all the same
    lowered = "nvcc" if chosen.nvcc else "compile"
    run_all(tried, chosen, runner, lowered)
    rows = rows_of(tried, runner.results, lowered, chosen.device)
    rows.sort(key=lambda r: str(r["file"]))
    if chosen.table:
        chosen.table.write_text(table(rows, left))
    if chosen.json:
        said = {
            mode: {p: e for (p, m), e in runner.results.items() if m == mode} for _, mode in runner.results
        }
        chosen.json.write_text(json.dumps({"rows": rows, "events": said}, indent=1))
    if chosen.record:
        record(chosen.record, recorded(rows))
    if chosen.reasons:
        counts: Counter[str] = Counter()
        for r in rows:
            for kernel in r["waiting"]:
                counts[r["errors"].get(kernel) or f"not reached: {r['error']}"] += 1
        for reason, count in counts.most_common():
            print(f"{count:4d}  {reason}")
    print(summary(rows))
    if time.monotonic() >= runner.until:
        print("time was over: the same call again goes on with what was not run", file=sys.stderr)


if __name__ == "__main__":
    main()
