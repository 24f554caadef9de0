"""``python -m tests.gpu.smoke``: what this machine has, the GPU tests, and how long the host takes for a call
(`launch_cost`: whose time).

Needs a GPU, its driver, torch with CUDA, nvcc (or cuda-python with NVRTC), a C compiler, and what
pyproject.toml asks for. Further arguments go to pytest: ``python -m tests.gpu.smoke -k launch``.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
NO_TESTS = 5  # pytest's exit status where -k chose none


def machine() -> None:
    """What there is, by name."""
    import torch

    from tilescale import native
    from tilescale.compiler.cuda import nvrtc, toolchain
    from tilescale.errors import TileError

    print(
        "missing:",
        native.cuda_missing() or "nothing",
        "| capability:",
        native.cuda_capability(),
        "| torch",
        torch.__version__,
    )
    for name, ask in (("compiler", toolchain.version), ("NVRTC", nvrtc.version)):
        try:
            print(f"{name}:", ask())
        except TileError as error:
            print(f"{name}:", error.message)
    print("headers:", toolchain.headers())


def host_ns(call: Callable[[], Any], burst: int = 400, rounds: int = 50) -> tuple[float, float]:
    """Nanoseconds of the host a call, median and least over bursts that fit the GPU's queue, so that nothing
    waits for the GPU."""
    import torch

    samples = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        for _ in range(burst):
            call()
        samples.append((time.perf_counter_ns() - start) / burst)
    return statistics.median(samples), min(samples)


def host_time() -> None:
    """A call with three small tensors: ours, allocating its output, eager; and torch's own addition beside
    them."""
    import torch

    import tilescale
    from tests.gpu.test_launch import add, twice

    a, b, c = (torch.randn(1000, device="cuda") for _ in range(3))
    run, made = tilescale.compile(add, target="cuda"), tilescale.compile(add, -1, target="cuda")
    run(a, b, c), made(a, b), twice(a)
    calls = {
        "kernel(a, b, c)": lambda: run(a, b, c),
        "kernel(a, b) -> c": lambda: made(a, b),
        "eager(a) -> b": lambda: twice(a),
        "torch.add(a, b, out=c)": lambda: torch.add(a, b, out=c),
        "torch.empty_like(a)": lambda: torch.empty_like(a),
    }
    for name, call in calls.items():
        median, least = host_ns(call)
        print(f"host time of {name:24s} {median:8.0f} ns (least {least:.0f})", flush=True)
    for target in ("nvcc", "nvrtc"):
        print(f"cold compile of the elementwise kernel, {target}: {cold(target)}", flush=True)


def cold(compiler: str) -> str:
    """Seconds from the traced program to the cubin."""
    import os

    from tests.gpu.test_launch import add
    from tilescale.compiler import driver
    from tilescale.compiler.cuda.printer import print_kernel
    from tilescale.compiler.cuda.toolchain import compile_cubin
    from tilescale.cuda import architecture
    from tilescale.errors import TileError

    was, os.environ["TILESCALE_CUDA_COMPILER"] = os.environ.get("TILESCALE_CUDA_COMPILER", ""), compiler
    try:
        samples = []
        for _ in range(4):
            start = time.perf_counter()
            lowered = driver.lower(add.trace(), f"cuda:{architecture()}")
            middle = time.perf_counter()
            compile_cubin(print_kernel(lowered.own), architecture())
            samples.append((middle - start, time.perf_counter() - middle))
        passes, code = (statistics.median(s[k] for s in samples[1:]) for k in (0, 1))
        return f"{code:.3f} s, after {passes:.3f} s of passes"
    except TileError as error:
        return error.message
    finally:
        os.environ["TILESCALE_CUDA_COMPILER"] = was


def tests(more: list[str]) -> int:
    """Each file in a process of its own: a kernel that fails leaves its process without a GPU, and every
    later test in it fails too."""
    failed = []
    for path in sorted(HERE.glob("test_*.py")):
        line = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", str(path)]
        print(f"---- {path.name}", flush=True)
        code = subprocess.run([*line, *more], check=False).returncode
        if code not in (0, NO_TESTS):
            failed.append(path.name)
    print("failed:", ", ".join(failed) or "nothing", flush=True)
    return len(failed)


def main() -> int:
    machine()
    failed = tests(sys.argv[1:])
    code = subprocess.run(
        [sys.executable, "-c", "from tests.gpu import smoke; smoke.host_time()"], check=False
    ).returncode
    cost = subprocess.run([sys.executable, "-m", "tests.gpu.launch_cost"], check=False).returncode
    return int(bool(failed or code or cost))


if __name__ == "__main__":
    sys.exit(main())
