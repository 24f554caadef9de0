"""act(gate) · up of a product whose columns alternate: gate, up, gate, up, …"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import gelu, silu

ACTIVATIONS = {"silu": silu, "gelu": gelu}


def gated(h: Tensor, activation: str) -> Tensor:
    """(…, F) of h (…, 2 F)."""
    gate, up = h.unflatten(-1, (-1, 2)).unbind(-1)
    made: Tensor = ACTIVATIONS[activation](gate) * up
    return made
