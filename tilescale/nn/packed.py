"""Attention of sequences of different lengths, one behind another: a token sees those of its own sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tilescale import ops
from tilescale.errors import TileTypeError, TileValueError
from tilescale.nn import products
from tilescale.nn.operations import call, define


def check(starts: Tensor) -> None:
    """Refuses what are no starts of sequences.

    Raises:
        TileTypeError: they are not.
    """
    if starts.dtype != torch.int32 or starts.dim() != 1 or len(starts) < 2:
        raise TileTypeError(
            f"starts {tuple(starts.shape)} of {starts.dtype}", expected="(sequences + 1,) of int32"
        )


@define(
    "sequences",
    "(Tensor starts, SymInt rows, SymInt longest) -> Tensor",
    lambda starts, rows, longest: starts.new_empty(rows, dtype=torch.int64),
)
def sequences(starts: Tensor, rows: int, longest: int) -> Tensor:
    """Of each row the number of its sequence, of ``longest`` rows at most. Numbers are looked at on the
    processor alone: on a GPU the host would wait for them.

    Raises:
        TileValueError: starts that do not cut the rows into such sequences.
    """
    if starts.device.type == "cpu":
        lengths = starts.diff()
        if int(starts[0]) or int(starts[-1]) != rows or bool((lengths < 0).any()):
            raise TileValueError(
                f"starts={starts.tolist()} of {rows} rows",
                expected=f"from 0 to {rows}, none less than the last",
            )
        if int(lengths.max()) > longest:
            raise TileValueError(
                f"longest={longest} of lengths {lengths.tolist()}", expected="the longest of them, or more"
            )
    at = torch.arange(rows, dtype=torch.int32, device=starts.device)
    return torch.searchsorted(starts, at, right=True) - 1


def places(starts: Tensor, own: Tensor) -> Tensor:
    """Of each row the place in its sequence, whose number is ``own``."""
    return torch.arange(len(own), device=starts.device) - starts[own]


def attention(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, own: Tensor, longest: int, causal: bool, scale: float
) -> Tensor:
    """softmax(scale · q · kᵀ) · v within sequences, of q (1, heads, rows, dim); ``own``: the sequence of each
    row.

    bfloat16 and float16 go to `ops.flash_attention`. float32 and float64 go to torch's
    scaled_dot_product_attention with a mask of rows².
    """
    if q.dtype in (torch.bfloat16, torch.float16):
        given = (t[0].transpose(0, 1) for t in (q, k, v))
        made: Tensor = call.packed_attention(*given, starts, longest, causal, scale)[0]
        return made.transpose(0, 1)[None]
    mask = own[:, None] == own
    if causal:
        mask = mask.tril()
    return scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, starts, *ctx.rest = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, starts)


def _backward(ctx: Any, do: Tensor, _: Tensor) -> tuple[Any, ...]:
    found = call.packed_attention_backward(do, *ctx.saved_tensors, *ctx.rest)
    return *products.wanted(ctx, *found), *(None,) * 4


@define(
    "packed_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor starts, SymInt longest, bool causal, float scale) "
    "-> (Tensor, Tensor)",
    lambda q, *_: (
        q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    ),
    _keep,
    _backward,
)  # fmt: skip
def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """`ops.flash_attention` of q (rows, heads, dim)."""
    given = (t.contiguous() for t in (q, k, v))
    return ops.flash_attention(
        *given, causal=causal, scale=scale, q_starts=starts, k_starts=starts, longest=longest
    )


@define(
    "packed_attention_backward",
    "(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor starts, SymInt longest, "
    "bool causal, float scale) -> (Tensor, Tensor, Tensor)",
    lambda do, q, k, v, *_: (q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)),
)
def packed_attention_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, starts: Tensor, longest: int,
    causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`ops.attention_gradients`."""
    given = (t.contiguous() for t in (do, q, k, v, o, lse))
    return ops.attention_gradients(
        *given, causal=causal, scale=scale, q_starts=starts, k_starts=starts, longest=(longest, longest)
    )
