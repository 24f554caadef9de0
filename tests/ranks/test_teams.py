"""Teams inside a kernel, on processes: what they compute, and what ranks are told when they go wrong."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch  # once here, not in each of the forked ranks

import tilescale.language as T
from tests.kernels import run
from tests.ranks.harness import RanksFailed, run_ranks
from tests.team_kernels import ALL, CASES
from tilescale import comm


def arguments(kinds: dict[str, str], given: dict[str, Any]) -> list[Any]:
    """One rank's arguments, what others reach in symmetric memory; collective."""
    out = []
    for name, array in given.items():
        if kinds[name] == "signal":
            out.append(comm.signals(array.shape))
        elif kinds[name] == "symm":
            out.append(comm.zeros(array.shape, str(array.dtype)))
        else:
            out.append(torch.from_numpy(array.copy()))
    return out


@pytest.mark.parametrize(("name", "n"), ALL)
def test_teams_compute_what_they_should(name: str, n: int):
    """Three launches, so that words which are left from one show in the next."""
    prim, given, want = CASES[name][0](n)
    made = run(prim)
    kinds = {p.name: p.spec.kind for p in prim.trace().params if hasattr(p.spec, "kind")}

    def work() -> None:
        comm.init()
        rank = comm.rank()
        for _ in range(3):
            values = arguments(kinds, given[rank])
            made(*values)
            got = dict(zip(given[rank], values, strict=True))
            for key, expected in want(rank).items():
                assert (got[key].numpy() == expected).all(), (name, n, rank, key, got[key], expected)

    run_ranks(n, work)


def failing(make: Any, n: int, message: str) -> None:
    made = run(make())

    def work() -> None:
        comm.init()
        x = comm.zeros((4,), "int32")
        if comm.rank() == 3:
            # Its own wait, for the launch's end, begins later and is not the first to last too long.
            time.sleep(0.7)
        made(x, comm.rank())

    with pytest.raises(RanksFailed, match=message):
        run_ranks(n, work)


def test_a_team_with_ranks_that_are_not_there_fails_by_name():
    def make() -> Any:
        @T.prim_func
        def kernel(X: T.SymmTensor((4,), "int32"), number: T.int32):
            with T.Kernel(1), T.Scale("device", team=range(3 + number - number)):
                T.barrier()

        return kernel

    failing(make, 2, "the range of T.Scale has a rank that the launch has not")


def test_a_rank_outside_of_the_team_fails_by_name():
    def make() -> Any:
        @T.prim_func
        def kernel(X: T.SymmTensor((4,), "int32"), number: T.int32):
            with T.Kernel(1), T.Scale("device", team=[0, 1]):
                T.copy(X[0:2], X[2:4], dst=number + 2)

        return kernel

    failing(make, 3, r"rank [23] is out of range of the team of its T.Scale")


def test_who_does_not_come_to_a_teams_barrier_is_named():
    """Rank 0, the lowest of the team, and rank 2 wait for rank 1; rank 3 is no member and is not blamed."""

    @T.prim_func
    def kernel(X: T.SymmTensor((4,), "int32"), number: T.int32):
        with T.Kernel(1), T.Scale("device", team=[2, 0, 1]):
            if number != 1:
                T.barrier()

    made = run(kernel)

    def work() -> None:
        comm.init()
        x = comm.zeros((4,), "int32")
        if comm.rank() == 3:
            # Its own wait, for the launch's end, begins later and is not the first to last too long.
            time.sleep(0.7)
        made(x, comm.rank())

    with pytest.raises(
        RanksFailed, match=r"rank [02], block \(0, 0, 0\): waited 1 s for rank 1 to arrive at the barrier"
    ):
        run_ranks(4, work, env={"TILESCALE_WAIT_TIMEOUT": "1"})
