"""A router's scores that are zeros in their dtype: weights are what they are next to zero."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilescale import comm
from tilescale import nn as tsnn


def vanished(scores: str) -> list[bool]:
    """Two of four experts, whose scores all vanish but those that a bias keeps from being chosen."""
    comm.init()
    layer = tsnn.ExpertParallelMoE(
        2, 8, 4, 2, scores=scores, bias_rate=0.1, aux_loss=True, scaling=2.0, dtype=torch.float64
    )
    layer.bias.copy_(torch.tensor([0.0, 0.0, 5.0, 6.0]))
    logits = torch.tensor([0.0, -1.0, -2000.0, -2001.0], dtype=torch.float64)
    logits = logits - 3000 if scores == "sigmoid" else logits
    with torch.no_grad():
        layer.router.copy_(logits[:, None] * torch.tensor([1.0, 0.0]))
    x = torch.ones(1, 2, dtype=torch.float64, requires_grad=True)
    weights, chosen = layer.route(x, 1)
    weights[0, 0].backward(retain_graph=True)
    want = torch.tensor([-2001.0, -2000.0], dtype=torch.float64).softmax(0)
    grad, (a, b) = layer.router.grad[:, 0].clone(), want.tolist()
    layer.aux_loss.backward()
    return [
        chosen.tolist() == [[3, 2]],
        bool(torch.allclose(weights, 2 * want)),
        bool(torch.allclose(grad, torch.tensor([0, 0, -2 * a * b, 2 * a * b], dtype=torch.float64))),
        bool(layer.aux_loss.isfinite()) and bool(layer.router.grad.isfinite().all()),
    ]


@pytest.mark.parametrize("scores", ["sigmoid", "softmax"])
def test_scores_that_vanish(ranks: Any, scores: str):
    assert ranks(1, target="cpu").call(vanished, scores) == [[True] * 4]
