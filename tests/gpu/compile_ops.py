"""``python -m tests.gpu.compile_ops --jobs 12 [--bench] [--of gemm …] [--only TEXT …] [--config BM=128,…]``:
fills the disk cache.

Compiles what tests/gpu/test_ops.py (and, with ``--bench``, tests/bench/bench_ops.py instead) will launch, in
several processes, without launching any of it; arguments are drawn on the GPU, since large ones take long
elsewhere.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from typing import Any

from tests.bench.bench_ops import variants
from tilescale.ops import MODULES, host, load


def compile_only(factory: Any, args: Any, /, **constants: Any) -> None:
    host.kernel(factory, "cuda:sm_90a", **constants)


def share(number: int, jobs: int, args: argparse.Namespace) -> None:
    """Every ``jobs``-th case."""
    host.launch = compile_only
    wanted = [
        (load(m), c, more)
        for m in args.of or MODULES
        for c in load(m).cases
        if (c.bar is not None) == args.bench and (not args.only or any(t in str(c) for t in args.only))
        for more in variants(load(m), args.config).values()
    ]
    for op, case, more in wanted[number::jobs]:
        try:
            op.run(**op.draw(**case.shape, device="cuda"), **more)
        except Exception as error:  # noqa: BLE001  # the test or the benchmark will say it
            print(f"{op.name} {case}: {type(error).__name__}: {str(error)[:300]}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--share", type=int, default=-1)
    parser.add_argument("--bench", action="store_true")
    parser.add_argument("--of", nargs="+", default=[])
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--config", nargs="+", default=[])
    args = parser.parse_args()
    if args.share >= 0:
        share(args.share, args.jobs, args)
        return 0
    start = time.perf_counter()
    command = [sys.executable, "-m", "tests.gpu.compile_ops", *sys.argv[1:]]
    jobs = [subprocess.Popen([*command, "--share", str(k)]) for k in range(args.jobs)]
    codes = [job.wait() for job in jobs]
    print(f"compiled in {time.perf_counter() - start:.1f} s by {args.jobs} processes", flush=True)
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
