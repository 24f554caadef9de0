"""Counters: what signals make of them, waits for several; on the simulator and on emulated GPUs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.kernels import refused
from tests.unit.cuda.emulated import agree_on_ranks
from tilescale.compiler.checks.run import check, launch
from tilescale.compiler.driver import backend, lower
from tilescale.errors import TileValueError

S = 8


def counters(ranks: int, **more: Any) -> list[dict[str, Any]]:
    return [
        {"X": np.full(S, r, "float32"), "s": np.zeros(3, "int64"), **{k: v.copy() for k, v in more.items()}}
        for r in range(ranks)
    ]


def by_name(args: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [a[name] for a in args] for name in args[0]}


def watermark(op: str, wait: bool = True, enough: bool = True) -> Any:
    """Every rank reports its number to rank 0, which reads what the last of them put."""
    sign = 1 if op == "max" else -1

    @T.prim_func
    def main(X: T.SymmTensor((S,), "float32"), s: T.Signal((3,)), O: T.Tensor((S,), "float32")):
        with T.Kernel(1, threads=32), T.Scale("device") as (rank, n):
            if rank == n - 1:
                T.copy(X, X, dst=0)
            T.signal(s[1], sign * (rank + 1), op=op, dst=0)
            if rank == 0:
                if wait:
                    T.wait(s[1], sign * (n if enough else n - 1), cmp="ge" if op == "max" else "le")
                T.copy(X, O)

    return main


@pytest.mark.parametrize("op", ["max", "min"])
def test_a_watermark(op: str):
    args = counters(3, O=np.zeros(S, "float32"))
    assert (launch(watermark(op), 3, by_name(args)).arrays[0]["O"] == 2).all()
    assert (found := check(watermark(op), 3, by_name(args), schedule="adversary", seeds=8)), found
    assert check(watermark(op), 3, by_name(args), schedule="exhaustive", bound=300)
    agree_on_ranks(watermark(op), args, seeds=4)


@pytest.mark.parametrize("op", ["max", "min"])
def test_a_watermark_that_another_reaches_too_orders_nothing(op: str):
    (found,) = check(
        watermark(op, enough=False), 3, by_name(counters(3, O=np.zeros(S, "float32"))), seeds=20
    ).findings
    assert found.kind == "race"


def test_a_block_signals_its_own_executors():
    @T.prim_func
    def main(O: T.Tensor((2,), "int32")):
        with T.Kernel(1, threads=64):
            s = T.alloc_signal((2,))
            with T.Scale("warp") as (w, n):
                T.signal(s[0], w + 3, op="max")
                T.signal(s[1], 0 - w, op="min")
                T.wait(s[0], 4)
                T.wait(s[1], -1, cmp="le")
                O[w] = w

    assert check(main, 1, {"O": np.zeros(2, "int32")}, seeds=5)
    agree_on_ranks(main, [{"O": np.zeros(2, "int32")}])


@pytest.mark.parametrize(
    "one, other, said",
    [
        ("max", "add", "raises it to 5 at least"),
        ("set", "min", "stores 5"),
        ("min", "max", "lowers it to 5 at most"),
    ],
)
def test_two_kinds_on_one_counter(one: str, other: str, said: str):
    @T.prim_func
    def main(s: T.Signal((1,))):
        with T.Kernel(1), T.Scale("device") as (rank, n):
            if rank == 0:
                T.signal(s[0], 5, op=one, dst=0)
            else:
                T.signal(s[0], 1, op=other, dst=0)

    found = [
        f for f in check(main, 2, {"s": [np.zeros(1, "int64")] * 2}, seeds=10).findings if f.kind == "race"
    ]
    assert any(said in f.message and "nothing that orders the two" in f.message for f in found), found


def all_of_three(several: Any) -> Any:
    @T.prim_func
    def main(X: T.SymmTensor((3, S), "float32"), s: T.Signal((3,)), O: T.Tensor((3, S), "float32")):
        with T.Kernel(1, threads=32), T.Scale("device") as (rank, n):
            for r in T.serial(n):
                T.copy(X[rank, 0:S], X[rank, 0:S], dst=r, signal=s[rank])
            T.wait(several(s, n))
            T.copy(X, O)

    return main


@pytest.mark.parametrize("several", [lambda s, n: s, lambda s, n: s[0:3], lambda s, n: s[0:n]])
def test_a_wait_for_several_counters(several: Any):
    args = [
        {"X": np.full((3, S), r, "float32"), "s": np.zeros(3, "int64"), "O": np.zeros((3, S), "float32")}
        for r in range(3)
    ]
    for arrays in launch(all_of_three(several), 3, by_name(args)).arrays:
        assert (arrays["O"][:, 0] == [0, 1, 2]).all()
    report = check(all_of_three(several), 3, by_name(args), schedule="adversary", seeds=8)
    assert report, report
    agree_on_ranks(all_of_three(several), args)
    (short,) = check(
        all_of_three(lambda s, n: s[0:2]), 3, by_name(args), schedule="adversary", seeds=8
    ).findings
    assert short.kind == "race"


def test_a_wait_that_nothing_ends_is_named():
    with refused(TileValueError, "nothing that any rank does can bring s to what is awaited here"):
        from tilescale.compiler.static import require

        @T.prim_func
        def main(s: T.Signal((3,))):
            with T.Kernel(1), T.Scale("device") as (rank, n):
                T.signal(s[0])
                T.wait(s[0:2])

        require(main, ranks=2)


def test_what_gpus_are_told():
    made = lower(watermark("max").trace(), "cuda:sm_90a")
    text = backend("cuda:sm_90a").text(made, "cuda")
    assert "ts::signal_max<true>" in text
