"""``python -m tests.bench.bench_before CHECKOUT``: operations of tilescale.ops, and how long a kernel compiles,
beside those of an earlier checkout.

Both are installed into folders of their own and measured in turn on the machine that runs this: first this one,
then that one, and the other way round in the next turn. An operation's time is taken as its ratio to its first
peer in the same process (bench_ops.py), so that what the machine does meanwhile touches both; ``gain`` is the
ratio now, divided by the ratio before. Compile times are bench_cold_compile.py's of each checkout, one sample at
a time.

Options: ``--modules`` of tilescale.ops, all without; ``--cases``, ``--rounds`` as bench_ops.py has them;
``--turns 2``; ``--cold 7``: samples of compiling, 0 for none; ``--jobs``: processes that compile first.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.bench.record import record

ROOT = Path(__file__).resolve().parents[2]


class Installed:
    """A checkout, installed with its tests into a folder, from where its benchmarks run."""

    def __init__(self, checkout: Path, folder: Path):
        self.folder = folder
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
        copied = folder / "checkout"  # a build writes into what it builds
        left_out = shutil.ignore_patterns(".*", "build", "*.egg-info", "scratch*")
        shutil.copytree(checkout, copied, ignore=left_out)
        subprocess.run([*pip, "--no-build-isolation", "--target", str(folder), str(copied)], check=True)
        shutil.move(copied / "tests", folder / "tests")
        shutil.rmtree(copied)

    def run(self, module: str, *arguments: str, check: bool = True) -> dict[str, Any]:
        """Runs a module of its tests; returns what it has recorded, by name."""
        with tempfile.TemporaryDirectory() as out:
            env = {**os.environ, "OUT": out, "TILESCALE_CACHE_DIR": str(self.folder / "cache")}
            command = [sys.executable, "-m", module, *arguments]
            subprocess.run(command, cwd=self.folder, env=env, check=check)
            return {p.stem: json.loads(p.read_text())["figures"] for p in Path(out).glob("*.json")}


def text(shape: dict[str, Any]) -> str:
    return " ".join(f"{k}={v}" for k, v in shape.items())


def operations(both: dict[str, Installed], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Each case's ratio to its peer, before and now, turn by turn."""
    chosen = ["--cases", *args.cases] if args.cases else []
    if args.jobs:
        for one in both.values():
            of = ["--of", *args.modules] if args.modules else []
            only = ["--only", *args.cases] if args.cases else []
            # What of it cannot be compiled shows below.
            one.run("tests.gpu.compile_ops", "--jobs", str(args.jobs), "--bench", *of, *only, check=False)
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    for turn in range(args.turns):
        for name in (list(both), list(both)[::-1])[turn % 2]:
            made = both[name].run(
                "tests.bench.bench_ops", *args.modules, "--rounds", str(args.rounds), *chosen, check=False
            )
            for operation, figures in made.items():
                for case in figures["cases"]:
                    here = found.setdefault((operation, text(case["shape"])), {"now": [], "before": []})
                    if "failed" not in case:
                        here[name].append(case["kernels"]["tilescale"][f"ratio_to_{case['peer']}"]["median"])
    out = []
    for (operation, shape), ratios in sorted(found.items()):
        line: dict[str, Any] = {"operation": operation, "case": shape, "ratio_to_peer": ratios}
        if all(ratios.values()):
            line["gain"] = statistics.median(ratios["now"]) / statistics.median(ratios["before"])
        print(f"{operation} {shape}: {line.get('gain', 0.0):.3f} {ratios}", flush=True)
        out.append(line)
    return out


def compiling(both: dict[str, Installed], samples: int) -> dict[str, Any]:
    """Milliseconds of each phase of compiling the plain Hopper GEMM, medians over samples taken in turn."""
    held: dict[str, list[dict[str, Any]]] = {name: [] for name in both}
    for sample in range(samples):
        for name in (list(both), list(both)[::-1])[sample % 2]:
            made = both[name].run("tests.bench.bench_cold_compile", "--samples", "1", "--compilers", "nvcc")
            held[name].append(made["cold_compile"]["nvcc"])
    out: dict[str, Any] = {"samples": samples}
    for what in ("first in a process", "imported"):
        out[what] = {}
        for name, runs in held.items():
            phases = {
                p: statistics.median(r[what]["phases_ms"][p] for r in runs)
                for p in runs[0][what]["phases_ms"]
            }
            total = statistics.median(r[what]["median_ms"] for r in runs)
            out[what][name] = {"phases_ms": phases, "median_ms": total}
            print(f"{what}, {name}: {total:.0f} ms: " + ", ".join(f"{p} {v:.1f}" for p, v in phases.items()))
    return out


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--modules", nargs="+", default=[])
    parser.add_argument("--cases", nargs="+", default=[])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--cold", type=int, default=7)
    parser.add_argument("--jobs", type=int, default=0)
    parser.add_argument("--name", default="before", help="of the file with the figures")
    parser.add_argument("--commit", default="", help="what the earlier checkout is, for the file")
    args = parser.parse_args()
    figures: dict[str, Any] = {"before_is": args.commit}
    with tempfile.TemporaryDirectory() as folder:
        both = {
            name: Installed(checkout.resolve(), Path(folder, name))
            for name, checkout in (("now", ROOT), ("before", args.checkout))
        }
        if args.turns:
            figures["operations"] = operations(both, args)
        if args.cold:
            figures["compiling"] = compiling(both, args.cold)
    record(args.name, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
