"""A transformer's feed-forward layer with a gate (Shazeer, "GLU Variants Improve Transformer", 2020), split
over ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilescale.errors import TileValueError
from tilescale.nn.gate import runs
from tilescale.nn.linear import ColumnParallelLinear, RowParallelLinear
from tilescale.nn.parameters import Parallel, split
from tilescale.ops.activations import GATES, RUN


class ParallelMLP(Parallel):
    """down(act(gate(x)) · up(x)): gate and up are one product, whose rows are in one weight, eight of the
    gate and eight of up in turn, and whose epilogue is the gate.

    A checkpoint of the unsharded layer has ``gate_proj``, ``up_proj`` and ``down_proj``, which
    ``load_state_dict`` takes and `full_state_dict` gives.

    Args:
        features, hidden: of the whole layer; hidden is a multiple of eight for each rank.
        activation: "silu", "gelu" (by erf) or "relu".
        group, sequence_parallel, keep_gathered: as `ColumnParallelLinear`'s.
    """

    def __init__(
        self, features: int, hidden: int, activation: str = "silu", bias: bool = False, *, group: Any = None,
        sequence_parallel: bool = True, keep_gathered: bool = False, device: Any = None, dtype: Any = None,
    ):  # fmt: skip
        super().__init__(group)
        if activation not in GATES:
            raise TileValueError(f"activation={activation!r}", expected=", ".join(map(repr, GATES)))
        if split(hidden, self.ranks, "hidden") % RUN:
            raise TileValueError(
                f"hidden={hidden} on {self.ranks} ranks", expected=f"a multiple of {RUN} for each"
            )
        how: dict[str, Any] = {
            "group": group, "sequence_parallel": sequence_parallel, "device": device, "dtype": dtype
        }  # fmt: skip
        self.gate_up_proj = ColumnParallelLinear(
            features, 2 * hidden, bias, keep_gathered=keep_gathered, gate=activation, **how
        )
        self.down_proj = RowParallelLinear(hidden, features, bias, **how)
        for name in ("weight", "bias") if bias else ("weight",):
            self.woven[f"gate_up_proj.{name}"] = runs(f"gate_proj.{name}", f"up_proj.{name}")

    @property
    def activation(self) -> str:
        """The gate's function, which is the first product's."""
        return self.gate_up_proj.gate

    def forward(self, x: Tensor, rows: int | None = None) -> Tensor:
        """Of x (m, …, features) the same shape; rows as `ColumnParallelLinear.forward` takes them."""
        made: Tensor = self.down_proj(self.gate_up_proj(x, rows))
        return made

    def set_parts(self, gate: torch.nn.Linear, up: torch.nn.Linear, down: torch.nn.Linear) -> None:
        """Fills the parameters from an unsharded layer's."""
        for name in ("weight", "bias") if gate.bias is not None else ("weight",):
            both = self.woven[f"gate_up_proj.{name}"].weave(getattr(gate, name), getattr(up, name))
            self.gate_up_proj.set_whole(name, both)
            self.down_proj.set_whole(name, getattr(down, name))
