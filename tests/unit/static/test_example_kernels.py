"""The examples: at least nine in ten of their obligations are proven, none is refuted; within a compilation's
budget and without."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.static.example_kernels import alone, together
from tilescale.compiler.static import SOLVER_BUDGET, check
from tilescale.compiler.static.obligations import PROVEN, REFUTED


def share(programs: Any, steps: int, **options: Any) -> float:
    proven = total = 0
    for name, kernel in programs:
        said = check(kernel, steps, **options)
        assert not said.of(REFUTED), (name, [str(o.finding()) for o in said.of(REFUTED)])
        proven, total = proven + len(said.of(PROVEN)), total + len(said.items)
    return proven / total


def test_of_one_rank():
    assert share(alone(), 200_000) == 1.0


@pytest.mark.parametrize("n", [1, 2, 4])
def test_of_several_ranks(n: int):
    """With the number of ranks that a kernel is made for, as a compilation knows it in a running job."""
    assert share(together(n), 1_000_000, ranks=n) >= 0.95


def test_where_the_number_of_ranks_is_open():
    """A kernel whose shapes are made for two ranks says nothing of a third: what needs two stays open."""
    assert share(together(2), 1_000_000) >= 0.9


def test_without_the_solver():
    """What a compilation asks, with more steps: the solver is not there, and hardly missed."""
    assert share([*alone(), *together(3)], SOLVER_BUDGET - 1, world=3) >= 0.9
