"""Numbers that a layer cannot have are refused by their names when it is made."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tilescale import comm
from tilescale import nn as tsnn
from tilescale.errors import TileError

WRONG: dict[str, Callable[[], Any]] = {
    "in_features=-1": lambda: tsnn.RowParallelLinear(-1, 8),
    "out_features=-4": lambda: tsnn.ColumnParallelLinear(8, -4),
    "out_features=2.5": lambda: tsnn.ColumnParallelLinear(8, 2.5),  # type: ignore[arg-type]
    "heads=0": lambda: tsnn.ParallelAttention(8, 0),
    "kv_heads=0": lambda: tsnn.ParallelAttention(8, 2, 0),
    "head_dim=0": lambda: tsnn.ParallelAttention(8, 16),
    "ColumnParallelLinear of (2, 0, 8)": lambda: tsnn.ColumnParallelLinear(8, 4)(torch.ones(2, 0, 8)),
    "features=10 of 4 heads": lambda: tsnn.ParallelAttention(10, 4),
    "scale=0.0": lambda: tsnn.ParallelAttention(8, 4, scale=0.0),
    "batch=2.0": lambda: tsnn.ParallelAttention(8, 4)(torch.ones(2, 8), 2.0),  # type: ignore[arg-type]
    "hidden='16'": lambda: tsnn.ParallelMLP(8, "16"),  # type: ignore[arg-type]
    "hidden=0": lambda: tsnn.ExpertParallelMoE(8, 0, 4, 2),
    "topk='2'": lambda: tsnn.ExpertParallelMoE(8, 8, 4, "2"),  # type: ignore[arg-type]
    "shared=8.5": lambda: tsnn.ExpertParallelMoE(8, 8, 4, 2, shared=8.5),  # type: ignore[arg-type]
    "shared=12": lambda: tsnn.ExpertParallelMoE(8, 16, 4, 2, shared=12),
    "chunks=1.5": lambda: tsnn.ExpertParallelMoE(8, 8, 4, 2, chunks=1.5),  # type: ignore[arg-type]
    "chunks='1'": lambda: tsnn.ExpertParallelMoE(8, 8, 4, 2, chunks="1"),  # type: ignore[arg-type]
    "exact='yes'": lambda: tsnn.ExpertParallelMoE(8, 8, 4, 2, exact="yes"),  # type: ignore[arg-type]
    "capacity=inf": lambda: tsnn.ExpertParallelMoE(8, 8, 4, 2, capacity=math.inf),
    "capacity='1.0'": lambda: tsnn.ExpertParallelMoE(8, 8, 4, 2, capacity="1.0"),  # type: ignore[arg-type]
}


def refused() -> list[str]:
    comm.init()
    missed = []
    for word, make in WRONG.items():
        try:
            make()
            missed.append(f"{word}: nothing")
        except TileError as error:
            missed += [] if word in str(error) else [f"{word}: {error}"]
    return missed


@pytest.mark.parametrize("world", [1, 2])
def test_numbers_that_a_layer_cannot_have(ranks: Any, world: int):
    assert ranks(world, target="cpu").call(refused) == [[]] * world


def test_a_layer_may_have_no_columns(ranks: Any):
    assert ranks(1, target="cpu").call(of_nothing) == [(3, 0)]


def of_nothing() -> tuple[int, ...]:
    comm.init()
    return tuple(tsnn.ColumnParallelLinear(4, 0)(torch.ones(3, 4)).shape)


def seeded() -> list[str]:
    """Layers with parameters that are alike on all ranks, made with a seed of each rank's own."""
    comm.init()
    torch.manual_seed(comm.rank())
    said = []
    for make in (lambda: tsnn.RowParallelLinear(4, 4), lambda: tsnn.ExpertParallelMoE(8, 8, 2, 1)):
        with pytest.raises(TileError) as refused:
            make()
        said.append(str(refused.value))
    tsnn.ColumnParallelLinear(4, 4)  # a rank's own rows are of its own seed then
    return said


def test_ranks_that_draw_different_numbers(ranks: Any):
    for bias, router in ranks(2, target="cpu").call(seeded):
        assert "RowParallelLinear.bias: ranks drew different numbers" in bias and "manual_seed" in bias
        assert "ExpertParallelMoE.router: ranks drew different numbers" in router
