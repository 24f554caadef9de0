"""Where benchmarks leave their figures: tests/bench/results/NAME.json, with what is needed to measure
again."""

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


def script() -> str:
    """What was started, as it is named from the root."""
    path = Path(sys.argv[0]).resolve()
    return (
        str(path.relative_to(RESULTS.parents[2])) if path.is_relative_to(RESULTS.parents[2]) else sys.argv[0]
    )


def graphics() -> dict[str, Any]:
    """The GPU that torch runs on, and its software; nothing where there is none."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return {}
    found = torch.cuda.get_device_properties(0)
    driver = next((line.split()[-1] for line in _lines("/sys/module/nvidia/version")), "")
    return {
        "gpu": found.name,
        "multiprocessors": found.multi_processor_count,
        "driver": driver,
        "cuda": torch.version.cuda,
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def _module() -> str:
    """What python was asked to run, as a module: where the checkout lies is nobody's business."""
    program, root = Path(sys.argv[0]).resolve(), RESULTS.parents[2]
    if "pytest" in (program.name, program.parent.name) or not program.is_relative_to(root):
        return "pytest"
    parts = program.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__main__" else parts)


def record(name: str, figures: dict[str, Any]) -> Path:
    """Writes ``figures`` (ratios, times with their unit in the key) with date, machine, versions and command;
    returns the file, which lies in $OUT where that is set."""
    versions = {"python": platform.python_version()}
    for package in ("torch", "apache-tvm", "apache-tvm-ffi", "numpy"):
        versions[package] = importlib.metadata.version(package)
    from tilescale.compiler.cpu.codegen import host_cpu

    cpu = host_cpu()
    made = {
        "name": name,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": {
            "processor": processor(),
            "llvm": cpu.name,
            "vector_bytes": cpu.vector_bytes,
            "cores": len(os.sched_getaffinity(0)),
            **graphics(),
        },
        "versions": versions,
        "command": shlex.join(["python", "-m", _module(), *sys.argv[1:]]),
        "figures": figures,
    }
    folder = Path(os.environ.get("OUT") or RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(made, indent=2, ensure_ascii=False) + "\n")
    return path
