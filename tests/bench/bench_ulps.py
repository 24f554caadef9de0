"""How far the CPU target is from the simulator, in units of the last place: functions, and the examples that
run on one rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.bench.bench_simulator import EXAMPLES, example
from tests.bench.record import record
from tests.kernels import run
from tests.ulps import worst
from tilescale.compiler.checks.run import launch

FUNCTIONS = (
    "exp",
    "exp2",
    "exp10",
    "log",
    "log2",
    "log10",
    "log1p",
    "sqrt",
    "rsqrt",
    "sin",
    "cos",
    "tan",
    "tanh",
    "sigmoid",
    "erf",
    "__exp",
    "__exp2",
    "__log",
    "__sin",
    "__cos",
)
N = 4096


def function(name: str, dtype: str):
    call = getattr(T, name)

    @T.prim_func
    def main(A: T.Tensor((N,), dtype), C: T.Tensor((N,), dtype)):
        with T.Kernel(1):
            for i in T.Parallel(N):
                C[i] = call(A[i])

    return main


def between(kernel: Any, args: dict[str, Any], out: str) -> dict[str, float]:
    """The CPU's distance from the simulator."""
    want = launch(kernel, 1, args).arrays[0][out]
    mine = {name: a.copy() for name, a in args.items()}
    run(kernel)(*mine.values())
    return worst(mine[out], want)


def test_ulps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    draw = np.random.default_rng(0)
    figures: dict[str, Any] = {}
    for dtype in ("float32", "float64"):
        for name in FUNCTIONS:
            low = (
                0.2
                if name in ("log", "log2", "log10", "sqrt", "rsqrt", "__log")
                else 0.0
                if name == "log1p"
                else -8.0
            )
            x = draw.uniform(low, 8, N).astype(dtype)
            figures[f"{name}_{dtype}"] = between(
                function(name, dtype), {"A": x, "C": np.zeros(N, dtype)}, "C"
            )

    def normal(*shape: int) -> Any:
        return draw.standard_normal(shape).astype(np.float32)

    # Of one sign: a sum that cancels has no last place to speak of.
    a, b = (
        np.abs(normal(100, 80)),
        np.abs(normal(80, 70)),
    )
    figures["02_gemm"] = between(
        example("02").kernel.get_tir(70, 80), {"A": a, "B": b, "C": np.zeros((100, 70), np.float32)}, "C"
    )
    figures["03_softmax"] = between(
        example("03").kernel.get_tir(50, 100),
        {"X": normal(50, 100), "Y": np.zeros((50, 100), np.float32)},
        "Y",
    )
    q, k, v = normal(1, 2, 150, 32), normal(1, 2, 150, 32), np.abs(normal(1, 2, 150, 32))
    attention = example("04").kernel.get_tir(1, 2, 150, 32, True)
    figures["04_flash_attention"] = between(attention, {"Q": q, "K": k, "V": v, "O": np.zeros_like(q)}, "O")
    record("ulps", figures)
    print(figures)
