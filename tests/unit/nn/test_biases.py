"""The bias that balances experts: what a cast leaves of it, and ranks that have other batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilescale import comm
from tilescale import nn as tsnn


def cast(dtype: torch.dtype) -> list[bool]:
    """A layer that becomes one of another dtype when it has a bias, counts 600 tokens and moves it."""
    comm.init()
    layer = tsnn.ExpertParallelMoE(16, 16, 2, 1, bias_rate=2.0**-12)
    layer.bias.copy_(torch.tensor([1 + 2.0**-12, 0.0]))
    layer.to(dtype)
    layer(torch.ones(300, 16, dtype=dtype)), layer(torch.ones(300, 16, dtype=dtype))
    counted = layer.load.tolist()
    layer.update_bias()
    return [counted == [600.0, 0.0], layer.bias.tolist() == [1.0, 2.0**-12], layer.router.dtype == dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_bias_and_counts_stay_float32(ranks: Any, dtype: torch.dtype):
    assert ranks(1, target="cpu").call(cast, dtype) == [[True] * 3]


def across() -> list[float]:
    """Each rank is a group of its own; rank 1 has more tokens, which go elsewhere."""
    comm.init()
    own, other = (comm.team([r]) for r in range(2))
    layer = tsnn.ExpertParallelMoE(2, 8, 2, 1, bias_rate=0.5, group=own or other, dtype=torch.float64)
    with torch.no_grad():
        layer.router.copy_(torch.eye(2, dtype=torch.float64))
    layer(torch.eye(2, dtype=torch.float64)[comm.rank()].expand(3 + comm.rank(), 2))
    layer.update_bias(comm.team(range(2)))
    return list(layer.bias.tolist())


def test_biases_are_alike_on_ranks_with_other_batches(ranks: Any):
    assert ranks(2, target="cpu").call(across) == [[0.5, -0.5]] * 2
