"""A mixture of experts whose experts are split over ranks (Lepikhin et al., "GShard", 2021): a router chooses
each token's experts, tokens travel to them, through a gated layer, and back."""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from tilescale import ops
from tilescale.errors import CommError, LaunchError, TileTypeError, TileValueError
from tilescale.nn import groups, products
from tilescale.nn.linear import SPLIT, all_rows, refuse_others, same_dtype
from tilescale.nn.mixture import CHUNKS, SMALL
from tilescale.nn.mlp import ParallelMLP
from tilescale.nn.operations import call, define
from tilescale.nn.parameters import Parallel, cast, split
from tilescale.ops.activations import GATES, RUN
from tilescale.ops.ranks.groups import number_of, share, total
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
            host waits for their number, while they travel. None: where it may, so not in a CUDA graph, under
            torch.compile, of fake tensors, or with several chunks. recompute: the first product's rows are
            not kept for the backward, which computes them again. keep_rows: the rows of all pairs are kept,
            too, which otherwise are sent again.
        chunks: tokens go to experts and back in so many chunks, and what crosses does so beside products, on
            a stream of its own. 1: beside the products of the backward. 0: everything one after another on
            the caller's stream, which takes less memory: beside products the backward has the rows of all
            pairs twice. None: 1, on one or two ranks 0: on four H200 one chunk was 4 % faster than none, on
            two as fast; two chunks were 9 % slower on two H100. On processors chunks run one after another.
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
        dispatch_dtype: torch.dtype | None = None, exact: bool | None = None, recompute: bool = False,
        keep_rows: bool = False, chunks: int | None = None, group: Any = None, device: Any = None,
        dtype: Any = None,
    ):  # fmt: skip
        super().__init__(group)
        extents = {"features": features, "hidden": hidden, "experts": experts, "topk": topk}
        for name, value in extents.items():
            number_of(value, name, 1)
        if chunks is None:  # two ranks gain no time by it, and it takes memory
            chunks = 1 if self.ranks > 2 else 0
        number_of(chunks, "chunks")
        _refuse(scores, activation, topk, experts, capacity, exact)
        if dispatch_dtype not in (None, SMALL):
            raise TileTypeError(f"dispatch_dtype={dispatch_dtype}", expected=f"None or {SMALL}")
        if chunks > (1 if exact else CHUNKS):
            raise TileValueError(f"chunks={chunks}", expected=f"0 to {1 if exact else CHUNKS}")
        if recompute and keep_rows:
            raise TileValueError("recompute with keep_rows", expected="less memory or less to do")
        self.small, self.exact = dispatch_dtype is not None, exact
        self.chunks = chunks
        self.recompute, self.keep_rows = recompute, keep_rows
        self.features, self.hidden, self.experts, self.topk = features, hidden, experts, topk
        self.scores, self.normalized, self.scaling, self.capacity = scores, normalized, scaling, capacity
        self.activation, self.bias_rate = activation, bias_rate
        like = {"device": device, "dtype": dtype}
        self.place("router", (experts, features), None, like)
        self.place("gate_up_proj", (experts, 2 * hidden, features), 0, like)
        self.place("down_proj", (experts, features, hidden), 0, like)
        if split(shared, self.ranks, "shared") % RUN:
            raise TileValueError(
                f"shared={shared} on {self.ranks} ranks", expected=f"a multiple of {RUN} for each"
            )
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
        if rows is not None and not torch.compiler.is_compiling():
            total(rows, x.shape[0], groups.team(self.group_name), "x")
        most = share(every, self.ranks)
        flat, gate_up, down = cast(
            x.reshape(-1, self.features), self.local("gate_up_proj"), self.local("down_proj")
        )
        same_dtype(flat, gate_up, "ExpertParallelMoE")
        exact = self.exact
        if exact is None:
            real = not isinstance(x, FakeTensor) and not x.is_meta
            exact = self.chunks <= 1 and not torch.compiler.is_compiling() and real
            exact = exact and not (x.is_cuda and torch.cuda.is_current_stream_capturing())
        try:
            weights, chosen = self.route(flat, every)
            wanted = torch.is_grad_enabled() and any(t.requires_grad for t in (flat, weights, gate_up, down))
            given = (flat, chosen, weights, gate_up, down, self.experts, most)
            keep = wanted and not self.recompute
            how = (self.small, exact, self.chunks, keep, keep and self.keep_rows)
            y, *_ = call.moe_experts(*given, self.activation, self.group_name, *how)
        except (LaunchError, CommError) as error:
            refuse_others(error, self, x, *SPLIT)
            raise
        if self.shared is not None:
            y = y + self.shared(flat, every)
        made: Tensor = y if x.dim() == 2 else y.view(x.shape)  # what is no view may be changed in place
        return made

    def route(self, x: Tensor, every: int) -> tuple[Tensor, Tensor]:
        """Weights (m, topk), float32 (float64 of float64), and experts (m, topk), int32, −1 for none, of
        tokens (m, features)."""
        kind = torch.promote_types(x.dtype, torch.float32)
        router = products.copied(self.local("router"), self.group_name)
        with contextlib.nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False):
            logits = nn.functional.linear(x.to(kind), router.to(kind))
            bias = self.bias if self.bias_rate else None
            chosen = call.moe_choice(logits, bias, self.topk, self.scores)
            logs = logits.log_softmax(-1) if self.scores == "softmax" else nn.functional.logsigmoid(logits)
            # by logarithms, which are no zeros where scores are
            weights = logs.gather(1, chosen.long())
            weights = weights.softmax(-1) if self.normalized else weights.exp()
        if self.wants_aux or self.bias_rate:
            ones = torch.ones(chosen.numel(), dtype=kind, device=x.device)
            counts = ones.new_zeros(self.experts).scatter_add(0, chosen.flatten().long(), ones)
            if self.wants_aux:
                self.aux_loss = self._balance(logs.softmax(-1), counts, every)
            if self.bias_rate and self.training:
                self.load.add_(counts)
        if self.capacity is not None:
            room = math.ceil(self.capacity * share(every, self.ranks) * self.topk / self.experts)
            chosen = within(chosen, self.experts, room)
        return weights * self.scaling, chosen

    def _balance(self, scores: Tensor, counts: Tensor, every: int) -> Tensor:
        """The loss that is least where all experts have as much; alike on all ranks. A token's scores add up
        to one."""
        told = call.all_reduce(torch.stack([counts, scores.sum(0)]), self.group_name)
        every = max(every, 1)  # of no tokens the loss is 0
        return self.experts * (told[0] / (every * self.topk) * told[1] / every).sum()

    @torch.no_grad()
    def update_bias(self, across: Any = None) -> None:
        """Moves the bias of experts that had more than the mean since the last call down by ``bias_rate``,
        that of others up; collective. Once a step.

        Args:
            across: another group, whose ranks have other batches and the same experts, along another axis of
                a mesh: its loads count too, so that the bias is alike on all of its ranks.
        """
        if self.bias_rate:
            load = ops.all_reduce(self.load, group=groups.group_of(self.group_name))
            if across is not None:
                load = ops.all_reduce(load, group=across)
            self.bias += self.bias_rate * (load.mean() - load).sign()
            self.load.zero_()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Bias and load stay float32: 16 bits lose a bias's steps, and counts beyond 256."""
        kept = {name: getattr(self, name) for name in ("bias", "load")} if self.bias_rate else {}
        super()._apply(fn, recurse)
        for name, was in kept.items():
            if getattr(self, name).dtype != was.dtype:
                setattr(self, name, was.to(getattr(self, name).device))
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Copies go without the last forward's loss: what has a graph cannot be copied."""
        return {**self.__dict__, "aux_loss": None}

    def extra_repr(self) -> str:
        of = f"rank {self.rank} of {self.ranks}"
        return f"{self.features}, {self.hidden}, {self.experts} experts, top {self.topk}, {of}"


def _refuse(
    scores: str, activation: str, topk: int, experts: int, capacity: float | None, exact: bool | None
) -> None:
    if scores not in SCORES:
        raise TileValueError(f"scores={scores!r}", expected=", ".join(map(repr, SCORES)))
    if activation not in GATES:
        raise TileValueError(f"activation={activation!r}", expected=", ".join(map(repr, GATES)))
    if exact not in (None, True, False):
        raise TileTypeError(f"exact={exact!r}", expected="True, False, or None: True where the host may wait")
    if topk > experts:
        raise TileValueError(f"topk={topk} of {experts} experts", expected="1 to all of them")
    if capacity is not None and not (isinstance(capacity, (int, float)) and 0 < capacity < math.inf):
        raise TileValueError(
            f"capacity={capacity!r}", expected="a positive number, or None: nothing is dropped"
        )


def within(chosen: Tensor, experts: int, room: int) -> Tensor:
    """The choices (m, k) with −1 for those that are an expert's (room + 1)-th or later: all tokens' first
    choices count first, then their second ones."""
    order = chosen.T.flatten().long()
    hot = nn.functional.one_hot(order, experts)
    place = (hot.cumsum(0) * hot).sum(1).view(chosen.shape[1], -1).T
    return torch.where(place > room, -1, chosen)


@define(
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
