"""compute-sanitizer over small launches of every kernel, on a GPU machine:

    python -m tests.gpu.sanitize [--tool memcheck racecheck synccheck] [--only TEXT …] [--most N] [--jobs N]

compute-sanitizer comes with the CUDA toolkit, or with the wheel nvidia-cuda-sanitizer-api; SANITIZER names it
where it is not found. memcheck finds accesses outside allocations and misaligned ones, racecheck hazards of
shared memory, synccheck barriers that not all of their threads reach. What TMA and wgmma touch racecheck does
not see: that is the emulator's and the simulator's to judge.

Each tool gets one process, which launches all kernels one after the other and prints the name of each; its
exit status is that of the tool. Arguments are made on the host, so that no kernel but ours is looked at.
Before that, ``--jobs`` processes launch everything without a tool and look at the results, which leaves all
compiled kernels in the disk cache; then the tools run side by side. ``--most``: so many of an operation's
small cases. What each tool saw goes to sanitize.json in tests/bench/results, or in $OUT.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from tests.bench.record import record

TOOLS = ("memcheck", "racecheck", "synccheck")
#: exit status of compute-sanitizer where it found something
FOUND = 9
#: seconds a tool
LIMIT = 300
SMALL_GEMMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "float16, transposed": {"dtype": "float16", "trans_a": True, "trans_b": True},
    "float32 out": {"out": "float32", "BM": 128, "BN": 128, "threads": 128},
    "narrow": {"BM": 64, "BN": 48, "BK": 32, "threads": 128, "stages": 3},
    "persistent": {"BM": 64, "BN": 64, "threads": 128, "stages": 3, "blocks": 3, "panel": 2},
}


def launches(most: int, checked: bool) -> dict[str, Callable[[], None]]:
    """Name → one small launch; ``checked``: its result is compared with the reference."""
    from tests.gpu.device import run
    from tests.gpu.gemms import gemm
    from tests.unit.cuda.corpus import example
    from tests.unit.cuda.emulated import data, empty, same
    from tilescale.compiler.checks.run import launch

    made: dict[str, Callable[[], None]] = {}

    def add(name: str, build: Callable[[], Any], args: Callable[[], dict[str, Any]]) -> None:
        def once() -> None:
            kernel, given = build(), args()
            got, want = run(kernel, given), launch(kernel, 1, given).arrays[0]
            for key, array in got.items():
                same(array, want[key], key, False)

        made[name] = once

    M, N, K = 136, 264, 200
    for name, options in SMALL_GEMMS.items():
        dtype = options.get("dtype", "bfloat16")
        a, b = ((K, M), (N, K)) if options.get("trans_a") else ((M, K), (K, N))
        add(
            f"gemm, {name}",
            lambda options=options: gemm(M, N, K, **options),
            lambda a=a, b=b, dtype=dtype, out=options.get("out", dtype): {
                "A": data(a, dtype, 1),
                "B": data(b, dtype, 2),
                "C": empty((M, N), out),
            },
        )
    f32 = "float32"
    examples: tuple[tuple[str, Any, Any, dict[str, tuple[int, ...]]], ...] = (
        ("01_vector_add", (1000,), {}, dict.fromkeys("ABC", (1000,))),
        ("02_gemm", (133, 150), {}, {"A": (140, 150), "B": (150, 133), "C": (140, 133)}),
        ("03_softmax", (9, 700), {}, {"X": (9, 700), "Y": (9, 700)}),
        ("04_flash_attention", (1, 2, 130, 64), {"causal": True}, dict.fromkeys("QKVO", (1, 2, 130, 64))),
    )
    for name, constants, options, shapes in examples:
        add(
            name, lambda n=name, c=constants, o=options: example(n, c, o),
            lambda shapes=shapes: {p: data(s, f32, k) for k, (p, s) in enumerate(shapes.items())},
        )  # fmt: skip
    return {**made, **_of_ops(most, checked)}


def _of_ops(most: int, checked: bool) -> dict[str, Callable[[], None]]:
    """The small cases of tilescale.ops, ``most`` of each from all over its list."""
    from tilescale.ops import MODULES, load

    made: dict[str, Callable[[], None]] = {}
    for module in MODULES:
        op = load(module)
        small = [c for c in op.cases if c.small]
        for case in small[:: -(-len(small) // most)]:

            def once(op: Any = op, case: Any = case) -> None:
                from tilescale.ops.case import as_tuple, worst

                held = {
                    k: v.cuda() if isinstance(v, torch.Tensor) else v
                    for k, v in op.draw(**case.shape, device="cpu").items()
                }
                got = as_tuple(op.run(**held))
                if checked:  # what may be off depends on the device, so torch's kernels compute the reference there: not under a tool
                    for g, want in zip(got, op.reference(**held), strict=True):
                        assert worst(g, want) <= 1

            made[f"{op.name}: {case}"] = once
    return made


def child(only: list[str], most: int, share: int, jobs: int, checked: bool) -> int:
    """All launches (or every ``jobs``-th) in this process; how many went wrong."""
    bad = 0
    wanted = [
        (name, once)
        for name, once in launches(most, checked).items()
        if not only or any(text in name for text in only)
    ]
    for name, once in wanted[share::jobs]:
        try:
            once()
            torch.cuda.synchronize()
            if not checked:
                print(f"  {name}: ran", flush=True)
        except Exception as error:  # noqa: BLE001  # the next kernel shall have its turn
            bad += 1
            print(f"  {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    return bad


def find_sanitizer() -> str | None:
    """compute-sanitizer: SANITIZER's, the PATH's, the toolkit's, that of NVIDIA's wheel; None where there is
    none."""
    spec = importlib.util.find_spec("nvidia")
    wheels = (
        [
            str(p)
            for folder in (spec.submodule_search_locations or ())
            for p in Path(folder).glob("*/compute-sanitizer/compute-sanitizer")
        ]
        if spec
        else []
    )
    homes = [
        os.environ.get("SANITIZER", ""),
        "compute-sanitizer",
        "/usr/local/cuda/bin/compute-sanitizer",
        *wheels,
    ]
    return next(filter(None, (shutil.which(h) for h in homes if h)), None)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tool", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--most", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--child", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--check", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child >= 0:
        return min(child(args.only, args.most, args.child, args.jobs, args.check), FOUND - 1)
    program = find_sanitizer()
    if program is None:
        print(
            "there is no compute-sanitizer here: pip install nvidia-cuda-sanitizer-api, or set SANITIZER to its path",
            file=sys.stderr,
        )
        return 2
    again = [
        sys.executable,
        "-m",
        "tests.gpu.sanitize",
        "--most",
        str(args.most),
        *(["--only", *args.only] if args.only else []),
    ]
    first = [
        subprocess.Popen([*again, "--child", str(k), "--jobs", str(args.jobs), "--check"])
        for k in range(args.jobs)
    ]
    worst = max(p.wait() for p in first)
    print(
        f"without a tool: {'right' if worst == 0 else f'{worst} launches of a process went wrong'}",
        flush=True,
    )
    with ThreadPoolExecutor(len(args.tool)) as pool:
        done = dict(
            zip(args.tool, pool.map(lambda tool: under(tool, program, again), args.tool), strict=True)
        )
    record("sanitize", {"checked without a tool": "right" if worst == 0 else "wrong", **done})
    return max(worst, *(figures["status"] for figures in done.values()))


def under(tool: str, program: str, again: list[str]) -> dict[str, Any]:
    """All launches under a tool: its exit status, 124 where it took too long, and which kernels it saw
    run."""
    command = [
        program,
        "--tool",
        tool,
        "--error-exitcode",
        str(FOUND),
        "--target-processes",
        "all",
        "--print-limit",
        "20",
        *again,
    ]
    command += ["--child", "0", "--jobs", "1"]
    try:
        done = subprocess.run(
            command, timeout=LIMIT, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        code, said = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        code, said = 124, (error.stdout or b"").decode(errors="replace")
    ran = [line.strip().removesuffix(": ran") for line in said.splitlines() if line.endswith(": ran")]
    print(
        f"{tool}:\n{said}{tool}: {'clean' if code == 0 else f'status {code}'}, {len(ran)} launches",
        flush=True,
    )
    return {"status": code, "ran": ran}


if __name__ == "__main__":
    sys.exit(main())
