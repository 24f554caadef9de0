"""``python -m tests.bench.bench_ranks 2/2 --launches 1000``: the examples on ranks of GPUs under every
launcher.

A place is RANKS/GPUS: so many ranks on the first so many GPUs. Each job (tests/gpu/ranks.py) compares every
launch with torch. What was measured when the time is up is written, and what was not is named:
tests/bench/results/ranks_gpu.json, or ``--name``.

Ranks that share a GPU are contexts that take turns of a millisecond or two, and whoever waits for another
spins its turn out: 7 ms a launch for two ranks, 20 for four. With ``--mps`` their kernels run side by side, a
hundred times as fast: NVIDIA's multi-process service, in a folder of its own, for the time of this run. Then
several jobs may run ``--beside`` each other.

    python -m tests.bench.bench_ranks 2/1 3/1 4/1 --mps --beside 3 --name ranks_one_gpu
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch  # noqa: F401  # so that the record names the GPU

from tests.bench.record import record
from tests.gpu.jobs import LAUNCHERS, ROOT, Job


def gpus() -> list[str]:
    """The GPUs that this process may use, by the names that CUDA_VISIBLE_DEVICES takes."""
    listed = subprocess.run(
        ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=True,
    )
    found = listed.stdout.split()
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return found if chosen is None else [found[int(c)] if c.isdigit() else c for c in chosen.split(",")]


@contextlib.contextmanager
def service(folder: str, visible: str) -> Iterator[dict[str, str]]:
    """The multi-process service for these GPUs; its clients need what is given in their environment."""
    places = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
    for place in places.values():
        os.mkdir(place)
    env = {**os.environ, **places, "CUDA_VISIBLE_DEVICES": visible}
    subprocess.run(["nvidia-cuda-mps-control", "-d"], env=env, check=True, timeout=20)
    try:
        yield places
    finally:
        subprocess.run(
            ["nvidia-cuda-mps-control"], input="quit -t 1\n", env=env, text=True, timeout=20, check=False
        )
        for log in sorted(Path(folder, "log").glob("*.log")):
            print(f"{log.name}:", *log.read_text(errors="replace").splitlines()[-6:], sep="\n  ", flush=True)


def run(
    launcher: str, ranks: int, env: dict[str, str], given: argparse.Namespace, folder: str, limit: float
) -> dict[str, Any]:
    """The figures of one job, as far as it came."""
    out = Path(folder, f"{launcher}-{ranks}-{time.monotonic_ns()}.json")
    job = Job(
        launcher,
        ranks,
        ["tests.gpu.ranks", "--launches", str(given.launches), "--out", str(out), *given.names],
        env,
    )
    code, said = job.wait(limit)
    if code:
        print("\n".join(line[:250] for line in said.splitlines()[-25:]), flush=True)
    figures = json.loads(out.read_text()) if out.exists() else {}
    return figures | {"exit code": "ended when the time was up" if code == 124 else code}


class Bench:
    """All jobs, some at a time, and their figures."""

    def __init__(self, given: argparse.Namespace, folder: str, beside: dict[str, str]):
        self.given, self.folder, self.beside = given, folder, beside
        self.began, self.gpus, self.lock = time.monotonic(), gpus(), threading.Lock()
        self.figures: dict[str, dict[str, Any]] = {}
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        plain = {
            "TILESCALE_TARGET": "cuda",
            "TILESCALE_HEAP_SIZE": "128M",
            "TILESCALE_WAIT_TIMEOUT": "20",
            "OMP_NUM_THREADS": "2",
        }
        own = {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "PATH": path,
        }
        self.env = plain | os.environ | own

    def job(self, place: str, launcher: str) -> None:
        ranks, count = map(int, place.split("/"))
        shared = self.beside if ranks > count else {}
        env = self.env | {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus[:count])} | shared
        where = f"{ranks} ranks on {count} GPU{'s' if count > 1 else ''}{', side by side (MPS)' if shared else ''}"
        start = time.monotonic()
        left = self.given.seconds - (start - self.began)
        done = (
            run(launcher, ranks, env, self.given, self.folder, left)
            if left > 5
            else {"exit code": "not run: the time was up"}
        )
        variants = [v for v in done.values() if isinstance(v, dict)]
        right = sum(v["right"] for v in variants)
        with self.lock:
            print(
                f"{where}, {launcher}: {right} of {len(variants)} right, {time.monotonic() - start:.1f} s, {done['exit code']}",
                flush=True,
            )
            self.figures.setdefault(where, {})[launcher] = done
            record(self.given.name, self.figures)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("places", nargs="+", help="RANKS/GPUS")
    parser.add_argument("--launchers", nargs="+", choices=list(LAUNCHERS), default=list(LAUNCHERS))
    parser.add_argument("--launches", type=int, default=1000)
    parser.add_argument("--names", nargs="+", default=[], help="how the examples' names begin; default: all")
    parser.add_argument("--seconds", type=float, default=600, help="for all of it")
    parser.add_argument("--mps", action="store_true", help="ranks that share a GPU run side by side")
    parser.add_argument("--beside", type=int, default=1, help="so many jobs at a time")
    parser.add_argument("--name", default="ranks_gpu", help="of the file of results")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the service is ended then too
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder, contextlib.ExitStack() as stack:
        beside = stack.enter_context(service(folder, ",".join(gpus()))) if given.mps else {}
        bench = Bench(given, folder, beside)
        with ThreadPoolExecutor(given.beside) as pool:
            for done in [
                pool.submit(bench.job, place, launcher)
                for place in given.places
                for launcher in given.launchers
            ]:
                done.result()
    jobs = [job for place in bench.figures.values() for job in place.values()]
    return int(any(job["exit code"] != 0 for job in jobs))


if __name__ == "__main__":
    raise SystemExit(main())
