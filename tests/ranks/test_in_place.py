"""Collectives whose source and destination lie in one tensor: the same values on the simulator, on emulated
GPUs and in processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import tilescale.language as T
from tests.kernels import run
from tests.ranks.harness import run_ranks
from tests.unit.cuda.emulated import agree, agree_on_ranks
from tilescale import comm
from tilescale.compiler.checks.run import check, launch

N, S = 3, 4  # ranks, elements of a part

#: name → what is called of X (N + 1, S), its view as one row, and the own rank; what X is then, of all ranks'
#: X before
Case = tuple[Callable[..., None], Callable[[Any, Any, int], None]]


def _sum(old: Any, rows: Any) -> Any:
    return sum(x[rows].astype(np.float64) for x in old).astype(np.float32)


def _reduced(new: Any, old: Any, me: int, to: Any, rows: Any) -> None:
    new[to] = _sum(old, rows)


def _gathered(new: Any, old: Any, me: int, first: int, at: Callable[[int], int]) -> None:
    for r in range(N):
        new[first + r] = old[r][at(r)]


def _exchanged(new: Any, old: Any, me: int, first: int, to: int) -> None:
    for r in range(N):
        new[to + r] = old[r][first + me]


def _scattered(new: Any, old: Any, me: int, to: int) -> None:
    new[to] = _sum(old, me)


CASES: dict[str, Case] = {
    "all_reduce": (
        lambda X, V, rank: T.all_reduce(X, X),
        lambda new, old, me: _reduced(new, old, me, slice(0, N + 1), slice(0, N + 1)),
    ),
    "all_reduce of rows one further": (
        lambda X, V, rank: T.all_reduce(X[0:2, 0:S], X[1:3, 0:S]),
        lambda new, old, me: _reduced(new, old, me, slice(1, 3), slice(0, 2)),
    ),
    "all_reduce through a view": (
        lambda X, V, rank: T.all_reduce(X[0:1, 0:S], V[S : 2 * S]),
        lambda new, old, me: _reduced(new, old, me, 1, 0),
    ),
    "all_reduce of rows apart": (
        lambda X, V, rank: T.all_reduce(X[0:1, 0:S], X[2:3, 0:S]),
        lambda new, old, me: _reduced(new, old, me, 2, 0),
    ),
    "all_gather in place": (
        lambda X, V, rank: T.all_gather(X[rank, 0:S], X[0:N, 0:S]),
        lambda new, old, me: _gathered(new, old, me, 0, lambda r: r),
    ),
    "all_gather of one's first row": (
        lambda X, V, rank: T.all_gather(X[0, 0:S], X[0:N, 0:S]),
        lambda new, old, me: _gathered(new, old, me, 0, lambda r: 0),
    ),
    "all_gather through a view": (
        lambda X, V, rank: T.all_gather(V[S : 2 * S], X[1 : N + 1, 0:S]),
        lambda new, old, me: _gathered(new, old, me, 1, lambda r: 1),
    ),
    "all_to_all in place": (
        lambda X, V, rank: T.all_to_all(X[0:N, 0:S], X[0:N, 0:S]),
        lambda new, old, me: _exchanged(new, old, me, 0, 0),
    ),
    "all_to_all of rows one further": (
        lambda X, V, rank: T.all_to_all(X[0:N, 0:S], X[1 : N + 1, 0:S]),
        lambda new, old, me: _exchanged(new, old, me, 0, 1),
    ),
    "broadcast in place": (
        lambda X, V, rank: T.broadcast(X[1, 0:S], X[1, 0:S], 2),
        lambda new, old, me: new.__setitem__(1, old[2][1]),
    ),
    "broadcast of rows one further": (
        lambda X, V, rank: T.broadcast(X[0:2, 0:S], X[1:3, 0:S], 1),
        lambda new, old, me: new.__setitem__(slice(1, 3), old[1][0:2]),
    ),
    "reduce_scatter into a part": (
        lambda X, V, rank: T.reduce_scatter(X[0:N, 0:S], X[1, 0:S]),
        lambda new, old, me: _scattered(new, old, me, 1),
    ),
}


def kernel(case: str) -> Any:
    @T.prim_func
    def main(X: T.SymmTensor((N + 1, S), "float32")):
        with T.Kernel(1, threads=32), T.Scale("device") as (rank, n):
            CASES[case][0](X, T.view(X, ((N + 1) * S,)), rank)

    return main


def before(rank: int) -> Any:
    return np.random.default_rng(rank).standard_normal((N + 1, S)).astype(np.float32)


def wanted(case: str) -> list[Any]:
    old = [before(r) for r in range(N)]
    new = [x.copy() for x in old]
    for r in range(N):
        CASES[case][1](new[r], old, r)
    return new


@pytest.mark.parametrize("case", CASES)
def test_on_the_simulator_and_emulated(case: str):
    args = {"X": [before(r) for r in range(N)]}
    arrays = launch(kernel(case), N, args).arrays
    for rank, want in enumerate(wanted(case)):
        np.testing.assert_allclose(arrays[rank]["X"], want, rtol=1e-6, atol=1e-6)
    report = check(kernel(case), N, args, schedule="adversary", seeds=6)
    assert report, report
    agree_on_ranks(kernel(case), [{"X": before(r)} for r in range(N)], seeds=2)


def test_in_processes():
    made = {case: run(kernel(case)) for case in CASES}

    def work():
        comm.init()
        x = comm.empty((N + 1, S), "float32")
        for case, launched in made.items():
            for _ in range(3):
                x.copy_(torch.from_numpy(before(comm.rank())))
                launched(x)
                np.testing.assert_allclose(
                    x.numpy(), wanted(case)[comm.rank()], rtol=1e-6, atol=1e-6, err_msg=case
                )

    run_ranks(N, work)


def test_apart_or_in_place_costs_no_tile():
    """A source that is proven apart from the destination, or its own part, is not staged and meets no third
    time."""
    from tilescale.compiler.passes import pipeline

    def of(case: str) -> tuple[int, int]:
        text = pipeline.run(kernel(case).trace())[0].func.script()
        return text.count("ts.team_sync"), text.count("alloc_shared")

    assert of("all_gather in place") == (2, 0) and of("broadcast in place") == (2, 0)
    assert of("all_reduce of rows apart") == (2, 2) and of("all_reduce") == (3, 2)
    assert of("all_gather of one's first row") == (2, 1)


def test_blocks_of_a_cluster_and_lanes():
    @T.prim_func
    def main(
        A: T.Tensor((2, 2, S), "float32"),
        B: T.Tensor((2, 2, S), "float32"),
        L: T.Tensor((2, 4, S), "float32"),
    ):
        with T.Kernel(2, cluster_dims=2, threads=32) as b:
            tile, lanes = T.alloc_shared((2, S), "float32"), T.alloc_shared((4, S), "float32")
            T.copy(A[b, 0:2, 0:S], tile)
            with T.Scale("cta_cluster"):
                T.all_to_all(tile, tile)
            T.copy(tile, B[b, 0:2, 0:S])
            with T.Scale("cta_cluster"):
                T.all_reduce(tile, tile)
            T.copy(tile, A[b, 0:2, 0:S])
            T.copy(L[b, 0:4, 0:S], lanes)
            with T.Scale("warp"):
                T.all_reduce(lanes, lanes[0, 0:S])
            T.copy(lanes, L[b, 0:4, 0:S])

    draw = np.random.default_rng(0)
    a, lanes = (draw.integers(0, 9, s).astype(np.float32) for s in ((2, 2, S), (2, 4, S)))
    args = {"A": a, "B": np.zeros_like(a), "L": lanes}
    found = check(main, 1, args, schedule="adversary", seeds=5)
    assert found, found
    agree(main, args)
    moved, summed = a.swapaxes(0, 1), np.broadcast_to(a.sum(1), (2, 2, S))
    reduced = lanes.copy()
    reduced[:, 0] = lanes.sum(1)
    on_cpu = {k: torch.from_numpy(v.copy()) for k, v in args.items()}
    run(main)(*on_cpu.values())
    for got in (launch(main, 1, args).arrays[0], {k: v.numpy() for k, v in on_cpu.items()}):
        assert np.array_equal(got["B"], moved)
        assert np.array_equal(got["A"], summed) and np.array_equal(got["L"], reduced)
