"""``python -m tests.bench.bench_cold_compile``: how long the plain Hopper GEMM takes from a Python function
to a cubin, and where the time goes.

Each sample is a process of its own with an empty cache. In it a first kernel is compiled, with everything
that is loaded on the way (Python's files, TVM, ours), and then the GEMM with other constants, which is what a
program waits for that compiles several: ``imported``; at last `tilescale.compile`, with the cache and all
that its first call loads. Both with nvcc and, where it is there, NVRTC (``--compilers nvcc nvrtc``). Needs no
GPU. Medians and the least of ``--samples``; the figures go to $OUT/cold_compile.json, or without OUT to
tests/bench/results.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tilescale import native

#: run in a process of its own: seconds by phase, for the first kernel and the second
SAMPLE = """
import json, random, time
start = time.perf_counter()
import tilescale
from tests.gpu.gemms import gemm
marks = [("import tilescale", time.perf_counter() - start)]

def phases(n):
    out, last = [], time.perf_counter()
    def mark(name):
        nonlocal last
        now = time.perf_counter()
        out.append((name, now - last))
        last = now
    program = gemm(n, n, n).trace()
    mark("trace")
    from tilescale.compiler import driver, static
    from tilescale.compiler.cuda import toolchain
    made = driver.backend("cuda:sm_90a")
    mark("import the compiler")
    lowered = driver.lower(program, "cuda:sm_90a")
    mark("passes and lowering")
    static.require(program, world=None)
    mark("static checks")
    printed = made.printed(lowered)
    mark("printing")
    toolchain.compile_cubin(printed, "sm_90a")
    mark("the CUDA compiler")
    return out

sizes = random.sample(range(4, 400), 3)  # NVRTC keeps what it has compiled on disk: no code may be seen twice
first = phases(128 * sizes[0])
second = phases(128 * sizes[1])
begin = time.perf_counter()
tilescale.compile(gemm(*[128 * sizes[2]] * 3), target="cuda:sm_90a")
print(json.dumps({"first": marks + first, "second": second, "compile": time.perf_counter() - begin}))
"""


def samples(compiler: str, count: int) -> dict[str, Any]:
    """Milliseconds: by phase the medians; of the whole (first: with all imports) medians and least."""
    held: list[dict[str, Any]] = []
    for _ in range(count):
        with tempfile.TemporaryDirectory() as cache:
            # The runtime is built once a machine, and not what is measured.
            built = native.library_path().parent
            Path(cache, "native").symlink_to(built)
            root = str(Path(__file__).resolve().parents[2])
            env = os.environ | {"TILESCALE_CUDA_COMPILER": compiler, "TILESCALE_CACHE_DIR": cache}
            env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
            done = subprocess.run(
                [sys.executable, "-c", SAMPLE], env=env, capture_output=True, text=True, cwd=root, check=False
            )
        if done.returncode:
            return {"missing": done.stderr.strip().splitlines()[-1]}
        held.append(json.loads(done.stdout))
    out: dict[str, Any] = {"samples": count}
    for name, key in (("first in a process", "first"), ("imported", "second")):
        runs = [dict(h[key]) for h in held]
        totals = [sum(r.values()) * 1e3 for r in runs]
        out[name] = {
            "phases_ms": {p: statistics.median(r[p] for r in runs) * 1e3 for p in runs[0]},
            "median_ms": statistics.median(totals), "least_ms": min(totals),
        }  # fmt: skip
    calls = [h["compile"] * 1e3 for h in held]
    out["tilescale.compile, imported"] = {"median_ms": statistics.median(calls), "least_ms": min(calls)}
    return out


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--compilers", nargs="+", default=["nvcc", "nvrtc"])
    args = parser.parse_args(argv)
    from tests.bench.record import record

    figures = {compiler: samples(compiler, args.samples) for compiler in args.compilers}
    for compiler, found in figures.items():
        if "missing" in found:
            print(f"{compiler}: {found['missing']}")
            continue
        for name in ("first in a process", "imported"):
            phases = ", ".join(f"{p} {ms:.0f}" for p, ms in found[name]["phases_ms"].items())
            print(
                f"{compiler}, {name}: {found[name]['median_ms']:.0f} ms (least {found[name]['least_ms']:.0f}): {phases}"
            )
        print(
            f"{compiler}, tilescale.compile, imported: {found['tilescale.compile, imported']['median_ms']:.0f} ms"
        )
    record("cold_compile", figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
