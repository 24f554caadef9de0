"""Teams inside a kernel: what is refused where, what the simulator and the static checks say, and results
there and on emulated threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.team_kernels import ALL, CASES
from tests.unit.cuda.emulated import agree_on_ranks
from tilescale.compiler import static
from tilescale.compiler.checks.run import check, launch
from tilescale.errors import TileError

S = 8


@pytest.mark.parametrize(("name", "n"), ALL)
def test_teams_compute_what_they_should_and_no_order_is_missing(name: str, n: int):
    kernel, given, want = CASES[name][0](n)
    lists = {key: [a[key] for a in given] for key in given[0]}
    for rank, arrays in enumerate(launch(kernel, n, lists).arrays):
        for key, expected in want(rank).items():
            assert (arrays[key] == expected).all(), (rank, key, arrays[key], expected)
    report = check(kernel, n, lists, schedule="adversary", seeds=1)
    assert report, report


@pytest.mark.parametrize("name", ["nodes", "listed", "nested"])
def test_emulated_threads_agree(name: str):
    kernel, given, _ = CASES[name][0](3)
    agree_on_ranks(kernel, given, seeds=1)


def scaled(body: Any) -> Any:
    """A kernel that calls ``body(X, rank, n)`` at the scale of the ranks."""

    @T.prim_func
    def kernel(X: T.SymmTensor((4, S), "int32"), number: T.int32):
        with T.Kernel(1, threads=32):
            with T.Scale("device") as (rank, n):
                body(X, rank, n, number)

    return kernel


def opened(team: Any) -> Any:
    def kernel(X, rank, n, number):
        with T.Scale("device", team=team):
            T.barrier()

    return kernel


def of_values(X, rank, n, number):
    with T.Scale("device", team=[rank, 0]):
        T.barrier()


def another_scale(X, rank, n, number):
    with T.Scale("cta_cluster", team=[0, 1]):
        T.barrier()


def a_stranger(X, rank, n, number):
    with T.Scale("device", team=[2, 0]):
        T.copy(X[0, 0:S], X[1, 0:S], dst=2)


def a_stranger_of_a_range(X, rank, n, number):
    with T.Scale("device", team=T.serial(rank, rank + 2)):
        T.copy(X[0, 0:S], X[1, 0:S], src=2)


def outside_of_the_outer(X, rank, n, number):
    with T.Scale("device", team=[0, 3]), T.Scale("device", team=[0, 2]):
        T.barrier()


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (opened([]), "a team of nobody"),
        (opened([0, 1, 0]), r"team=\[0, 1, 0\] has rank 0 twice"),
        (opened([0, -1]), "-1 is no rank"),
        (opened([0, 128]), "128 is no rank"),
        (opened([0, True]), "has a bool in it"),
        (opened("01"), "team='01' \\(str\\)"),
        (of_values, "device value in it"),
        (another_scale, r'team= of T.Scale\("cta_cluster"\)'),
        (a_stranger, "dst=2 is no rank of the team, which has 2"),
        (a_stranger_of_a_range, "src=2 is no rank of the team, which has 2"),
        (outside_of_the_outer, "the team around it has no rank 2"),
    ],
)
def test_what_is_no_team_is_refused(body: Any, says: str):
    with pytest.raises(TileError, match=says):
        scaled(T.macro(body)).trace()


@pytest.mark.parametrize("outer", [None, [3, 0, 1]])
@pytest.mark.parametrize(
    "empty",
    [
        lambda rank: range(3, 3),
        lambda rank: range(3, 1),
        lambda rank: T.serial(rank, rank),
        lambda rank: T.serial(2, 1),
    ],
)
def test_an_empty_range_is_nobody(empty: Any, outer: list[int] | None):
    def body(X, rank, n, number):
        X[0, 0] = rank
        with T.Scale("device", team=outer) as (one, _), T.Scale("device", team=empty(one)) as (me, m):
            T.copy(X[0, 0:S], X[1, 0:S], dst=(me + 1) % m)
            T.barrier()
            X[0, 0] = 7 + m

    args = [{"X": np.zeros((4, S), "int32"), "number": 0} for _ in range(4)]
    report = check(scaled(T.macro(body)), 4, {name: [a[name] for a in args] for name in args[0]})
    assert not report.kinds, report
    agree_on_ranks(scaled(T.macro(body)), args)
    for rank, a in enumerate(
        launch(scaled(T.macro(body)), 4, {name: [a[name] for a in args] for name in args[0]}).arrays
    ):
        assert a["X"][0, 0] == rank and not a["X"][1:].any()
    assert not static.check(scaled(T.macro(body)).trace(), ranks=4).of("refuted")


def test_a_name_bound_inside_is_not_known_behind():
    @T.prim_func
    def kernel(X: T.SymmTensor((4, S), "int32")):
        with T.Kernel(1, threads=32):
            with T.Scale("device") as (rank, n):
                with T.Scale("device", team=[0, 1]) as (me, m):
                    T.barrier()
                X[0, me] = 1

    with pytest.raises(TileError, match="'me' is rebound under the device T.Scale of a team"):
        kernel.trace()


def test_ranks_that_are_not_there_are_named_when_the_kernel_is_compiled_for_so_many():
    (found,) = static.check(scaled(T.macro(opened([0, 5]))).trace(), ranks=4).of("refuted")
    assert "rank=5 of 4" in str(found.finding())
    report = check(scaled(T.macro(opened([0, 5]))), 4, {"number": [0] * 4})
    assert report.kinds == {"no-such-rank"}, report


def test_a_rank_outside_of_the_team_is_named():
    def body(X, rank, n, number):
        with T.Scale("device", team=[0, 1]):
            T.copy(X[0, 0:S], X[1, 0:S], dst=number)

    report = check(scaled(T.macro(body)), 4, {"X": lambda r: np.zeros((4, S), "int32"), "number": [2] * 4})
    assert report.kinds == {"no-such-rank"} and "there is no rank 2: the team has 2" in str(report), report
