"""Attention of sequences that are cut among ranks: queries of this rank's tokens, keys and values of all
ranks' tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tilescale import ops
from tilescale.errors import TileValueError
from tilescale.nn import groups, products
from tilescale.nn.operations import call, define

WAYS, LAYOUTS = ("ring", "ulysses"), ("contiguous", "zigzag")


def places(length: int, group: str, layout: str, device: Any) -> Tensor:
    """The places in the whole sequence of this rank's ``length`` tokens, of which all ranks have as many.

    Raises:
        TileValueError: an odd length in zigzag.
    """
    team = groups.team(group)
    own = torch.arange(length, device=device)
    if layout == "contiguous":
        return own + team.rank * length
    if length % 2:
        raise TileValueError(
            f"{length} tokens of a sequence in zigzag", expected="an even number on each rank"
        )
    half = length // 2
    last = (2 * team.size - 1 - team.rank) * half
    return torch.where(own < half, own + team.rank * half, own - half + last)


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, way: str, layout: str, group: str
) -> Tensor:
    """softmax(scale · q · kᵀ) · v of q (batch, heads, length, dim), this rank's tokens, over the group's.

    bfloat16 and float16 go to `ops.ring_attention` or `ops.ulysses_attention`. Of float32 and float64, which
    these do not take, keys and values are gathered for torch's scaled_dot_product_attention.
    """
    if q.dtype in (torch.bfloat16, torch.float16):
        made: Tensor = call.context_attention(q, k, v, causal, scale, way, layout, group)[0]
        return made
    length, ranks = q.shape[2], groups.team(group).size
    k, v = (call.all_gather(t.movedim(2, 0), ranks * length, group).movedim(0, 2) for t in (k, v))
    mask = None
    if causal:
        at = places(length, group, layout, q.device)
        mask = at[:, None] >= call.all_gather(at, ranks * length, group)
    return scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, *ctx.rest = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output)


def _backward(ctx: Any, do: Tensor, _: Tensor) -> tuple[Any, ...]:
    found = call.context_attention_backward(do, *ctx.saved_tensors, *ctx.rest)
    return *products.wanted(ctx, *found), *(None,) * 5


@define(
    "context_attention",
    "(Tensor q, Tensor k, Tensor v, bool causal, float scale, str way, str layout, str group) "
    "-> (Tensor, Tensor)",
    lambda q, *_: (q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=torch.float32)),
    _keep,
    _backward,
)
def context_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, way: str, layout: str, group: str
) -> tuple[Tensor, Tensor]:
    """`ops.ring_attention` or `ops.ulysses_attention`."""
    by = ops.ring_attention if way == "ring" else ops.ulysses_attention
    given = (t.contiguous() for t in (q, k, v))
    return by(*given, causal=causal, scale=scale, layout=layout, group=groups.group_of(group))


@define(
    "context_attention_backward",
    "(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, bool causal, float scale, str way, "
    "str layout, str group) -> (Tensor, Tensor, Tensor)",
    lambda do, q, k, v, *_: (q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)),
)
def context_attention_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, scale: float,
    way: str, layout: str, group: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`ops.ring_attention_backward` or `ops.ulysses_attention_backward`."""
    by = ops.ring_attention_backward if way == "ring" else ops.ulysses_attention_backward
    given = (t.contiguous() for t in (do, q, k, v, o, lse))
    return by(*given, causal=causal, scale=scale, layout=layout, group=groups.group_of(group))
