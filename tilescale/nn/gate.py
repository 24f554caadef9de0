"""act(gate) · up of a product whose columns come in turn: `RUN` of the gate, as many that it scales, and so
on. So a rank's columns are runs of both, however many ranks there are, and each run is one vector of 16 bytes
of 16-bit floats: rows of 2 · `RUN` columns, as `ops.gated_activation` takes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilescale import ops
from tilescale.nn.operations import call, define
from tilescale.nn.parameters import Woven
from tilescale.ops.activations import RUN


def runs(*names: str) -> Woven:
    """The weights (or biases) of gate and up in one parameter, in runs of rows."""
    return Woven(names, _in_turn, _apart)


def _in_turn(*parts: Tensor) -> Tensor:
    return torch.stack([p.unflatten(0, (-1, RUN)) for p in parts], 1).flatten(0, 2)


def _apart(both: Tensor) -> tuple[Tensor, ...]:
    return tuple(p.flatten(0, 1) for p in both.unflatten(0, (-1, 2, RUN)).unbind(1))


def gated(h: Tensor, activation: str) -> Tensor:
    """(…, F) of h (…, 2 F)."""
    rows = h.reshape(-1, 2 * RUN)
    made: Tensor = call.gated(rows, activation)
    return made.view(*h.shape[:-1], h.shape[-1] // 2)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    h, ctx.activation = inputs
    ctx.save_for_backward(h)


@define(
    "gated",
    "(Tensor h, str activation) -> Tensor",
    lambda h, activation: h.new_empty(h.shape[0], RUN),
    _keep,
    lambda ctx, dy: (call.gated_backward(dy, *ctx.saved_tensors, ctx.activation), None),
)
def gated_rows(h: Tensor, activation: str) -> Tensor:
    """`ops.gated_activation`."""
    return ops.gated_activation(h.contiguous(), activation)


@define(
    "gated_backward",
    "(Tensor dy, Tensor h, str activation) -> Tensor",
    lambda dy, h, activation: h.new_empty(h.shape),
)
def gated_backward(dy: Tensor, h: Tensor, activation: str) -> Tensor:
    """`ops.gated_activation_backward`."""
    return ops.gated_activation_backward(dy.contiguous(), h.contiguous(), activation)
