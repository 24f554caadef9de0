"""Where benchmarks leave their figures: tests/bench/results/NAME.json, with what is needed to measure again."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


def processor() -> str:
    """The processor's name as Linux knows it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def record(name: str, figures: dict[str, Any]) -> Path:
    """Writes ``figures`` (ratios, times with their unit in the key) with date, machine, versions and command; returns the file."""
    versions = {"python": platform.python_version()}
    for package in ("torch", "apache-tvm", "apache-tvm-ffi", "numpy"):
        versions[package] = importlib.metadata.version(package)
    from tilescale.compiler.cpu.codegen import host_cpu

    cpu = host_cpu()
    made = {
        "name": name,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": {"processor": processor(), "llvm": cpu.name, "vector_bytes": cpu.vector_bytes, "cores": len(os.sched_getaffinity(0))},
        "versions": versions,
        "command": shlex.join(["python", "-m", "pytest", *sys.argv[1:]] if "pytest" in sys.argv[0] else ["python", *sys.argv]),
        "figures": figures,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(made, indent=2, ensure_ascii=False) + "\n")
    return path
