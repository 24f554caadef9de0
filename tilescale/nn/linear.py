"""Linear layers whose weight is split over ranks, along its columns or its rows (Shoeybi et al.,
"Megatron-LM", 2019), with activations between them split by rows (Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models", 2022)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from tilescale.errors import CommError, LaunchError, TileError, TileTypeError, TileValueError
from tilescale.nn import products
from tilescale.nn.operations import call
from tilescale.nn.parameters import Parallel, cast, split
from tilescale.ops.activations import check_turns
from tilescale.ops.ranks.expert_kernels import TOO_MANY
from tilescale.ops.ranks.groups import number_of


def flat_rows(x: Tensor, weight: Tensor, what: str) -> Tensor:
    """x as rows (m, features), of a weight (out, features).

    Raises:
        TileValueError: its last axis has another extent, or it has none but that.
        TileTypeError: it is of another dtype.
    """
    features = weight.shape[1]
    if x.dim() < 2 or x.shape[-1] != features:
        raise TileValueError(f"{what} of {tuple(x.shape)}", expected=f"(…, rows, {features})")
    if 0 in x.shape[1:-1]:
        raise TileValueError(f"{what} of {tuple(x.shape)}", expected="no empty axis but the first one")
    same_dtype(x, weight, what)
    return x.reshape(-1, features)


def same_dtype(x: Tensor, weight: Tensor, what: str) -> None:
    """Before ranks wait for each other.

    Raises:
        TileTypeError: x, which autocast may have cast, is of another dtype than the weight.
    """
    if x.dtype != weight.dtype and not x.is_meta:  # autocast has no dtype for meta
        raise TileTypeError(
            f"{what}: x of {x.dtype}, weights of {weight.dtype}",
            expected="one dtype",
            hint=f"x.to({weight.dtype}), or torch.autocast around the model",
        )


def all_rows(rows: int | None, x: Tensor, ranks: int, what: str) -> int:
    """All ranks' rows of x together. ``ranks`` is 1 where x is alike on all of them.

    Raises:
        TileValueError: ``rows`` of an x of more than two axes, or of one rank with others than its own.
    """
    if rows is None:
        return math.prod(x.shape[:-1]) * ranks
    if x.dim() != 2:
        raise TileValueError(f"{what} of {tuple(x.shape)} with rows={rows}", expected="x (m, features)")
    if ranks == 1 and rows != x.shape[0]:
        raise TileValueError(
            f"{what}: x has {x.shape[0]} rows, of rows={rows} in all, and no other rank has more",
            expected=f"rows={x.shape[0]}, or none: they are for an x that is split over several ranks",
        )
    return rows


#: in what is said where ranks' launches, or allocations, do not fit together
_DIFFER = ("of their team ranks", "do different things", TOO_MANY)


def refuse_others(error: TileError, layer: Parallel, x: Tensor, expected: str, hint: str) -> None:
    """Says of a layer's input what a kernel says of its arguments, where ranks' launches do not fit together.
    On a GPU a launch fails later, when another layer may be running: then the kernel's words stay.

    Raises:
        LaunchError, CommError: in the layer's words.
    """
    here = x.device.type == "cpu" or isinstance(error, CommError)
    if here and any(text in error.message for text in _DIFFER):
        given = f"x is {tuple(x.shape)} of {x.dtype} on rank {layer.rank} of {layer.ranks}"
        what = f"{type(layer).__name__}: ranks' inputs do not fit together: {given}"
        raise type(error)(what, expected=expected, hint=hint) from error


#: what `refuse_others` says of a layer that takes ``rows=``
SPLIT = (
    "x of one dtype, and as many rows on all ranks",
    "rows= of the layer: all ranks' rows together, alike on all ranks, split as torch.chunk does",
)


def like_rows(y: Tensor, x: Tensor) -> Tensor:
    """Rows y with x's axes between the first and the last one."""
    between = math.prod(x.shape[1:-1])
    return y if x.dim() == 2 else y.view(y.shape[0] // between, *x.shape[1:-1], y.shape[1])


class _Linear(Parallel):
    """What both have: extents, and an unsharded weight (out, in) as `torch.nn.Linear` draws it."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    gate: str = ""

    def __init__(
        self, in_features: int, out_features: int, bias: bool, group: Any, axis: int, device: Any, dtype: Any
    ):
        super().__init__(group)
        self.in_features = number_of(in_features, "in_features")
        self.out_features = number_of(out_features, "out_features")
        like = {"device": device, "dtype": dtype}
        self.place("weight", (out_features, in_features), axis, like)
        if bias:
            self.place("bias", (out_features,), 0 if axis == 0 else None, like)
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Random numbers as `torch.nn.Linear` draws them for the whole; ranks need the same seed."""
        bound = self.in_features**-0.5 if self.in_features else 0.0
        self.drawn("weight", lambda w: nn.init.uniform_(w, -bound, bound))
        if self.bias is not None:
            self.drawn("bias", lambda b: nn.init.uniform_(b, -bound, bound))

    def extra_repr(self) -> str:
        gate = f", gate={self.gate!r}" if self.gate else ""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}{gate}, rank {self.rank} of {self.ranks}"
        )


class ColumnParallelLinear(_Linear):
    """A linear layer of which each rank has some of the outputs: rows r·N/n to (r+1)·N/n of its weight.

    Args:
        in_features, out_features: of the whole layer; out_features is a multiple of the ranks.
        group: see `tilescale.ops.ranks.groups.team_of`; a DeviceMesh of one axis makes the parameters
            DTensors.
        sequence_parallel: x is split by rows over the ranks and gathered within the product; else x is alike
            on all ranks.
        keep_gathered: the gathered x is kept for the weight's gradient, which needs it; else it is gathered
            again.
        gate: "silu", "gelu" (by erf) or "relu": outputs come in turn, eight of a gate and eight that it
            scales. The layer gives this function of the gate's times the others, half as many.

    Raises:
        TileValueError: out_features is no multiple of the ranks, or a rank's no multiple of 16 of a gate.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, group: Any = None,
        sequence_parallel: bool = True, keep_gathered: bool = False, gate: str = "", device: Any = None,
        dtype: Any = None,
    ):  # fmt: skip
        super().__init__(in_features, out_features, bias, group, 0, device, dtype)
        self.sequence_parallel, self.keep_gathered, self.gate = sequence_parallel, keep_gathered, gate
        if gate:
            check_turns("ColumnParallelLinear", split(out_features, self.ranks, "out_features"), "", gate)

    def forward(self, x: Tensor, rows: int | None = None) -> Tensor:
        """x · weightᵀ + bias, the columns of this rank.

        Args:
            x: (m, …, in_features); sequence parallel: this rank's part of the first axis.
            rows: all ranks' m together, where they do not have equally many: split as torch.chunk does. x is
                (m, in_features) then. Where x is alike on all ranks it is m itself.

        Returns:
            (M, …, out_features / n), M all ranks' m together (m itself where x is alike on all ranks). Of a
            gate half as many columns.

        Raises:
            TileValueError, TileTypeError: a shape or a dtype that does not fit.
        """
        a, weight, bias = cast(x, self.local("weight"), self.local("bias"))
        flat = flat_rows(a, weight, "ColumnParallelLinear")
        needed = bool(self.gate) and torch.is_grad_enabled()
        needed = needed and any(t is not None and t.requires_grad for t in (flat, weight, bias))
        every = all_rows(rows, x, self.ranks if self.sequence_parallel else 1, "ColumnParallelLinear")
        if not self.sequence_parallel:
            if self.gate:
                y, _ = call.copied_gated(flat, weight, bias, self.group_name, self.gate, needed)
            else:
                y = call.copied_matmul(flat, weight, bias, self.group_name)
        else:
            given = (flat, weight, bias, every, self.group_name)
            kept = self.keep_gathered and torch.is_grad_enabled() and weight.requires_grad
            try:
                if self.gate:
                    y, _, _ = call.all_gather_gated(*given, self.gate, needed, kept)
                elif kept:
                    y, _ = call.all_gather_matmul_kept(*given)
                else:
                    y = call.all_gather_matmul(*given)
            except (LaunchError, CommError) as error:
                refuse_others(error, self, x, *SPLIT)
                raise
        return like_rows(y, x)


#: what `refuse_others` says of a layer that takes all rows
ALL_ROWS = (
    "x of one dtype, and all ranks' rows, as many on each",
    "rows= of the ColumnParallelLinear in front: all ranks' rows together, alike on all ranks",
)


class RowParallelLinear(_Linear):
    """A linear layer of which each rank has some of the inputs: columns of its weight. Its x is what a
    `ColumnParallelLinear` gives.

    Args:
        in_features, out_features: of the whole layer; in_features is a multiple of the ranks.
        group: as `ColumnParallelLinear`'s.
        sequence_parallel: each rank gets its rows of the result; else all get all of it, the same bits.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, group: Any = None,
        sequence_parallel: bool = True, device: Any = None, dtype: Any = None,
    ):  # fmt: skip
        super().__init__(in_features, out_features, bias, group, 1, device, dtype)
        self.sequence_parallel = sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """The ranks' sum of x · weightᵀ, plus the bias, added once.

        Args:
            x: (M, …, in_features / n), all rows on each rank.

        Returns:
            sequence parallel: (m, …, out_features), this rank's part of the first axis as torch.chunk splits
            it; else (M, …, out_features).

        Raises:
            TileValueError: a shape that does not fit; an x of more than two axes whose first is no multiple
            of the ranks. TileTypeError: a dtype that does not fit.
        """
        given = self.local("bias")
        if given is not None and self.sequence_parallel:
            given = products.copied(given, self.group_name)
        a, weight, bias = cast(x, self.local("weight"), given)
        flat = flat_rows(a, weight, "RowParallelLinear")
        if self.sequence_parallel and x.dim() > 2 and x.shape[0] % self.ranks:
            raise TileValueError(
                f"RowParallelLinear of {tuple(x.shape)} on {self.ranks} ranks",
                expected="a first axis that is a multiple of the ranks, or x (M, features)",
            )
        product = call.matmul_reduce_scatter if self.sequence_parallel else call.matmul_all_reduce
        try:
            y = product(flat, weight, bias, self.group_name)
        except (LaunchError, CommError) as error:
            refuse_others(error, self, x, *ALL_ROWS)
            raise
        return like_rows(y, x)
