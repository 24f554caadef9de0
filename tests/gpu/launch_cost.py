"""``python -m tests.gpu.launch_cost``: how much of a call's time on the host is the driver's, and how much is
ours.

Four kinds of rows, each the median (and the least) of bursts that fit the GPU's queue:

- the driver alone, called from C: cuLaunchKernel and cuLaunchKernelEx, of a CUkernel (what the launcher
  holds: it serves every context) and of the CUfunction that it resolves to, the arguments one by one or
  packed in one buffer, on the default stream and on one of its own; and cuCtxGetDevice, which the launcher
  asks in every call;
- a call of a kernel with tensors of no elements: all that is ours (Python, tvm-ffi, the checks), without the
  launch;
- the whole call, with the same tensors and with others each time, a loop in Python around nothing, and
  torch's own addition;
- the time from launch to launch on the GPU, of launches that lie ready.

Calls are launched by graphs (tilescale/native/gpu_graph.c), with ``TILESCALE_LAUNCH_GRAPHS=0`` by
cuLaunchKernelEx. The rows go to launch_cost.json, or launch_cost_plain.json without graphs, in
tests/bench/results, or in $OUT.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tilescale
from tests.bench.record import record
from tests.gpu.test_launch import add
from tilescale import native
from tilescale.compiler import driver
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.compiler.cuda.toolchain import compile_cubin
from tilescale.cuda import architecture

HERE = Path(__file__).resolve().parent
BURST, ROUNDS = 400, 50
CALLS = (
    "cuLaunchKernel(CUfunction)",
    "cuLaunchKernelEx(CUfunction)",
    "cuLaunchKernel(CUkernel)",
    "cuLaunchKernelEx(CUkernel)",
    "cuLaunchKernel(CUfunction, packed)",
    "cuLaunchKernel(CUkernel, packed)",
    "cuCtxGetDevice",
)


def library(folder: str) -> Any:
    path = Path(folder, "launch_cost.so")
    subprocess.run(
        [*native.compiler(), "-O2", "-shared", "-fPIC", str(HERE / "launch_cost.c"), "-o", str(path), "-ldl"],
        check=True,
    )
    made = ctypes.CDLL(str(path))
    made.cost.restype = ctypes.c_double
    return made


ROWS: dict[str, dict[str, float]] = {}


def show(name: str, median: float, least: float) -> None:
    ROWS[name] = {"ns": round(median), "least_ns": round(least)}
    print(f"{name:58s} {median:8.0f} ns (least {least:.0f})")


def of_the_driver() -> None:
    """The rows of the driver alone, for the elementwise kernel on 1000 numbers."""
    kernel = driver.lower(add.trace(), f"cuda:{architecture()}").own
    code = compile_cubin(print_kernel(kernel), architecture()).code
    tensors, n = [torch.zeros(1000, device="cuda") for _ in range(3)], ctypes.c_int32(1000)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in tensors]
    given = [n if source.kind == "symbol" else pointers[source.index] for source in kernel.sources]
    values = (ctypes.c_void_p * len(given))(*(ctypes.addressof(v) for v in given))
    packed = b""
    for v in given:  # each at a multiple of its size
        packed += bytes(-len(packed) % ctypes.sizeof(v)) + bytes(v)
    buffer = ctypes.create_string_buffer(packed, len(packed))
    with tempfile.TemporaryDirectory() as folder:
        lib = library(folder)
        failed = lib.prepare(code, kernel.name.encode())
        if failed:
            raise RuntimeError(f"launch_cost.c:{failed}: the driver refused")
        own = torch.cuda.Stream()
        for where, stream in (("default stream", 0), ("own stream", own.cuda_stream)):
            for what, name in enumerate(CALLS if stream == 0 else CALLS[:-1]):
                least = ctypes.c_double()
                median = lib.cost(
                    what,
                    1,
                    kernel.threads,
                    kernel.shared_bytes,
                    ctypes.c_void_p(stream),
                    values,
                    buffer,
                    ctypes.c_size_t(len(packed)),
                    BURST,
                    ROUNDS,
                    ctypes.byref(least),
                )
                if median < 0:
                    raise RuntimeError(f"{name} failed")
                show(f"driver, {where}: {name}", median, least.value)


def of_a_call() -> None:
    """The rows with Python in them."""
    from tests.gpu.smoke import host_ns

    a, b, c = (torch.randn(1000, device="cuda") for _ in range(3))
    nothing = torch.empty(0, device="cuda")
    x, y, z = nothing, nothing.clone(), nothing.clone()
    run, own = tilescale.compile(add, target="cuda"), torch.cuda.Stream()
    run(a, b, c)
    turns = itertools.cycle([[torch.randn(1000, device="cuda") for _ in range(3)] for _ in range(BURST)])
    rows: dict[str, Callable[[], Any]] = {
        "Python: a lambda around nothing": lambda: None,
        "ours without the launch: kernel(x, y, z) of no elements": lambda: run(x, y, z),
        "whole: kernel(a, b, c)": lambda: run(a, b, c),
        "whole: other tensors each time": lambda: run(*next(turns)),
        "whole: torch.add(a, b, out=c)": lambda: torch.add(a, b, out=c),
    }
    for name, call in rows.items():
        show(name, *host_ns(call, BURST, ROUNDS))
    with torch.cuda.stream(own):
        show(
            "whole, own stream: a lambda around the stream",
            *host_ns(lambda: torch.cuda.current_stream(), BURST, ROUNDS),
        )
        show(
            "whole, own stream: kernel(x, y, z) of no elements", *host_ns(lambda: run(x, y, z), BURST, ROUNDS)
        )
        show("whole, own stream: kernel(a, b, c)", *host_ns(lambda: run(a, b, c), BURST, ROUNDS))
    print(
        "torch hands tensors over by",
        "its C exchange"
        if hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
        else "__dlpack__, which is slow",
    )


def of_the_gpu() -> None:
    """The GPU's time from one launch to the next, where launches lie ready: each waits for the one in front
    of it."""
    for n in (1000, 1_500_000):
        a, b, c = (torch.randn(n, device="cuda") for _ in range(3))
        run, other = tilescale.compile(add, target="cuda"), [torch.randn(n, device="cuda") for _ in range(10)]
        samples: dict[str, list[float]] = {"the same tensors": [], "others each time": []}
        for _ in range(20):
            for name, taken in samples.items():
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda._sleep(6_000_000)
                start.record()
                for k in range(BURST):
                    run(a, b, c if name == "the same tensors" else other[k % 10])
                end.record()
                end.synchronize()
                taken.append(start.elapsed_time(end) / BURST * 1e6)
        for name, taken in samples.items():
            show(f"GPU, launches of {n} elements, {name}", statistics.median(taken), min(taken))


def main() -> None:
    of_the_driver()
    of_a_call()
    of_the_gpu()
    record("launch_cost_plain" if os.environ.get("TILESCALE_LAUNCH_GRAPHS") == "0" else "launch_cost", ROWS)


if __name__ == "__main__":
    main()
