"""Products and collectives of several ranks as operations of torch, with gradients: `torch.library` knows
their shapes, so that `torch.compile` keeps them in one graph, and activation checkpointing sees them by name.

They are ``torch.ops.tilescale.*``. x are rows (m, in), weights are a linear layer's (out, in). Groups go by
name (`groups.name_of`).

| operation | computes | gradients of x; of the weight |
|---|---|---|
| ``all_gather_matmul`` | gather(x) · wᵀ | reduce-scatter of dy · w; dyᵀ · gather(x), gathered again |
| ``all_gather_gated`` | act(gate) · up of it, in the product's epilogue | the same, of the gate's gradient |
| ``matmul_reduce_scatter`` | this rank's rows of Σ x · wᵀ | gather(dy) · w; gather(dy)ᵀ · x, one gather |
| ``matmul_all_reduce`` | Σ x · wᵀ | dy · w; dyᵀ · x |
| ``copied_matmul`` | x · wᵀ, x alike on all ranks | Σ dy · w; dyᵀ · x |
| ``copied_gated`` | act(gate) · up of it | the same, of the gate's gradient |

A product and the collective beside it are one kernel.

A gathered x is not kept for the backward: that would be as many copies of all activations as there are ranks.
``all_gather_matmul_kept`` keeps it, where there is memory to spare.

bfloat16 and float16 go to the kernels of `tilescale.ops`, on GPUs float32 too. float64 anywhere, and float32
on the processor, are multiplied by torch's own product, beside our collectives: its library has a float64
product, and on a processor it is faster than our kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilescale import ops
from tilescale.errors import TileValueError
from tilescale.nn import groups
from tilescale.nn.operations import call, define
from tilescale.ops.activations import RUN
from tilescale.ops.gated import gated_columns
from tilescale.ops.gated_gemm import gated_product
from tilescale.ops.ranks.gather import begin as begin_gather
from tilescale.ops.ranks.gather_gemm import product_and_rows
from tilescale.ops.ranks.groups import rows_of, span_of


def by_library(x: Tensor) -> bool:
    """Whether torch's product is taken instead of a kernel of ours."""
    return x.dtype == torch.float64 or (x.dtype == torch.float32 and x.device.type == "cpu")


def product(a: Tensor, b: Tensor) -> Tensor:
    """a · b of one rank; zero or empty where an extent is zero."""
    if 0 in (*a.shape, b.shape[1]):
        return a.new_zeros(a.shape[0], b.shape[1])
    return torch.mm(a, b) if by_library(a) else ops.matmul(a, b)


def gathered(
    x: Tensor, w: Tensor, bias: Tensor | None, rows: int, group: groups.Group, whole: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """gather(x) · w + bias, and gather(x), which is there until the group's next operation. ``out_dtype``:
    float32, of 16-bit floats."""
    if not by_library(x):
        return product_and_rows(x, w, bias, group=group, rows=rows, whole=whole, out_dtype=out_dtype)[:2]
    everyone = ops.all_gather(x, group=group, rows=rows)
    made = torch.mm(everyone, w)
    return (made if bias is None else made.add_(bias)), everyone


def scattered(x: Tensor, w: Tensor, bias: Tensor | None, group: groups.Group) -> Tensor:
    """This rank's rows of the ranks' sum of x · w, plus the bias."""
    if not by_library(x):
        return ops.matmul_reduce_scatter(x, w, bias, group=group)
    made = ops.reduce_scatter(torch.mm(x, w), group=group)
    return made if bias is None else made.add_(bias)


def reduced(x: Tensor, w: Tensor, bias: Tensor | None, group: groups.Group) -> Tensor:
    """The ranks' sum of x · w, plus the bias."""
    if not by_library(x):
        return ops.matmul_all_reduce(x, w, bias, group=group)
    made = ops.all_reduce(torch.mm(x, w), group=group)
    return made if bias is None else made.add_(bias)


def none(like: Tensor) -> Tensor:
    """What stands for a gradient that nobody wants: operations return tensors."""
    return like.new_empty(0)


def wanted(ctx: Any, *found: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients that are wanted, None instead of the others."""
    return tuple(f if need else None for f, need in zip(found, ctx.needs_input_grad, strict=False))


def summed_rows(dy: Tensor) -> Tensor:
    """A bias's gradient, added in float32 (float64 of float64)."""
    return dy.sum(0, dtype=torch.promote_types(dy.dtype, torch.float32)).to(dy.dtype)


def numbered(numbers: Tensor, count: int, what: str, but: int | None = None) -> None:
    """Refuses numbers beyond 0 to count - 1 that are not ``but``. On the processor at once; on a GPU, which
    the host does not wait for, the stream fails, as it does in torch's own look-ups.

    Raises:
        TileValueError: there is one.
    """
    wrong = (numbers < 0) | (numbers >= count)
    if but is not None:
        wrong &= numbers != but
    if numbers.device.type != "cpu":
        torch._assert_async(~wrong.any(), f"{what} is none of 0 to {count - 1}")
    elif bool(wrong.any()):
        also = "" if but is None else f", or {but}"
        raise TileValueError(f"{what} is {int(numbers[wrong][0])}", expected=f"0 to {count - 1}{also}")


# ---- collectives


def all_gather_of(x: Tensor, rows: int, group: str) -> Tensor:
    """Everyone's rows, in memory of their own."""
    return ops.all_gather(x.contiguous(), rows=rows, group=groups.group_of(group))


def _all_gather_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    return call.reduce_scatter(dy, ctx.group), None, None


def _reduce_scatter_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    return call.all_gather(dy, ctx.rows, ctx.group), None


def _keep_gather(ctx: Any, inputs: Any, output: Any) -> None:
    _, _, ctx.group = inputs


def _keep_scatter(ctx: Any, inputs: Any, output: Any) -> None:
    x, ctx.group = inputs
    ctx.rows = x.shape[0]


def _scattered_like(x: Tensor, group: str) -> Tensor:
    team = groups.team(group)
    return x.new_empty(rows_of(team.rank, x.shape[0], team.size), *x.shape[1:])


@define(
    "all_gather",
    "(Tensor x, SymInt rows, str group) -> Tensor",
    lambda x, rows, group: x.new_empty(rows, *x.shape[1:]),
    _keep_gather,
    _all_gather_backward,
)
def all_gather(x: Tensor, rows: int, group: str) -> Tensor:
    """Everyone's rows; the gradient is the ranks' sum of dy, of which each gets its rows."""
    return all_gather_of(x, rows, group)


@define(
    "reduce_scatter", "(Tensor x, str group) -> Tensor", _scattered_like, _keep_scatter,
    _reduce_scatter_backward,
)  # fmt: skip
def reduce_scatter(x: Tensor, group: str) -> Tensor:
    """This rank's rows of the ranks' sum of x."""
    return ops.reduce_scatter(x.contiguous(), group=groups.group_of(group))


@define(
    "all_reduce",
    "(Tensor x, str group) -> Tensor",
    lambda x, group: x.new_empty(x.shape),
    lambda ctx, inputs, output: None,
    lambda ctx, dy: (dy, None),
)
def all_reduce(x: Tensor, group: str) -> Tensor:
    """The ranks' sum of x, on all of them; the gradient, which is alike on all ranks, goes to each as it
    is."""
    return ops.all_reduce(x.contiguous(), group=groups.group_of(group))


def _keep_group(ctx: Any, inputs: Any, output: Any) -> None:
    _, ctx.group = inputs


@define(
    "copied",
    "(Tensor x, str group) -> Tensor",
    lambda x, group: x.new_empty(x.shape),
    _keep_group,
    lambda ctx, dy: (call.all_reduce(dy, ctx.group), None),
)
def copied(x: Tensor, group: str) -> Tensor:
    """x, which is alike on all ranks and of which each uses a part, a norm's weight for example, where each
    rank has rows of its own: the gradient is the ranks' sum. A copy, as an operation's result has to be."""
    return x.clone(memory_format=torch.contiguous_format)


@define("kept", "(Tensor x, str group) -> Tensor", _scattered_like, _keep_scatter, _reduce_scatter_backward)
def kept(x: Tensor, group: str) -> Tensor:
    """This rank's rows of x, which all ranks have; the gradient is everyone's."""
    team = groups.team(group)
    return x[span_of(team.rank, x.shape[0], team.size)].clone()


@define(
    "regathered",
    "(Tensor x, SymInt rows, str group) -> Tensor",
    lambda x, rows, group: x.new_empty(rows, *x.shape[1:]),
    _keep_gather,
    lambda ctx, dy: (call.kept(dy, ctx.group), None, None),
)
def regathered(x: Tensor, rows: int, group: str) -> Tensor:
    """Everyone's rows, with which all ranks compute the same afterwards: the gradient is this rank's part."""
    return all_gather_of(x, rows, group)


# ---- products


def _keep_columns(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, bias, ctx.rows, ctx.group = inputs
    ctx.save_for_backward(x, weight)


def _columns_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    (x, weight), (need_x, need_w, need_b, *_) = ctx.saved_tensors, ctx.needs_input_grad
    given = (dy, x, weight, ctx.rows, ctx.group, need_x, need_w)
    dx, dw = call.all_gather_matmul_backward(*given)
    return *wanted(ctx, dx, dw), summed_rows(dy) if need_b else None, None, None


@define(
    "all_gather_matmul",
    "(Tensor x, Tensor weight, Tensor? bias, SymInt rows, str group) -> Tensor",
    lambda x, weight, bias, rows, group: x.new_empty(rows, weight.shape[0]),
    _keep_columns,
    _columns_backward,
)
def all_gather_matmul(x: Tensor, weight: Tensor, bias: Tensor | None, rows: int, group: str) -> Tensor:
    """gather(x) · weightᵀ + bias: x this rank's rows of ``rows``, weight its columns of the result."""
    return gathered(x.contiguous(), weight.T, bias, rows, groups.group_of(group))[0]


def _backward_like(dy: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *_, need_x, need_w = rest
    return x.new_empty(x.shape if need_x else 0), weight.new_empty(weight.shape if need_w else 0)


@define(
    "all_gather_matmul_backward",
    "(Tensor dy, Tensor x, Tensor weight, SymInt rows, str group, bool need_x, bool need_w) "
    "-> (Tensor, Tensor)",
    _backward_like,
)
def all_gather_matmul_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rows: int, group: str, need_x: bool, need_w: bool
) -> tuple[Tensor, Tensor]:
    """dx by one kernel that scatters its sums; for dw x is gathered again, beside that kernel."""
    named, dy = groups.group_of(group), dy.contiguous()
    every = begin_gather(x, rows, named) if need_w else None
    dx = scattered(dy, weight, None, named) if need_x else none(x)
    return dx, none(weight) if every is None else product(dy.T, every())


def _keep_gathered(ctx: Any, inputs: Any, output: Any) -> None:
    _, weight, _, _, ctx.group = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # as many zeros as everyone's rows have numbers
    ctx.save_for_backward(output[1], weight)


def _kept_backward(ctx: Any, dy: Tensor | None, _: Tensor) -> tuple[Any, ...]:
    (every, weight), (need_x, need_w, need_b, *_) = ctx.saved_tensors, ctx.needs_input_grad
    dy = every.new_zeros(every.shape[0], weight.shape[0]) if dy is None else dy
    dx, dw = call.kept_matmul_backward(dy, every, weight, ctx.group, need_x, need_w)
    return *wanted(ctx, dx, dw), summed_rows(dy) if need_b else None, None, None


@define(
    "all_gather_matmul_kept",
    "(Tensor x, Tensor weight, Tensor? bias, SymInt rows, str group) -> (Tensor, Tensor)",
    lambda x, weight, bias, rows, group: (
        x.new_empty(rows, weight.shape[0]),
        x.new_empty(rows, x.shape[1]),
    ),
    _keep_gathered,
    _kept_backward,
)
def all_gather_matmul_kept(
    x: Tensor, weight: Tensor, bias: Tensor | None, rows: int, group: str
) -> tuple[Tensor, Tensor]:
    """`all_gather_matmul` and the gathered x, out of the group's memory, which the backward takes."""
    y, every = gathered(x.contiguous(), weight.T, bias, rows, groups.group_of(group), whole=True)
    return y, every if by_library(x) else every.clone()


@define(
    "kept_matmul_backward",
    "(Tensor dy, Tensor every, Tensor weight, str group, bool need_x, bool need_w) -> (Tensor, Tensor)",
    lambda dy, every, weight, group, need_x, need_w: (
        _rows_like(dy, weight.T, None, group) if need_x else none(dy),
        weight.new_empty(weight.shape if need_w else 0),
    ),
)
def kept_matmul_backward(
    dy: Tensor, every: Tensor, weight: Tensor, group: str, need_x: bool, need_w: bool
) -> tuple[Tensor, Tensor]:
    """dx by one kernel that scatters its sums, and dw of what was kept."""
    dy = dy.contiguous()
    dx = scattered(dy, weight, None, groups.group_of(group)) if need_x else none(dy)
    return dx, product(dy.T, every) if need_w else none(weight)


@define(
    "gated_backward",
    "(Tensor dy, Tensor h, str activation) -> Tensor",
    lambda dy, h, activation: h.new_empty(h.shape),
)
def gated_backward(dy: Tensor, h: Tensor, activation: str) -> Tensor:
    """`ops.gated_activation_backward`."""
    return ops.gated_activation_backward(dy.contiguous(), h.contiguous(), activation)


def gate_backward(dy: Tensor | None, h: Tensor, activation: str) -> Tensor:
    """The gradient of a product h whose columns come in turn, of that of what its gate left."""
    if dy is None:  # other ranks may have gradients
        return torch.zeros_like(h)
    made: Tensor = call.gated_backward(dy.reshape(-1, RUN), h.view(-1, 2 * RUN), activation)
    return made.view(h.shape)


def _keep_gated(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, _, ctx.rows, ctx.group, ctx.activation, _, ctx.whole = inputs
    _, h, every = output
    ctx.mark_non_differentiable(h, every)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(h, every if ctx.whole else x, weight)


def _gated_backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Any, ...]:
    (h, x, weight), (need_x, need_w, need_b, *_) = ctx.saved_tensors, ctx.needs_input_grad
    dh = gate_backward(dy, h, ctx.activation)
    if ctx.whole:
        dx, dw = call.kept_matmul_backward(dh, x, weight, ctx.group, need_x, need_w)
    else:
        dx, dw = call.all_gather_matmul_backward(dh, x, weight, ctx.rows, ctx.group, need_x, need_w)
    return *wanted(ctx, dx, dw), summed_rows(dh) if need_b else None, *(None,) * 5


def _gated_like(
    x: Tensor, weight: Tensor, bias: Tensor | None, rows: int, group: str, activation: str, kept: bool,
    whole: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    wide = weight.shape[0]
    every = x.new_empty(rows, x.shape[1]) if whole else none(x)
    return x.new_empty(rows, wide // 2), x.new_empty(rows, wide) if kept else none(x), every


@define(
    "all_gather_gated",
    "(Tensor x, Tensor weight, Tensor? bias, SymInt rows, str group, str activation, bool kept, bool whole) "
    "-> (Tensor, Tensor, Tensor)",
    _gated_like,
    _keep_gated,
    _gated_backward,
)
def all_gather_gated(
    x: Tensor, weight: Tensor, bias: Tensor | None, rows: int, group: str, activation: str, kept: bool,
    whole: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """act(gate) · up of gather(x) · weightᵀ + bias, whose columns come in turn, eight of each; the product
    itself, where it is ``kept``, as gradients need it; and the gathered x, where it is ``whole``. What is not
    asked for is empty."""
    named, x = groups.group_of(group), x.contiguous()
    if by_library(x):
        h, every = gathered(x, weight.T, bias, rows, named)
        return gated_columns(h, activation), h if kept else none(h), every if whole else none(x)
    how: dict[str, Any] = {"group": named, "rows": rows, "gate": activation, "kept": kept, "whole": whole}
    y, every, product = product_and_rows(x, weight.T, bias, **how)
    return y, none(y) if product is None else product, every.clone() if whole else none(x)


def _keep_rows(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, _, ctx.group = inputs
    ctx.save_for_backward(x, weight)


def _rows_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    (x, weight), (need_x, need_w, need_b, _) = ctx.saved_tensors, ctx.needs_input_grad
    dx, dw = call.matmul_reduce_scatter_backward(dy, x, weight, ctx.group, need_x, need_w)
    return *wanted(ctx, dx, dw), summed_rows(dy) if need_b else None, None


def _rows_like(x: Tensor, weight: Tensor, bias: Tensor | None, group: str) -> Tensor:
    team = groups.team(group)
    return x.new_empty(rows_of(team.rank, x.shape[0], team.size), weight.shape[0])


@define(
    "matmul_reduce_scatter",
    "(Tensor x, Tensor weight, Tensor? bias, str group) -> Tensor",
    _rows_like,
    _keep_rows,
    _rows_backward,
)
def matmul_reduce_scatter(x: Tensor, weight: Tensor, bias: Tensor | None, group: str) -> Tensor:
    """This rank's rows of the ranks' sum of x · weightᵀ, plus the bias, whose gradient is that of these
    rows alone (`copied` adds the ranks')."""
    return scattered(x.contiguous(), weight.T, bias, groups.group_of(group))


@define(
    "matmul_reduce_scatter_backward",
    "(Tensor dy, Tensor x, Tensor weight, str group, bool need_x, bool need_w) -> (Tensor, Tensor)",
    _backward_like,
)
def matmul_reduce_scatter_backward(
    dy: Tensor, x: Tensor, weight: Tensor, group: str, need_x: bool, need_w: bool
) -> tuple[Tensor, Tensor]:
    """dx by one kernel that gathers dy, and dw of what it gathered. It lies in the group's memory until the
    group's next launch, and this product is in front of that on the stream."""
    named, rows, dy = groups.group_of(group), x.shape[0], dy.contiguous()
    if need_x:
        dx, everyone = gathered(dy, weight, None, rows, named, whole=need_w)
    else:
        dx, everyone = none(x), ops.all_gather(dy, rows=rows, group=named)
    return dx, product(everyone.T, x.contiguous()) if need_w else none(weight)


def _sum_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    (x, weight), (need_x, need_w, need_b, _) = ctx.saved_tensors, ctx.needs_input_grad
    dx, dw = call.matmul_backward(dy, x, weight, "", need_x, need_w)
    return *wanted(ctx, dx, dw), summed_rows(dy) if need_b else None, None


@define(
    "matmul_all_reduce",
    "(Tensor x, Tensor weight, Tensor? bias, str group) -> Tensor",
    lambda x, weight, bias, group: x.new_empty(x.shape[0], weight.shape[0]),
    _keep_rows,
    _sum_backward,
)
def matmul_all_reduce(x: Tensor, weight: Tensor, bias: Tensor | None, group: str) -> Tensor:
    """The ranks' sum of x · weightᵀ, plus the bias, on all ranks, whose gradients are alike."""
    return reduced(x.contiguous(), weight.T, bias, groups.group_of(group))


def _keep_copied_gated(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, _, ctx.group, ctx.activation, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], x, weight)


def _copied_gated_backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Any, ...]:
    (h, x, weight), (need_x, need_w, need_b, *_) = ctx.saved_tensors, ctx.needs_input_grad
    dh = gate_backward(dy, h, ctx.activation)
    dx, dw = call.matmul_backward(dh, x, weight, ctx.group, need_x, need_w)
    return *wanted(ctx, dx, dw), summed_rows(dh) if need_b else None, *(None,) * 3


@define(
    "copied_gated",
    "(Tensor x, Tensor weight, Tensor? bias, str group, str activation, bool kept) -> (Tensor, Tensor)",
    lambda x, weight, bias, group, activation, kept: (
        x.new_empty(x.shape[0], weight.shape[0] // 2),
        x.new_empty(x.shape[0], weight.shape[0]) if kept else none(x),
    ),
    _keep_copied_gated,
    _copied_gated_backward,
)
def copied_gated(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: str, activation: str, kept: bool
) -> tuple[Tensor, Tensor]:
    """`all_gather_gated` of an x that is alike on all ranks, whose gradient is the ranks' sum."""
    x, (rows, wide) = x.contiguous(), (x.shape[0], weight.shape[0])
    if 0 in x.shape or by_library(x):
        h = product(x, weight.T)
        return gated_columns(h if bias is None else h.add_(bias), activation), h if kept else none(h)
    h = x.new_empty(rows, wide) if kept else none(x)
    y = gated_product(x, weight.T, bias, activation, product=h if kept else None)
    return y, h


def _copied_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    (x, weight), (need_x, need_w, need_b, _) = ctx.saved_tensors, ctx.needs_input_grad
    dx, dw = call.matmul_backward(dy, x, weight, ctx.group, need_x, need_w)
    return *wanted(ctx, dx, dw), summed_rows(dy) if need_b else None, None


@define(
    "copied_matmul",
    "(Tensor x, Tensor weight, Tensor? bias, str group) -> Tensor",
    lambda x, weight, bias, group: x.new_empty(x.shape[0], weight.shape[0]),
    _keep_rows,
    _copied_backward,
)
def copied_matmul(x: Tensor, weight: Tensor, bias: Tensor | None, group: str) -> Tensor:
    """x · weightᵀ + bias of an x that is alike on all ranks, whose gradient is the ranks' sum."""
    x = x.contiguous()
    if 0 in x.shape or by_library(x):
        made = product(x, weight.T)
        return made if bias is None else made.add_(bias)
    return ops.matmul(x, weight.T, bias)


@define(
    "matmul_backward",
    "(Tensor dy, Tensor x, Tensor weight, str group, bool need_x, bool need_w) -> (Tensor, Tensor)",
    _backward_like,
)
def matmul_backward(
    dy: Tensor, x: Tensor, weight: Tensor, group: str, need_x: bool, need_w: bool
) -> tuple[Tensor, Tensor]:
    """dx, of a group the ranks' sum by one kernel, and dw."""
    dy = dy.contiguous()
    if not need_x:
        dx = none(x)
    else:
        dx = reduced(dy, weight, None, groups.group_of(group)) if group else product(dy, weight)
    return dx, product(dy.T, x.contiguous()) if need_w else none(weight)
