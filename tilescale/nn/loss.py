"""The last product of a language model and its cross-entropy in one: logits of all rows are never in memory.

Each rank has some of the words. Rows go through in chunks: a chunk's logits are computed, each rank finds the
greatest of its words and the sum of exponentials below it, ranks exchange these (three numbers a row), and
the gradient takes the logits' place and is multiplied on at once, so that nothing is left for the backward
but a factor (Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", 2024, has the idea for
one GPU)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tilescale import ops
from tilescale.errors import TileTypeError, TileValueError
from tilescale.nn import groups, products
from tilescale.nn.linear import all_rows, flat_rows, like_rows
from tilescale.nn.operations import call, define
from tilescale.nn.parameters import Parallel, cast
from tilescale.ops.ranks.groups import filled, share

#: bytes of a chunk's logits, where these are no fewer rows than features: each chunk's part of the weight's
#: gradient is written and added, which takes long where rows are few
CHUNK = 256 << 20
#: what float16's gradients are multiplied by until the backward: those of a word that is one of 10⁶ keep
#: their digits, and a row's sum has room up to weights of 100
STRETCH = 256.0
_ONCE = b"linear_cross_entropy has no gradients of gradients"


class LinearCrossEntropy(Parallel):
    """mean or sum over rows of −log softmax(x · weightᵀ)[target], with the vocabulary split over ranks.

    Args:
        features, vocabulary: of the whole layer; the vocabulary is a multiple of the ranks.
        reduction: "mean" over rows that are not ignored, or "sum".
        ignore_index: rows with this target count nothing.
        chunk: rows at once, of all ranks together; without it as many as have 256 MB of logits on a rank, or
            as many as features, whose logits are as large as the weight's gradient.
        group, sequence_parallel: as `ColumnParallelLinear`'s.
    """

    weight: nn.Parameter

    def __init__(
        self, features: int, vocabulary: int, *, reduction: str = "mean", ignore_index: int = -100,
        chunk: int | None = None, group: Any = None, sequence_parallel: bool = True, device: Any = None,
        dtype: Any = None,
    ):  # fmt: skip
        super().__init__(group)
        if reduction not in ("mean", "sum"):
            raise TileValueError(
                f"reduction={reduction!r}",
                expected='"mean" or "sum": gradients are computed with the loss, before anybody weighs rows',
            )
        if chunk is not None and chunk < 1:
            raise TileValueError(f"chunk={chunk}", expected="rows, 1 at least")
        self.features, self.vocabulary, self.chunk = features, vocabulary, chunk
        self.reduction, self.ignore_index, self.sequence_parallel = reduction, ignore_index, sequence_parallel
        self.place("weight", (vocabulary, features), 0, {"device": device, "dtype": dtype})
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As `torch.nn.Linear`'s weight."""
        self.drawn("weight", lambda w: nn.init.uniform_(w, -(self.features**-0.5), self.features**-0.5))

    def forward(self, x: Tensor, targets: Tensor, rows: int | None = None) -> Tensor:
        """The loss, float32 (float64 of float64), the same bits on every rank.

        Args:
            x: (m, …, features); sequence parallel: this rank's part of the first axis.
            targets: (M, …), int64, of all ranks' rows, alike on all ranks.
            rows: as `ColumnParallelLinear.forward` takes them.

        Raises:
            TileValueError, TileTypeError: what does not fit.
        """
        a, weight = cast(x, self.local("weight"))
        flat = flat_rows(a, weight, "LinearCrossEntropy")
        ranks = self.ranks if self.sequence_parallel else 1
        every = all_rows(rows, x, ranks, "LinearCrossEntropy")
        if targets.numel() != every:
            raise TileValueError(f"targets {tuple(targets.shape)} of {every} rows", expected="one a row")
        if targets.dtype != torch.int64:
            raise TileTypeError(f"targets of {targets.dtype}", expected="int64")
        chunk = self.chunk or max(self.features, CHUNK // (4 * max(1, weight.shape[0])))
        grad = torch.is_grad_enabled()
        loss, *_ = call.linear_cross_entropy(
            flat, weight, targets.reshape(-1), chunk, self.ignore_index, self.reduction == "mean",
            self.group_name, self.sequence_parallel, grad and flat.requires_grad,
            grad and weight.requires_grad,
        )  # fmt: skip
        made: Tensor = loss
        return made

    def logits(self, x: Tensor, rows: int | None = None) -> Tensor:
        """The logits of this rank's words, (M, …, vocabulary / n), for what is no training."""
        a, weight = cast(x, self.local("weight"))
        flat = flat_rows(a, weight, "LinearCrossEntropy")
        every = all_rows(rows, x, self.ranks if self.sequence_parallel else 1, "LinearCrossEntropy")
        if self.sequence_parallel:
            y = call.all_gather_matmul(flat, weight, None, every, self.group_name)
        else:
            y = call.copied_matmul(flat, weight, None, self.group_name)
        return like_rows(y, x)

    def extra_repr(self) -> str:
        return f"{self.features}, {self.vocabulary}, reduction={self.reduction!r}"


def _like(x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *_, need_x, need_w = rest
    loss = x.new_empty((), dtype=torch.promote_types(x.dtype, torch.float32))
    dx = x.new_empty(x.shape if need_x else 0)
    return loss, dx, weight.new_empty(weight.shape if need_w else 0, dtype=_kept(weight)), loss.clone()


def _kept(weight: Tensor) -> torch.dtype:
    """The dtype of the weight's gradient until the backward."""
    return torch.float32 if weight.dtype == torch.float16 else weight.dtype


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, *_ = inputs
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # as many zeros as the weight has numbers
    ctx.dtypes = x.dtype, weight.dtype


def _backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Any, ...]:
    need_x, need_w, *rest = ctx.needs_input_grad
    if dy is None:
        return (None,) * len(ctx.needs_input_grad)
    dx, dw, factor = ctx.saved_tensors
    for_x, for_w = ctx.dtypes
    by = (dy * factor).view(1, 1)  # of two axes, so that the product is taken in its dtype and rounded once
    return (
        _times(dx, by, for_x) if need_x else None,
        _times(dw, by, for_w) if need_w else None,
        *[None] * len(rest),
    )


def _times(d: Tensor, by: Tensor, dtype: torch.dtype) -> Tensor:
    """d · by in a dtype, without the product's own numbers in between. Its own gradients are an error: d was
    computed in the forward, so autograd does not see what it depends on, and a penalty on it would count
    nothing."""
    if not torch.is_grad_enabled():  # no create_graph
        return torch.mul(d, by, out=torch.empty_like(d, dtype=dtype))
    made: Tensor = torch._C._functions.DelayedError(_ONCE, 1)((d * by).to(dtype).detach().requires_grad_())
    return made


@define(
    "linear_cross_entropy",
    "(Tensor x, Tensor weight, Tensor targets, int chunk, int ignore, bool mean, str group, bool split, "
    "bool need_x, bool need_w) -> (Tensor, Tensor, Tensor, Tensor)",
    _like,
    _keep,
    _backward,
)
def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, chunk: int, ignore: int, mean: bool, group: str, split: bool,
    need_x: bool, need_w: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The loss, its gradients by x and by the weight, and a factor that these lack.

    Where rows are ``split``, a chunk has as many of each rank's: gathered by the product that makes the
    logits, scattered by the one that makes x's gradient.

    float16 has no room for gradients of a mean, which a scaler makes larger in the backward alone: they are
    those of the sum, times `STRETCH`, and the weight's stays float32.
    """
    named, team = groups.group_of(group), groups.team(group)
    products.numbered(targets, weight.shape[0] * team.size, "a target", ignore)
    ranks = team.size if split else 1
    kind, V, M = torch.promote_types(x.dtype, torch.float32), weight.shape[0], targets.shape[0]
    each = share(M, ranks)
    x = filled(x.contiguous(), each)
    aims = filled(targets + 1, ranks * each) - 1  # a row that nobody has gets what follows
    aims[M:] = ignore
    aims = aims.view(ranks, each)
    one = torch.ones((), dtype=kind, device=x.device)
    counted = (targets != ignore).sum().to(kind) if mean else one
    factor = one / counted.clamp(min=1)  # no row counts: the loss is 0 / 0, the gradients are 0
    now, later = (one * STRETCH, factor / STRETCH) if x.dtype == torch.float16 else (factor, one.clone())
    total = x.new_zeros((), dtype=kind)
    dx, dw = torch.empty_like(x) if need_x else None, None
    step = max(1, chunk // ranks)
    for low in range(0, each, step):
        rows, mine = aims[:, low : low + step].reshape(-1), x[low : low + step]
        logits, every = _logits(mine, weight, rows.shape[0], named, split, need_w, kind)
        first = team.rank * V
        parts = ops.cross_entropy_parts(logits, rows, first)
        every_part = ops.all_gather(parts, group=named).view(team.size, *parts.shape)
        d, losses = ops.cross_entropy_gradient(logits, rows, every_part, now, first, ignore, dtype=x.dtype)
        del logits
        total += losses.sum()
        if not (need_x or need_w):
            continue
        if dx is not None:
            made = products.scattered if split else products.reduced
            dx[low : low + step] = made(d, weight, None, named)
        if need_w:
            part = _summand(d, every)
            dw = part if dw is None else dw.add_(part)
    own = products.rows_of(team.rank, M, ranks) if split else M
    dx = products.none(x) if dx is None else dx[:own]
    if not need_w:
        dw = weight.new_empty(0)
    elif dw is None:
        dw = torch.zeros_like(weight)
    return total / counted, dx, dw.to(_kept(weight)), later


def _logits(
    x: Tensor, weight: Tensor, rows: int, group: Any, split: bool, keep: bool, kind: torch.dtype
) -> tuple[Tensor, Tensor]:
    """A chunk's logits of this rank's words, and its rows of x (``keep``)."""
    if split:
        logits, every = products.gathered(x, weight.T, None, rows, group, whole=keep, out_dtype=kind)
        return logits, every.clone() if keep else every  # the exchange takes the memory where they lie
    if products.by_library(x):
        return torch.mm(x, weight.T), x
    return ops.matmul(x, weight.T, out_dtype=kind), x


def _summand(d: Tensor, x: Tensor) -> Tensor:
    """A chunk's part of the weight's gradient, which is added up in float32."""
    return torch.mm(d.T, x) if products.by_library(d) else ops.matmul(d.T, x, out_dtype=torch.float32)
