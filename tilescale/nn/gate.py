"""Gates of products whose columns come in turn: `RUN` of the gate, as many that it scales, and so on. So a
rank's columns are runs of both, however many ranks there are, and each run is one vector of 16 bytes of
16-bit floats.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilescale.nn.parameters import Woven
from tilescale.ops.activations import RUN


def runs(*names: str) -> Woven:
    """The weights (or biases) of gate and up in one parameter, in runs of rows."""
    return Woven(names, _in_turn, _apart)


def _in_turn(*parts: Tensor) -> Tensor:
    return torch.stack([p.unflatten(0, (-1, RUN)) for p in parts], 1).flatten(0, 2)


def _apart(both: Tensor) -> tuple[Tensor, ...]:
    return tuple(p.flatten(0, 1) for p in both.unflatten(0, (-1, 2, RUN)).unbind(1))
