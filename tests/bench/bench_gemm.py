"""GEMM 1024³ through the language (examples/02's kernel shape): one thread beside torch.mm on one thread,
call by call in turn; then two threads beside one. float32 and bfloat16. The FMA peak of the core is measured
in the same run.

Bars: float32 at least 1.0 × torch.mm and 60 % of the peak; bfloat16 no slower than float32; two threads 1.7 ×
one.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.bench.record import record

SIZE = 1024
TILES = ((256, 256, 256), (256, 256, 128), (128, 128, 64))
ROUNDS = 15


def gemm(size: int, bm: int, bn: int, bk: int, dtype: str) -> Any:
    import tilescale.language as T

    @T.prim_func
    def main(
        A: T.Tensor((size, size), dtype),
        B: T.Tensor((size, size), dtype),
        C: T.Tensor((size, size), "float32"),
    ):
        with T.Kernel(T.ceildiv(size, bn), T.ceildiv(size, bm), threads=128) as (bx, by):
            a, b = T.alloc_shared((bm, bk), dtype), T.alloc_shared((bk, bn), dtype)
            c = T.alloc_fragment((bm, bn), "float32")
            T.clear(c)
            for k in T.Pipelined(T.ceildiv(size, bk), num_stages=2):
                T.copy(A[by * bm, k * bk], a)
                T.copy(B[k * bk, bx * bn], b)
                T.gemm(a, b, c)
            T.copy(c, C[by * bm, bx * bn])

    return main


def fma_peak() -> float:
    """GFLOP/s of independent fused multiply-adds on one thread: what no GEMM can pass."""
    import ctypes
    import tempfile

    import torch

    from tests.bench.cpu_gemm_tile import peak
    from tilescale.compiler.cpu.codegen import build_shared, host_cpu

    lanes, rounds = host_cpu().lanes("float32"), 1 << 20
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "peak.so"
        build_shared({"peak": peak(rounds)}, path)
        library = ctypes.CDLL(str(path))
    x, scratch = torch.randn(4096), torch.empty(1 << 16)
    best = 0.0
    for _ in range(7):
        start = time.perf_counter()
        library.peak(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(scratch.data_ptr()))
        best = max(best, 2 * 16 * lanes * rounds / (time.perf_counter() - start) / 1e9)
    return best


def measure() -> dict[str, Any]:
    """The figures of this process, whose number of threads the environment says."""
    import torch

    import tilescale

    threads = int(os.environ["TILESCALE_NUM_THREADS"])
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(SIZE, SIZE, generator=generator) for _ in range(2))
    figures: dict[str, Any] = {"threads": threads}
    if threads == 1:
        figures["fma_peak_gflops"] = fma_peak()
    for dtype in ("float32", "bfloat16"):
        x, y = a.to(getattr(torch, dtype)), b.to(getattr(torch, dtype))
        want = x.double() @ y.double()
        for tile in TILES:
            kernel = tilescale.compile(gemm(SIZE, *tile, dtype))
            out, other = torch.full((SIZE, SIZE), float("nan")), torch.empty(SIZE, SIZE, dtype=x.dtype)
            kernel(x, y, out)
            assert (out - want).abs().max() < 1e-3
            ours, theirs = [], []
            for _ in range(ROUNDS):
                start = time.perf_counter()
                kernel(x, y, out)
                middle = time.perf_counter()
                if threads == 1:  # torch's own threads spin for a while behind a call, beside ours
                    torch.mm(x, y, out=other)
                theirs.append(time.perf_counter() - middle)
                ours.append(middle - start)
            mine, ref = statistics.median(ours), statistics.median(theirs)
            figures[f"{dtype} {'×'.join(map(str, tile))}"] = {
                "gflops": 2 * SIZE**3 / mine / 1e9,
                "torch_gflops": 2 * SIZE**3 / ref / 1e9,
                "ratio": ref / mine,
                "ratio_of_best": min(theirs) / min(ours),
                "ms": 1e3 * mine,
                "best_ms": 1e3 * min(ours),
            }
    return figures


def in_process(threads: int) -> dict[str, Any]:
    """`measure` in a process of its own: the number of threads is read once."""
    root = Path(__file__).resolve().parents[2]
    env = os.environ | {"TILESCALE_NUM_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), env.get("PYTHONPATH")]))
    code = "import json; from tests.bench.bench_gemm import measure; print(json.dumps(measure()))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_gemm() -> None:
    one, two = in_process(1), in_process(2)
    best = {
        dtype: max((v for k, v in one.items() if k.startswith(dtype)), key=lambda f: f["gflops"])
        for dtype in ("float32", "bfloat16")
    }
    scaling = {k: one[k]["ms"] / two[k]["ms"] for k in one if "×" in k}
    summary = {
        "float32_ratio_to_torch": best["float32"]["ratio"],
        "float32_fraction_of_peak": best["float32"]["gflops"] / one["fma_peak_gflops"],
        "bfloat16_over_float32": best["bfloat16"]["gflops"] / best["float32"]["gflops"],
        "two_threads_over_one": max(scaling.values()),
    }
    record("gemm", {**summary, "one_thread": one, "two_threads": two, "scaling": scaling})
    print(json.dumps(summary, indent=1))
