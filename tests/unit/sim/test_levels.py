"""The scheduled level of every example: roles, rings and copies ahead give what the tile program says, and no
finding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.ranks.faulty.kernels import CASES, Case
from tests.unit.sim.test_examples import example, normal, only
from tilescale.compiler.checks.levels import compare
from tilescale.compiler.checks.run import check, launch
from tilescale.compiler.passes.pipeline import tile_level
from tilescale.compiler.passes.schedule import schedule
from tilescale.errors import TileValueError

BOTH = ("producer", "consumer")
PLANS = {
    **{f"{d} stages, two roles": {"depth": d, "roles": BOTH} for d in (1, 2, 3)},
    **{f"{d} stages, one role": {"depth": d, "roles": ("all",)} for d in (1, 2, 3)},
    **{f"{d} stages, copies ahead": {"depth": d, "roles": ("all",), "ahead": True} for d in (2, 3)},
}


def _ag_gemm(m: Any, n: int) -> Any:
    x = normal(n, 70, 96)
    return m.kernel.get_tir(70, 100, 96, n, blocks=3, dtype="float32"), {
        "X": lambda r: only(r, x, r),
        "W": normal(96, 100, seed=1),
    }


def _gemm_rs(m: Any, n: int) -> Any:
    return m.kernel.get_tir(70, 90, 40, n, BK=16, blocks=3, dtype="float32"), {
        "X": list(normal(n, n, 70, 40)),
        "W": list(normal(n, 40, 90, seed=1)),
    }


def _gemm_ar(m: Any, n: int) -> Any:
    return m.kernel.get_tir(70, 40, 100, BK=32, dtype="float32"), {
        "X": list(normal(n, 70, 100)),
        "W": list(normal(n, 100, 40, seed=1)),
    }


#: examples with pipelined loops: their kernel and arguments on n ranks, and how many rings it has
PIPELINED: dict[str, Callable[[Any, int], Any]] = {
    "02": lambda m, n: (
        m.kernel.get_tir(70, 80),
        {"A": normal(100, 80), "B": normal(80, 70, seed=1), "C": np.zeros((100, 70), np.float32)},
    ),
    "04": lambda m, n: (
        m.kernel.get_tir(1, 1, 130, 16, True, BM=32, BN=32),
        {k: normal(1, 1, 130, 16, seed=s) for s, k in enumerate("QKV")},
    ),
    "08": _ag_gemm,
    "09": _gemm_rs,
    "10": _gemm_ar,
}
RANKS = {"02": 1, "04": 1, "08": 3, "09": 2, "10": 2}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("name", PIPELINED)
def test_pipelined_examples_at_every_depth(name: str, plan: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    kernel, args = PIPELINED[name](example(name, monkeypatch), RANKS[name])
    report = check(kernel, RANKS[name], args, level="both", seeds=2, **plan)
    assert report, report
    report = check(kernel, RANKS[name], args, level="both", schedule="random", seeds=1, **plan)
    assert report, report
    made = schedule(tile_level(kernel), **plan)
    form = "roles" if plan["roles"] == BOTH else "ahead" if "ahead" in plan else "in_order"
    assert [r.form for r in made.schedule.rings] == [form], made.schedule.kept
    beside = [r for r in made.schedule.roles if r != "communicator"]  # which non-blocking puts bring
    assert beside == list(plan["roles"])
    # a barrier with other blocks ends a role region: 10 has one a tile, and a region a tile; the others run
    # ahead across tiles
    assert bool(made.schedule.kept) == (name == "10" and form == "roles")


def _attend(m: Any, n: int) -> Any:
    kv = np.zeros((2, 2, 1, 70, 16), np.float32)
    kv[0] = normal(2, 1, 70, 16)
    return m.kernel.get_tir(1, 70, 16, n, True, BM=32, dtype="float32"), {
        "Q": list(normal(n, 1, 70, 16)),
        "KV": only(0, kv, 0),
    }


#: the others: nothing to pipeline, and the same at both levels
PLAIN: dict[str, Callable[[Any, int], Any]] = {
    "01": lambda m, n: (m.kernel.get_tir(1000), {"A": normal(1000), "B": normal(1000, seed=1)}),
    "03": lambda m, n: (m.kernel.get_tir(5, 100), {"X": normal(5, 100)}),
    "05": lambda m, n: (m.kernel.get_tir(3000), {"A": list(normal(n, 3000))}),
    "06": lambda m, n: (m.puts.get_tir(2500, n, dtype="float32"), {"A": list(normal(n, 2500))}),
    "07": lambda m, n: (m.two_shot.get_tir(1500, n, dtype="float32"), {"A": list(normal(n, 1500))}),
    "12": _attend,
    "14": lambda m, n: (m.kernel.get_tir(100, 1, block=64), {"A": list(normal(n, 1, 100))}),
}


@pytest.mark.parametrize("name", PLAIN)
def test_other_examples(name: str, monkeypatch: pytest.MonkeyPatch):
    kernel, args = PLAIN[name](example(name, monkeypatch), 3)
    report = check(kernel, 3, args, level="both", seeds=2)
    assert report, report


def _route(n: int, tokens: int, local: int, topk: int) -> list[dict[str, Any]]:
    """For each rank what example 11's kernels need to know of a random choice of experts."""
    out = []
    for rank in range(n):
        draw = np.random.default_rng(rank)
        expert = np.stack([draw.permutation(n * local)[:topk] for _ in range(tokens)])
        order = np.argsort(expert.ravel(), kind="stable")
        counts = np.bincount(expert.ravel(), minlength=n * local).reshape(n, local)
        start = np.concatenate([[0], counts.sum(1).cumsum()])
        owner = expert // local
        place = np.argsort(order).reshape(owner.shape) - start[owner]
        made = {"token": order // topk, "start": start, "counts": counts, "owner": owner, "place": place}
        out.append({k: v.astype(np.int32) for k, v in made.items()})
    return out


def test_all_to_all(monkeypatch: pytest.MonkeyPatch):
    n, tokens, dim, local, topk = 3, 11, 8, 2, 2
    module, slots = example("11", monkeypatch), tokens * topk
    route = _route(n, tokens, local, topk)
    x, gate = normal(n, tokens, dim), np.random.default_rng(9).random((n, tokens, topk)).astype(np.float32)
    sent = {"X": list(x), **{k: [r[k] for r in route] for k in ("token", "start", "counts")}}
    kernel = module.dispatch.get_tir(tokens, topk, dim, local, n, blocks=4, dtype="float32")
    report = check(kernel, n, sent, level="both", seeds=3)
    assert report, report
    arrays = launch(schedule(tile_level(kernel), 2, BOTH), n, sent, order="adversary").arrays
    answers = []
    for rank in range(n):
        rows = [arrays[rank]["got"][source].sum() for source in range(n)]
        assert rows == [route[source]["counts"][rank].sum() for source in range(n)]
        for source in range(n):
            first = route[source]["start"][rank]
            want = x[source, route[source]["token"][first : first + rows[source]]]
            assert (arrays[rank]["inbox"][source, : rows[source]] == want).all()
        answers.append(2 * arrays[rank]["inbox"])  # every expert doubles
    sent = {
        "answers": answers,
        "rows": [a["got"].sum(1).astype(np.int32) for a in arrays],
        "gate": list(gate),
    }
    sent |= {k: [r[k] for r in route] for k in ("owner", "place")}
    kernel = module.combine.get_tir(tokens, topk, dim, n, blocks=4, dtype="float32")
    report = check(kernel, n, sent, level="both", seeds=3)
    assert report, report
    for rank, out in enumerate(
        launch(schedule(tile_level(kernel), 2, BOTH), n, sent, order="adversary").arrays
    ):
        np.testing.assert_allclose(
            out["Y"], 2 * x[rank] * gate[rank].sum(1, keepdims=True), rtol=1e-5, atol=1e-5
        )


@T.prim_func
def odd(A: T.Tensor((8, 16), "int32"), C: T.Tensor((6, 16), "int32"), n: T.int32):
    """Readers between the copies, a tile read behind its loop, nested pipelines, a start other than zero,
    copies on some rounds only."""
    with T.Kernel(1):
        a, b, c, d = (T.alloc_shared((16,), "int32") for _ in range(4))
        e, f, g = (
            T.alloc_shared((4,), "int32"),
            T.alloc_shared((16,), "int32"),
            T.alloc_shared((16,), "int32"),
        )
        s = T.alloc_fragment((16,), "int32")
        T.clear(s)
        for k in T.Pipelined(n, num_stages=3):
            T.copy(A[k, 0], a)
            for i in T.Parallel(16):
                s[i] += a[i]
            T.copy(A[k, 0], b)
            for i in T.Parallel(16):
                s[i] += 2 * b[i]
        T.copy(s, C[0, 0])
        T.copy(a, C[1, 0])
        for k in T.Pipelined(1, n, num_stages=2):
            T.copy(A[k, 0], c)
            if k % 2 == 0:
                for i in T.Parallel(16):
                    s[i] += c[i] * k
        T.copy(s, C[2, 0])
        for k in T.Pipelined(n, num_stages=2):
            T.copy(A[k, 0], d)
            for j in T.Pipelined(4, num_stages=3):
                T.copy(A[k, j * 4], e)
                for i in T.Parallel(4):
                    s[j * 4 + i] += d[i] * e[i]
        T.copy(s, C[3, 0])
        T.clear(f)
        for k in T.Pipelined(n, num_stages=2):
            if k % 2 == 1:
                T.copy(A[k, 0], f)
            for i in T.Parallel(16):
                s[i] += f[i]
        T.copy(s, C[4, 0])
        for t in T.serial(2):
            for k in T.Pipelined(n - t, num_stages=3):
                T.copy(A[k, 0], g)
                for i in T.Parallel(16):
                    s[i] = s[i] * 3 + g[i]
        T.copy(s, C[5, 0])


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_pipelined_loops_with_other_statements(plan: dict[str, Any]):
    a = np.random.default_rng(0).integers(-3, 4, (8, 16)).astype(np.int32)
    report = check(odd, 1, {"A": a, "n": 7}, level="both", seeds=3, **plan)
    assert report, report


def test_a_difference_is_found_and_shown():
    @T.prim_func
    def main(A: T.Tensor((4, 8), "float32"), B: T.Tensor((4, 8), "float32")):
        with T.Kernel(1):
            T.copy(A, B)

    program = tile_level(main)
    want = launch(program).arrays
    assert not list(compare(program, want, want))
    got = [{name: array.copy() for name, array in want[0].items()}]
    got[0]["B"][2, 3], got[0]["B"][3, 5] = 7, np.nan
    (finding,) = compare(program, want, got)
    assert finding.kind == "schedule"
    text = str(finding)
    assert (
        f"B[2:4, 3:6] of rank 0 differs between the tile program and the scheduled one in 2 of 32 elements: B[2, 3] is {want[0]['B'][2, 3]} and 7.0"
        in text
    )
    got[0]["B"] = want[0]["B"].copy()
    got[0]["B"][0, 0] = np.nextafter(want[0]["B"][0, 0], np.float32(9))
    assert len(list(compare(program, want, got))) == 1  # bit for bit


def test_sums_in_order_of_arrival_agree_within_rounding():
    @T.prim_func
    def main(
        A: T.Tensor((4, 8), "float32"),
        B: T.Tensor((8,), "float32"),
        out: T.Tensor((4,), "int32"),
        n: T.Tensor((1,), "int32"),
    ):
        with T.Kernel(4) as bx:
            T.atomic_add(B, A[bx, 0:8])
            out[bx] = T.atomic_add(n[0], 1, return_prev=True)

    @T.prim_func
    def adds(A: T.Tensor((4, 8), "float32"), B: T.Tensor((8,), "float32")):
        with T.Kernel(4) as bx:
            T.atomic_add(B, A[bx, 0:8])

    given = {"B": np.zeros(8, np.float32), "out": np.zeros(4, np.int32), "n": np.zeros(1, np.int32)}
    assert check(main, 1, given, level="both", seeds=5)  # who comes first is not compared
    program = tile_level(adds)
    want = launch(program, 1, {"B": given["B"]}).arrays
    near, far = ([{name: array.copy() for name, array in want[0].items()}] for _ in range(2))
    near[0]["B"][1] += 1e-6
    far[0]["B"][1] += 1e-3
    assert not list(compare(program, want, near)) and len(list(compare(program, want, far))) == 1


def test_levels_that_there_are_not():
    for program, level in ((odd, "thread"), (schedule(tile_level(odd)), "both")):
        with pytest.raises(TileValueError):
            check(program, 1, {"n": 3}, level=level)
    with pytest.raises(TileValueError, match="know the steps of the tile level"):
        check(odd, 1, {"n": 3}, level="scheduled", schedule="exhaustive")


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan", [{"roles": BOTH}, {"roles": ("all",), "ahead": True}], ids=["two roles", "copies ahead"]
)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_the_corpus_at_the_scheduled_level(case: Case, plan: dict[str, Any]):
    """A schedule hides no fault, and adds none to a repaired twin."""
    args = case.args(case.ranks)
    report = check(
        case.build(case.ranks, True), case.ranks, args, seeds=2, limit=case.limit, level="scheduled", **plan
    )
    assert case.named(report), report
    report = check(
        case.build(case.ranks, False), case.ranks, args, seeds=2, limit=case.limit, level="both", **plan
    )
    assert report, report
