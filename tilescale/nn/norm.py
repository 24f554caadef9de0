"""RMSNorm with gradients (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tilescale import ops
from tilescale.errors import TileValueError
from tilescale.nn import products
from tilescale.nn.operations import call, define
from tilescale.nn.parameters import Parallel


class RMSNorm(Parallel):
    """x · weight / sqrt(mean(x²) + eps) over the last axis, whose weight all ranks have.

    Args:
        features: extent of the last axis.
        sequence_parallel: each rank has rows of its own, so the weight's gradient is added over the ranks;
            else x is alike on all of them, and so is the gradient.
    """

    weight: nn.Parameter

    def __init__(
        self, features: int, eps: float = 1e-6, *, group: Any = None, sequence_parallel: bool = True,
        device: Any = None, dtype: Any = None,
    ):  # fmt: skip
        super().__init__(group)
        self.features, self.eps, self.sequence_parallel = features, eps, sequence_parallel
        self.place("weight", (features,), None, {"device": device, "dtype": dtype})
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(…, features) of x's dtype, computed in float32 (float64 of float64); the weight is rounded to x's
        dtype first.

        Raises:
            TileValueError: the last axis has another extent.
        """
        if not x.dim() or x.shape[-1] != self.features:
            raise TileValueError(f"RMSNorm of {tuple(x.shape)}", expected=f"(…, {self.features})")
        weight = self.local("weight")
        if self.sequence_parallel:
            weight = products.copied(weight, self.group_name)
        made: Tensor = call.rms_norm(x, weight.to(x.dtype), self.eps)
        return made

    def extra_repr(self) -> str:
        return f"{self.features}, eps={self.eps}"


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    dx, dw = call.rms_norm_backward(dy, x, weight, ctx.eps)
    return *products.wanted(ctx, dx, dw), None


@define(
    "rms_norm",
    "(Tensor x, Tensor weight, float eps) -> Tensor",
    lambda x, weight, eps: x.new_empty(x.shape),
    _keep,
    _backward,
)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`ops.rms_norm`."""
    return ops.rms_norm(x.contiguous(), weight.contiguous(), eps)


@define(
    "rms_norm_backward",
    "(Tensor dy, Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
    lambda dy, x, weight, eps: (x.new_empty(x.shape), weight.new_empty(weight.shape)),
)
def rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`ops.rms_norm_backward`."""
    return ops.rms_norm_backward(dy.contiguous(), x.contiguous(), weight.contiguous(), eps)
