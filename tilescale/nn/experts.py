"""A mixture of experts whose experts are split over ranks (Lepikhin et al., "GShard", 2021): a router chooses
each token's experts, tokens travel to them, through a gated layer, and back."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tilescale import ops
from tilescale.errors import TileTypeError, TileValueError
from tilescale.nn import groups, products
from tilescale.nn.linear import all_rows
from tilescale.nn.mlp import ParallelMLP
from tilescale.nn.parameters import Parallel, cast
from tilescale.ops.gated import GATES
from tilescale.ops.ranks.experts import Dispatched, room
from tilescale.ops.ranks.groups import share
from tilescale.ops.routing import SCORES


class ExpertParallelMoE(Parallel):
    """Σ over a token's experts of weight · down(act(gate(x)) · up(x)), of which each rank has some.

    Each rank brings tokens of its own: rows of a batch that is split by rows, or another batch. Rank r of n
    has experts r·E/n to (r+1)·E/n.

    Args:
        features, hidden: of a token, and of an expert. experts: of all ranks, a multiple of them. topk: of a
            token.
        scores: "softmax" over all experts or "sigmoid" of each. normalized: a token's weights add up to one;
            they are multiplied by ``scaling``.
        capacity: an expert takes ceil(capacity · tokens · topk / experts) of each rank's tokens at most, all
            first choices in front of second ones; what is beyond is dropped, its weight lost. None drops
            nothing.
        aux_loss: ``forward`` leaves the balance loss of "Switch Transformers" (Fedus et al., 2022) in
            ``self.aux_loss``: experts · Σ over experts of their part of all pairs times their mean score.
        bias_rate: experts are chosen by score plus a bias, which `update_bias` moves by so much (Wang et
            al., "Auxiliary-Loss-Free Load Balancing", 2024). 0: no bias.
        shared: hidden width of a `ParallelMLP` that all tokens go through beside; 0: none.
        activation: "silu", "gelu" (by erf) or "relu".
        dispatch_dtype: torch.float8_e4m3fn: tokens travel to experts in 8 bits, with a scale for each 128
            features, and experts see what these leave of them; gradients are those of tokens that travelled
            whole, and travel whole. None: in x's dtype.
        exact: memory is taken for the pairs of tokens and experts that came, not for all that could come: the
            host waits for their number, so no CUDA graph can have the layer. recompute: the first product's
            rows are not kept for the backward, which computes them again. keep_rows: the rows of all pairs
            are kept, too, which otherwise are sent again.
        group: as `ColumnParallelLinear`'s.

    The parameters ``gate_up_proj`` (E, 2 hidden, features), gates in front, and ``down_proj`` (E, features,
    hidden) are those of Mixtral in the library transformers.
    """

    router: nn.Parameter
    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter
    bias: Tensor
    load: Tensor

    def __init__(
        self, features: int, hidden: int, experts: int, topk: int, *, scores: str = "softmax",
        normalized: bool = True, scaling: float = 1.0, capacity: float | None = None, aux_loss: bool = False,
        bias_rate: float = 0.0, shared: int = 0, activation: str = "silu",
        dispatch_dtype: torch.dtype | None = None, exact: bool = False, recompute: bool = False,
        keep_rows: bool = False, group: Any = None, device: Any = None, dtype: Any = None,
    ):  # fmt: skip
        super().__init__(group)
        _refuse(scores, activation, topk, experts, capacity)
        if dispatch_dtype not in (None, SMALL):
            raise TileTypeError(f"dispatch_dtype={dispatch_dtype}", expected=f"None or {SMALL}")
        if recompute and keep_rows:
            raise TileValueError("recompute with keep_rows", expected="less memory or less to do")
        self.small, self.exact = dispatch_dtype is not None, exact
        self.recompute, self.keep_rows = recompute, keep_rows
        self.features, self.hidden, self.experts, self.topk = features, hidden, experts, topk
        self.scores, self.normalized, self.scaling, self.capacity = scores, normalized, scaling, capacity
        self.activation, self.bias_rate = activation, bias_rate
        like = {"device": device, "dtype": dtype}
        self.place("router", (experts, features), None, like)
        self.place("gate_up_proj", (experts, 2 * hidden, features), 0, like)
        self.place("down_proj", (experts, features, hidden), 0, like)
        self.shared = ParallelMLP(features, shared, activation, group=group, **like) if shared else None
        self.wants_aux, self.aux_loss = aux_loss, None
        if bias_rate:
            self.register_buffer("bias", torch.zeros(experts, dtype=torch.float32, device=device))
            self.register_buffer("load", torch.zeros(experts, dtype=torch.float32, device=device), False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform numbers as `torch.nn.Linear` draws them, no bias; ranks need the same seed."""
        extents = {"router": self.features, "gate_up_proj": self.features, "down_proj": self.hidden}
        for name, extent in extents.items():
            self.drawn(name, functools.partial(nn.init.uniform_, a=-(extent**-0.5), b=extent**-0.5))
        if self.bias_rate:
            nn.init.zeros_(self.bias)
            nn.init.zeros_(self.load)

    def forward(self, x: Tensor, rows: int | None = None) -> Tensor:
        """Of x (m, …, features), this rank's tokens, the same shape.

        Args:
            rows: all ranks' tokens together, where they do not have equally many: split as torch.chunk does.
                x is (m, features) then.

        Raises:
            TileValueError, TileTypeError: what does not fit.
        """
        if x.dim() < 2 or x.shape[-1] != self.features:
            raise TileValueError(f"ExpertParallelMoE of {tuple(x.shape)}", expected=f"(…, {self.features})")
        every = all_rows(rows, x, self.ranks, "ExpertParallelMoE")
        most = share(every, self.ranks)
        flat, gate_up, down = cast(
            x.reshape(-1, self.features), self.local("gate_up_proj"), self.local("down_proj")
        )
        weights, chosen = self.route(flat, every)
        wanted = torch.is_grad_enabled() and any(t.requires_grad for t in (flat, weights, gate_up, down))
        given = (flat, chosen, weights, gate_up, down, self.experts, most, self.activation, self.group_name)
        keep = wanted and not self.recompute
        y, *_ = torch.ops.tilescale.moe_experts(*given, self.small, self.exact, keep, keep and self.keep_rows)
        if self.shared is not None:
            y = y + self.shared(flat, every)
        made: Tensor = y.view(x.shape)
        return made

    def route(self, x: Tensor, every: int) -> tuple[Tensor, Tensor]:
        """Weights (m, topk), float32 (float64 of float64), and experts (m, topk), int32, −1 for none, of
        tokens (m, features)."""
        kind = torch.promote_types(x.dtype, torch.float32)
        router = products.copied(self.local("router"), self.group_name)
        with torch.autocast(x.device.type, enabled=False):
            logits = nn.functional.linear(x.to(kind), router.to(kind))
            bias = self.bias if self.bias_rate else None
            chosen = torch.ops.tilescale.moe_choice(logits, bias, self.topk, self.scores)
            scores = logits.softmax(-1) if self.scores == "softmax" else logits.sigmoid()
            weights = scores.gather(1, chosen.long())
            if self.normalized:
                weights = weights / weights.sum(-1, keepdim=True)
        if self.wants_aux or self.bias_rate:
            ones = torch.ones(chosen.numel(), dtype=kind, device=x.device)
            counts = ones.new_zeros(self.experts).scatter_add(0, chosen.flatten().long(), ones)
            if self.wants_aux:
                self.aux_loss = self._balance(scores, counts, every)
            if self.bias_rate and self.training:
                self.load.add_(counts)
        if self.capacity is not None:
            room = math.ceil(self.capacity * share(every, self.ranks) * self.topk / self.experts)
            chosen = within(chosen, self.experts, room)
        return weights * self.scaling, chosen

    def _balance(self, scores: Tensor, counts: Tensor, every: int) -> Tensor:
        """The loss that is least where all experts have as much; alike on all ranks."""
        if self.scores == "sigmoid":
            scores = scores / scores.sum(-1, keepdim=True)
        told = torch.ops.tilescale.all_reduce(torch.stack([counts, scores.sum(0)]), self.group_name)
        return self.experts * (told[0] / (every * self.topk) * told[1] / every).sum()

    @torch.no_grad()
    def update_bias(self) -> None:
        """Moves the bias of experts that had more than the mean since the last call down by ``bias_rate``,
        that of others up; collective. Once a step."""
        if self.bias_rate:
            load = ops.all_reduce(self.load, group=groups.group_of(self.group_name))
            self.bias += self.bias_rate * (load.mean() - load).sign()
            self.load.zero_()

    def extra_repr(self) -> str:
        of = f"rank {self.rank} of {self.ranks}"
        return f"{self.features}, {self.hidden}, {self.experts} experts, top {self.topk}, {of}"


def _refuse(scores: str, activation: str, topk: int, experts: int, capacity: float | None) -> None:
    if scores not in SCORES:
        raise TileValueError(f"scores={scores!r}", expected=", ".join(map(repr, SCORES)))
    if activation not in GATES:
        raise TileValueError(f"activation={activation!r}", expected=", ".join(map(repr, GATES)))
    if not 1 <= topk <= experts:
        raise TileValueError(f"topk={topk} of {experts} experts", expected="1 to all of them")
    if capacity is not None and not capacity > 0:
        raise TileValueError(
            f"capacity={capacity}", expected="a positive number, or None: nothing is dropped"
        )


def within(chosen: Tensor, experts: int, room: int) -> Tensor:
    """The choices (m, k) with −1 for those that are an expert's (room + 1)-th or later: all tokens' first
    choices count first, then their second ones."""
    order = chosen.T.flatten().long()
    hot = nn.functional.one_hot(order, experts)
    place = (hot.cumsum(0) * hot).sum(1).view(chosen.shape[1], -1).T
    return torch.where(place > room, -1, chosen)


@products.define(
    "moe_choice",
    "(Tensor logits, Tensor? bias, int topk, str scores) -> Tensor",
    lambda logits, bias, topk, scores: logits.new_empty((logits.shape[0], topk), dtype=torch.int32),
    lambda ctx, inputs, output: ctx.mark_non_differentiable(output),
    lambda ctx, *_: (None,) * 4,
)
def choice(logits: Tensor, bias: Tensor | None, topk: int, scores: str) -> Tensor:
    """`ops.moe_route`'s experts; of float64 torch.topk's."""
    if logits.dtype != torch.float64:
        return ops.moe_route(logits.contiguous(), topk, scores=scores, bias=bias)[1]
    key = logits
    if bias is not None:
        key = (logits.softmax(-1) if scores == "softmax" else logits.sigmoid()) + bias
    return key.topk(topk).indices.to(torch.int32)


# ---- the experts

#: what tokens may travel in, its greatest number, and how many features share a scale
SMALL, MOST, BLOCK = torch.float8_e4m3fn, 448.0, 128


def packed(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (m, H) in 8 bits, and a scale, float32, for each `BLOCK` of a row."""
    blocks = nn.functional.pad(x, (0, -x.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK)).float()
    scales = blocks.abs().amax(2).clamp(min=1e-12) / MOST
    return (blocks / scales[..., None]).flatten(1)[:, : x.shape[1]].to(SMALL).contiguous(), scales


def unpacked(rows: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows that `packed` made, as they were but for what 8 bits leave away."""
    wide = scales.repeat_interleave(BLOCK, 1)[:, : rows.shape[1]]
    return (rows.float() * wide).to(dtype)


def _sent(
    x: Tensor, small: bool, exact: bool | int, marks: Tensor | None = None, **how: Any
) -> tuple[Dispatched, Tensor]:
    """A dispatch of x, in 8 bits where ``small``, whose ``scales`` are ``marks``; and the row of each pair,
    of x's dtype. ``exact``: room for those that came, a number where it is known."""
    x, S = x.contiguous(), 0 if marks is None else marks.shape[1]
    if not small:
        sent = ops.moe_dispatch(x, scales=marks, **how)
        sent = sent.counted(None if exact is True else exact) if exact else sent
        return sent, sent.expanded()
    rows, scales = packed(x)
    sent = ops.moe_dispatch(rows, scales=scales if marks is None else torch.cat([marks, scales], 1), **how)
    sent = sent.counted(None if exact is True else exact) if exact else sent
    assert sent.scales is not None
    came = unpacked(sent.rows, sent.scales[:, S:], x.dtype)
    told = None if marks is None else sent.scales[:, :S].contiguous()
    return replace(sent, scales=told), sent.expanded(came)


def grouped(a: Tensor, b: Tensor, sizes: Tensor) -> Tensor:
    """`ops.grouped_matmul`; on the processor torch's products of float32 and float64, group by group."""
    if not products.by_library(a):
        return ops.grouped_matmul(a, b, sizes)
    made, row = a.new_empty(a.shape[0], b.shape[2]), 0
    for k, n in enumerate(_counts(a, sizes)):
        torch.mm(a[row : row + n], b[k], out=made[row : row + n])
        row += n
    return made


def outer(a: Tensor, dy: Tensor, sizes: Tensor) -> Tensor:
    """`ops.grouped_matmul_backward`, or torch's products."""
    if not products.by_library(a):
        return ops.grouped_matmul_backward(a, dy, sizes)
    made, row = a.new_empty(len(sizes), a.shape[1], dy.shape[1]), 0
    for k, n in enumerate(_counts(a, sizes)):
        made[k] = a[row : row + n].T @ dy[row : row + n]
        row += n
    return made


def _counts(a: Tensor, sizes: Tensor) -> list[int]:
    """Rows of each group, which the host looks at on the processor alone.

    Raises:
        TileTypeError: float64 on a GPU.
    """
    if a.device.type != "cpu":
        raise TileTypeError(f"experts of {a.dtype} on {a.device}", expected="bfloat16 or float16")
    return [int(n) for n in sizes]


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    x, chosen, weights, gate_up, down, *ctx.rest, _, _ = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(x, chosen, weights, gate_up, down, *output[1:])


def _backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Any, ...]:
    dx, dw, d_up, d_down = torch.ops.tilescale.moe_experts_backward(dy, *ctx.saved_tensors, *ctx.rest)
    need_x, _, need_w, need_up, need_down, *rest = ctx.needs_input_grad
    found = ((dx, need_x), (None, False), (dw, need_w), (d_up, need_up), (d_down, need_down))
    return *(g if need else None for g, need in found), *(None,) * len(rest)


def _experts_like(
    x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, experts: int, tokens: int,
    activation: str, group: str, small: bool, exact: bool, keep: bool, whole: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if exact:
        pairs = torch.library.get_ctx().new_dynamic_size() if keep else 0
    else:
        _, pairs = room(tokens, chosen.shape[1], experts, groups.team(group).size)
    h = x.new_empty((pairs, gate_up.shape[1]) if keep else 0)
    return x.new_empty(x.shape), h, x.new_empty((pairs, x.shape[1]) if whole else 0)


@products.define(
    "moe_experts",
    "(Tensor x, Tensor chosen, Tensor weights, Tensor gate_up, Tensor down, int experts, SymInt tokens, "
    "str activation, str group, bool small, bool exact, bool keep, bool whole) "
    "-> (Tensor, Tensor, Tensor)",
    _experts_like,
    _keep,
    _backward,
)
def moe_experts(
    x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, experts: int, tokens: int,
    activation: str, group: str, small: bool, exact: bool, keep: bool, whole: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """What the experts make of each token, times the weights, added up; and, to ``keep`` for the gradients,
    the first product's rows of all pairs. Without them its gate is part of the product. ``whole``: and the
    rows that went into it.

    Rows of pairs are the largest tensors: each goes as soon as nothing needs it."""
    if tokens == 0:
        none = (
            x.new_empty((0, n) if kept else 0) for n, kept in ((gate_up.shape[1], keep), (x.shape[1], whole))
        )
        return torch.empty_like(x), *none
    double = weights.dtype == torch.float64
    sent, rows = _sent(
        x, small, exact, _marks(chosen, weights) if double else None, experts=chosen, weights=weights.float(),
        num_experts=experts, tokens=tokens, group=groups.group_of(group),
    )  # fmt: skip
    up, sizes, h = gate_up.transpose(1, 2), sent.sizes, products.none(x)
    came = rows if whole else products.none(x)
    if keep or products.by_library(rows):
        made = grouped(rows, up, sizes)
        del rows
        hidden = ops.gated_activation(made, activation, sizes=sizes)
        h = made if keep else h
        del made
    else:
        hidden = ops.grouped_matmul(rows, up, sizes, gate=activation)
        del rows
    y = grouped(hidden, down.transpose(1, 2), sizes)
    del hidden
    if double:
        y.mul_(_pairs(sent, chosen.shape[1])[1][:, None])
    return ops.moe_combine(y, sent, weighted=not double), h, came


@products.define(
    "moe_experts_backward",
    "(Tensor dy, Tensor x, Tensor chosen, Tensor weights, Tensor gate_up, Tensor down, Tensor h, "
    "Tensor came, int experts, SymInt tokens, str activation, str group, bool small, bool exact) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    lambda dy, x, chosen, weights, gate_up, down, *_: tuple(
        t.new_empty(t.shape) for t in (x, weights, gate_up, down)
    ),
)
def moe_experts_backward(
    dy: Tensor, x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, h: Tensor,
    came: Tensor, experts: int, tokens: int, activation: str, group: str, small: bool, exact: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients by x, weights and both products' matrices, of the rows ``h`` that were kept, or of those that
    are computed again. Tokens travel once more where what ``came`` was not kept, behind their gradients,
    whose rows are no longer needed then.

    With g = dy · down of a pair, its weight's gradient is the sum of a · g, a being what went into the second
    product; so that product need not be computed again.
    """
    if tokens == 0:
        return tuple(torch.zeros_like(t) for t in (x, weights, gate_up, down))
    K, count = chosen.shape[1], (h.shape[0] if h.dim() == 2 else True) if exact else False
    how: dict[str, Any] = {
        "experts": chosen, "weights": weights.float(), "num_experts": experts, "tokens": tokens,
        "group": groups.group_of(group),
    }  # fmt: skip
    if h.dim() == 1:
        sent, rows = _sent(x, small, count, **how)
        h = grouped(rows, gate_up.transpose(1, 2), sent.sizes)
        del rows
        count, how = h.shape[0] if exact else False, {"like": sent}
    marks = _marks(chosen, weights)
    sent, dys = _sent(dy, False, count, marks, **how)
    sizes = sent.sizes
    which, weight = _pairs(sent, K)
    weight = weight.to(torch.promote_types(x.dtype, torch.float32))
    d = grouped(dys, down, sizes)
    dh, scaled, by_weight = ops.scaled_gate_backward(d, h, weight, activation, sizes=sizes)
    del d
    d_down = outer(dys, scaled, sizes)
    del dys, scaled
    if came.dim() == 1:
        sent, came = _sent(x, small, count, like=sent)
    d_up = outer(dh, came, sizes)
    del came
    dx = ops.moe_combine(grouped(dh, gate_up, sizes), sent, weighted=False)
    dw = ops.moe_combine(torch.where(which, by_weight[:, None], 0.0), sent, weighted=False)
    return dx, dw.to(weights.dtype), d_up, d_down


def _marks(chosen: Tensor, weights: Tensor) -> Tensor:
    """What of a token's choices travels beside it as float32: experts, whose numbers are exact, and weights;
    of float64 also what float32 leaves of them."""
    told = weights.float()
    rest = (weights - told).float()
    return torch.cat([chosen.float(), told, *([rest] if weights.dtype == torch.float64 else [])], 1)


def _pairs(sent: Dispatched, topk: int) -> tuple[Tensor, Tensor]:
    """Of each pair which of its token's choices it is, (P, topk) of bool, and its weight (P,), of float64
    where there is the rest of it. Behind the last pair neither means anything."""
    marks = sent.expanded(sent.scales)
    place = torch.arange(len(sent.index), device=marks.device)
    expert = torch.searchsorted(sent.sizes.cumsum(0), place, right=True) + sent.team.rank * len(sent.sizes)
    which = marks[:, :topk] == expert[:, None]
    weight = marks[:, topk : 2 * topk]
    if marks.shape[1] > 2 * topk:
        weight = weight.double() + marks[:, 2 * topk :]
    return which, torch.where(which, weight, 0.0).sum(1)
