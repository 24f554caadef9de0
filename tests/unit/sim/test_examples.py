"""The examples on the simulator: right results and no finding, on one to eight ranks, in turn and against the
adversary."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilescale.compiler.checks.run import launch

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
RANKS = (1, 2, 3, 4, 8)
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
    np.testing.assert_allclose(
        got, want, rtol=tolerance, atol=tolerance * max(1.0, float(np.abs(want).max()))
    )


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
    for out in runs(
        example("04", monkeypatch).kernel.get_tir(1, 2, 150, 32, causal), 1, {"Q": q, "K": k, "V": v}
    ):
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
    for out in runs(
        getattr(example("06", monkeypatch), by).get_tir(2500, n, dtype="float32"), n, {"A": list(a)}
    ):
        assert all((o["G"] == a).all() for o in out)


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("shots", ["one_shot", "two_shot"])
def test_all_reduce(shots: str, n: int, monkeypatch: pytest.MonkeyPatch):
    a = normal(n, 1500)
    for out in runs(
        getattr(example("07", monkeypatch), shots).get_tir(1500, n, dtype="float32"), n, {"A": list(a)}
    ):
        for o in out:
            close(o["B"], a.sum(0))
            assert (o["B"] == out[0]["B"]).all()


@pytest.mark.parametrize("n", RANKS)
def test_hierarchical_all_reduce(n: int, monkeypatch: pytest.MonkeyPatch):
    per = 2 - n % 2
    a = normal(n, per, 1500 // per)
    for out in runs(example("14", monkeypatch).kernel.get_tir(1500 // per, per), n, {"A": list(a)}):
        for o in out:
            close(o["B"], a.sum(0))
            assert (o["B"] == out[0]["B"]).all()


@pytest.mark.parametrize("n", RANKS)
def test_ag_gemm(n: int, monkeypatch: pytest.MonkeyPatch):
    x, w = normal(n, 70, 96), normal(96, 100, seed=1)
    for out in runs(
        example("08", monkeypatch).kernel.get_tir(70, 100, 96, n, dtype="float32"),
        n,
        {"X": lambda r: only(r, x, r), "W": w},
    ):
        for o in out:
            close(o["C"], x @ w)


@pytest.mark.parametrize("n", RANKS)
def test_gemm_rs(n: int, monkeypatch: pytest.MonkeyPatch):
    x, w = normal(n, n, 70, 40), normal(n, 40, 90, seed=1)
    for out in runs(
        example("09", monkeypatch).kernel.get_tir(70, 90, 40, n, dtype="float32"),
        n,
        {"X": list(x), "W": list(w)},
    ):
        for rank, o in enumerate(out):
            close(o["C"], sum(x[r, rank] @ w[r] for r in range(n)))


@pytest.mark.parametrize("n", RANKS)
def test_gemm_ar(n: int, monkeypatch: pytest.MonkeyPatch):
    x, w = normal(n, 70, 40), normal(n, 40, 90, seed=1)
    for out in runs(
        example("10", monkeypatch).kernel.get_tir(70, 90, 40, dtype="float32"),
        n,
        {"X": list(x), "W": list(w)},
    ):
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
    kernel = example("12", monkeypatch).kernel.get_tir(heads, s, d, n, causal, BM=32, dtype="float32")
    for out in runs(kernel, n, {"Q": list(q), "KV": mine}):
        for rank, o in enumerate(out):
            close(o["O"], want[:, rank * s : (rank + 1) * s])


def routed(n: int, tokens: int, topk: int, local: int) -> dict[str, Any]:
    """Which experts each rank's tokens chose, and in which order their slots lie: by expert, so that those
    for a rank are a run."""
    gate = np.random.default_rng(5).random((n, tokens, topk)).astype(np.float32)
    expert = np.stack(
        [np.random.default_rng([6, k]).permutation(n * local)[:topk] for k in range(n * tokens)]
    ).reshape(n, tokens, topk)
    order = np.argsort(expert.reshape(n, -1), axis=1, kind="stable")
    counts = (
        np.stack([np.bincount(e.ravel(), minlength=n * local) for e in expert])
        .reshape(n, n, local)
        .astype(np.int32)
    )
    start = np.concatenate([np.zeros((n, 1), np.int32), counts.sum(-1).cumsum(-1)], axis=1).astype(np.int32)
    place = np.zeros((n, tokens * topk), np.int32)  # the row of a slot among those for its rank
    for r in range(n):
        place[r, order[r]] = np.arange(tokens * topk) - start[r, expert[r].ravel()[order[r]] // local]
    return {
        "gate": gate,
        "expert": expert,
        "token": (order // topk).astype(np.int32),
        "counts": counts,
        "start": start,
        "place": place.reshape(n, tokens, topk),
    }


@pytest.mark.parametrize("n", RANKS)
def test_all_to_all(n: int, monkeypatch: pytest.MonkeyPatch):
    """Dispatch, the experts in NumPy between the launches, combine."""
    tokens, topk, dim, local, blocks = 10, 2, 12, 2, 3
    x, module, plan = normal(n, tokens, dim), example("11", monkeypatch), routed(n, tokens, topk, local)
    given = {
        "X": list(x),
        "token": list(plan["token"]),
        "start": list(plan["start"]),
        "counts": list(plan["counts"]),
    }
    scale = normal(n * local, seed=9)
    want = (plan["gate"] * scale[plan["expert"]]).sum(-1, keepdims=True) * x
    for out in runs(
        module.dispatch.get_tir(tokens, topk, dim, local, n, blocks=blocks, dtype="float32"), n, given
    ):
        answers = np.ma.masked_all((n, n, tokens * topk, dim), np.float32)
        rows = np.zeros((n, n), np.int32)
        for r, o in enumerate(out):
            assert (o["got"] == plan["counts"][:, r]).all()
            for source in range(n):
                experts = np.repeat(np.arange(local), o["got"][source]) + r * local
                rows[r, source] = len(experts)
                answers[r, source, : len(experts)] = o["inbox"][source, : len(experts)] * scale[experts, None]
    owner, gate, place = (plan["expert"] // local).astype(np.int32), plan["gate"], plan["place"]
    given = {
        "answers": list(answers),
        "rows": list(rows),
        "gate": list(gate),
        "owner": list(owner),
        "place": list(place),
    }
    for out in runs(module.combine.get_tir(tokens, topk, dim, n, blocks=blocks, dtype="float32"), n, given):
        for r, o in enumerate(out):
            close(o["Y"], want[r])
