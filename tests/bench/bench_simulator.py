"""The simulator: the GEMM example on four ranks (bar: 1 s), AG-GEMM of a practical size on eight, a grid of
132 blocks on eight ranks that puts, signals, waits and meets. Medians of a few runs, in turn and against the
adversary; figures are seconds of processor time."""

from __future__ import annotations

import importlib.util
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.bench.record import record
from tilescale.compiler.checks.run import launch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def example(name: str) -> Any:
    (path,) = EXAMPLES.glob(f"{name}_*.py")
    spec = importlib.util.spec_from_file_location(f"bench_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def seconds(kernel: Any, ranks: int, args: dict[str, Any], rounds: int = 3) -> dict[str, float]:
    """Of one launch, by schedule."""
    out = {}
    for order in ("round_robin", "adversary"):
        times = []
        for _ in range(rounds):
            start = time.process_time()
            done = launch(kernel, ranks, args, order=order, seed=1)
            times.append(time.process_time() - start)
            assert done.report, done.report
        out[order] = round(statistics.median(times), 3)
    return out


def crowd(blocks: int):
    """Every block of every rank puts a row to its neighbour, all meet, and all read a neighbouring block's
    row."""

    @T.prim_func
    def main(
        S: T.SymmTensor((blocks, 64), "float32"), s: T.Signal((blocks,)), C: T.Tensor((blocks, 64), "float32")
    ):
        with T.Kernel(blocks) as b:
            t = T.alloc_fragment((64,), "float32")
            with T.Scale("device") as rank, world:
                for i in T.Parallel(64):
                    t[i] = rank * 1000 + b
                T.copy(t, S[b, 0:64], dst=(rank + 1) % world, signal=s[b])
                T.wait(s[b])
                T.barrier()
                T.copy(S[(b + 1) % blocks, 0:64], C[b, 0:64])

    return main


def test_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    draw = np.random.default_rng(0).standard_normal
    a, b = (draw((256, 256)).astype(np.float32) for _ in range(2))
    figures: dict[str, Any] = {"gemm_256_tiles_64_ranks_4_bar": 1.0}
    gemm = example("02").kernel.get_tir(256, 256, BM=64, BN=64, BK=64)
    figures["gemm_256_tiles_64_ranks_4"] = seconds(gemm, 4, {"A": a, "B": b})
    n, wide = 8, 1024
    x, w = draw((n, wide // n, wide)).astype(np.float32), draw((wide, wide)).astype(np.float32)

    def mine(rank: int) -> Any:
        made = np.ma.masked_all(x.shape, np.float32)
        made[rank] = x[rank]
        return made

    ag_gemm = example("08").kernel.get_tir(wide // n, wide, wide, n, BM=128, BN=128, BK=128, dtype="float32")
    figures["ag_gemm_1024_tiles_128_ranks_8"] = seconds(ag_gemm, n, {"X": mine, "W": w})
    figures["put_and_meet_blocks_132_ranks_8"] = seconds(crowd(132), 8, {}, 1)
    record("simulator", figures)
    print(figures)
    assert max(figures["gemm_256_tiles_64_ranks_4"].values()) < 1.0
