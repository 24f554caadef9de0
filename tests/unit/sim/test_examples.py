"""The examples on the simulator: right results and no finding, on one to four ranks, in turn and against the adversary."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilescale.compiler.sim.run import launch

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
RANKS = (1, 2, 3, 4)
ORDERS = (("round_robin", 0), ("adversary", 1), ("random", 2))


def example(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    (path,) = EXAMPLES.glob(f"{name}_*.py")
    spec = importlib.util.spec_from_file_location(f"sim_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def runs(kernel: Any, ranks: int, args: dict[str, Any]) -> Any:
    """The results of each schedule; none has a finding."""
    for order, seed in ORDERS:
        done = launch(kernel, ranks, args, order=order, seed=seed)
        assert done.report, done.report
        yield done.arrays


def close(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * max(1.0, float(np.abs(want).max())))


def softmax(x: Any) -> Any:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def only(rank: int, whole: Any, index: Any) -> Any:
    """An array of which one part is written, the other parts unwritten memory."""
    made = np.ma.masked_all(whole.shape, whole.dtype)
    made[index] = whole[index]
    return made


def test_gemm(monkeypatch: pytest.MonkeyPatch):
    a, b = normal(100, 80), normal(80, 70, seed=1)
    kernel = example("02", monkeypatch).kernel.get_tir(70, 80)
    for out in runs(kernel, 2, {"A": a, "B": b, "C": np.zeros((100, 70), np.float32)}):
        close(out[1]["C"], np.maximum(a.astype(np.float64) @ b, 0))


def test_softmax(monkeypatch: pytest.MonkeyPatch):
    x = normal(50, 100)
    for out in runs(example("03", monkeypatch).kernel.get_tir(50, 100), 1, {"X": x}):
        close(out[0]["Y"], softmax(x))


@pytest.mark.parametrize("causal", [False, True])
def test_flash_attention(causal: bool, monkeypatch: pytest.MonkeyPatch):
    q, k, v = (normal(1, 2, 150, 32, seed=s) for s in range(3))
    scores = q @ k.swapaxes(-1, -2) / 32**0.5
    scores = np.where(np.tril(np.ones((150, 150), bool)), scores, -np.inf) if causal else scores
    for out in runs(example("04", monkeypatch).kernel.get_tir(1, 2, 150, 32, causal), 1, {"Q": q, "K": k, "V": v}):
        close(out[0]["O"], softmax(scores) @ v)


@pytest.mark.parametrize("n", RANKS)
def test_ring_shift(n: int, monkeypatch: pytest.MonkeyPatch):
    a = normal(n, 3000)
    for out in runs(example("05", monkeypatch).kernel.get_tir(3000), n, {"A": list(a)}):
        for rank in range(n):
            assert (out[rank]["B"] == a[rank - 1]).all()


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("by", ["collective", "puts"])
def test_all_gather(by: str, n: int, monkeypatch: pytest.MonkeyPatch):
    a = normal(n, 2500)
    for out in runs(getattr(example("06", monkeypatch), by).get_tir(2500, n), n, {"A": list(a)}):
        assert all((o["G"] == a).all() for o in out)


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("shots", ["one_shot", "two_shot"])
def test_all_reduce(shots: str, n: int, monkeypatch: pytest.MonkeyPatch):
    a = normal(n, 1500)
    for out in runs(getattr(example("07", monkeypatch), shots).get_tir(1500, n), n, {"A": list(a)}):
        for o in out:
            close(o["B"], a.sum(0))
            assert (o["B"] == out[0]["B"]).all()


@pytest.mark.parametrize("n", RANKS)
def test_ag_gemm(n: int, monkeypatch: pytest.MonkeyPatch):
    x, w = normal(n, 70, 96), normal(96, 100, seed=1)
    for out in runs(example("08", monkeypatch).kernel.get_tir(70, 100, 96, n), n, {"X": lambda r: only(r, x, r), "W": w}):
        for o in out:
            close(o["C"], x @ w)


@pytest.mark.parametrize("n", RANKS)
def test_gemm_rs(n: int, monkeypatch: pytest.MonkeyPatch):
    x, w = normal(n, n, 70, 40), normal(n, 40, 90, seed=1)
    for out in runs(example("09", monkeypatch).kernel.get_tir(70, 90, 40, n), n, {"X": list(x), "W": list(w)}):
        for rank, o in enumerate(out):
            close(o["C"], sum(x[r, rank] @ w[r] for r in range(n)))


@pytest.mark.parametrize("n", RANKS)
def test_gemm_ar(n: int, monkeypatch: pytest.MonkeyPatch):
    x, w = normal(n, 70, 40), normal(n, 40, 90, seed=1)
    for out in runs(example("10", monkeypatch).kernel.get_tir(70, 90, 40), n, {"X": list(x), "W": list(w)}):
        for o in out:
            close(o["C"], sum(x[r] @ w[r] for r in range(n)))


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("causal", [False, True])
def test_ring_attention(causal: bool, n: int, monkeypatch: pytest.MonkeyPatch):
    heads, s, d = 1, 70, 16
    q, k, v = (normal(n, heads, s, d, seed=i) for i in range(3))
    kv = np.zeros((2, 2, heads, s, d), np.float32)

    def mine(rank: int) -> Any:
        kv[0] = k[rank], v[rank]
        return only(rank, kv, 0)

    whole = [np.concatenate(list(t), axis=1) for t in (q, k, v)]
    scores = whole[0] @ whole[1].swapaxes(-1, -2) / d**0.5
    scores = np.where(np.tril(np.ones((n * s, n * s), bool)), scores, -np.inf) if causal else scores
    want = softmax(scores) @ whole[2]
    kernel = example("12", monkeypatch).kernel.get_tir(heads, s, d, n, causal, BM=32)
    for out in runs(kernel, n, {"Q": list(q), "KV": mine}):
        for rank, o in enumerate(out):
            close(o["O"], want[:, rank * s : (rank + 1) * s])
