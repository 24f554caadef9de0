"""``parallelize(model, mesh["tp"])``: the layers of a Hugging Face-style Llama become parallel ones, in
place.

Between its blocks a model keeps its activations whole, (batch, length, features) alike on all ranks. Here
they are rows (m, features), of which each rank has its part: they are cut in front of the first block, and
put together behind the last norm. All in between is either swapped or adds rows to rows. What lies outside,
embeddings and the caller's loss, sees what it saw before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tilescale.errors import TileTypeError, TileValueError
from tilescale.nn.attention import ParallelAttention
from tilescale.nn.linear import ColumnParallelLinear
from tilescale.nn.mlp import ParallelMLP
from tilescale.nn.norm import RMSNorm


@dataclass(frozen=True)
class Swap:
    """A module's name, what it was and what it is now."""

    name: str
    was: str
    now: str


@dataclass
class Swaps:
    """What `parallelize` swapped; printed it is a table."""

    swaps: list[Swap] = field(default_factory=list)

    def __iter__(self) -> Iterator[Swap]:
        return iter(self.swaps)

    def __len__(self) -> int:
        return len(self.swaps)

    def __str__(self) -> str:
        lines = [("module", "was", "is now"), *((s.name, s.was, s.now) for s in self.swaps)]
        wide = [max(len(line[k]) for line in lines) for k in range(3)]
        return "\n".join("  ".join(t.ljust(w) for t, w in zip(line, wide)).rstrip() for line in lines)


@dataclass
class Whole:
    """The extents of the batch that goes through the model."""

    batch: int = 0
    length: int = 0

    @property
    def rows(self) -> int:
        return self.batch * self.length


class BlockAttention(ParallelAttention):
    """`ParallelAttention` as a decoder's block calls its attention."""

    whole: Whole

    def forward(self, hidden_states: Tensor, **given: Any) -> tuple[Tensor, None]:  # type: ignore[override]
        """(m, features), and no weights.

        Raises:
            TileValueError: a mask that is more than causal, or a cache.
        """
        if given.get("attention_mask") is not None:
            raise TileValueError(
                "a parallel Llama with an attention mask",
                expected="sequences of equal length, without padding",
                hint="leave attention_mask away, or let all of it be ones",
            )
        if any(given.get(k) is not None for k in ("cache", "past_key_value", "past_key_values")):
            raise TileValueError("a parallel Llama with a cache", expected="training", hint="use_cache=False")
        w = self.whole
        return super().forward(hidden_states, w.batch, w.rows, given["position_embeddings"]), None


class BlockMLP(ParallelMLP):
    """`ParallelMLP` as a decoder's block calls it."""

    whole: Whole

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, self.whole.rows)


class LastNorm(RMSNorm):
    """The norm behind the last block, whose result is whole again."""

    whole: Whole

    def forward(self, x: Tensor) -> Tensor:
        rows = super().forward(x)
        made: Tensor = torch.ops.tilescale.regathered(rows, self.whole.rows, self.group_name)
        return made.view(self.whole.batch, self.whole.length, -1)


class Head(ColumnParallelLinear):
    """The product that makes logits, which are whole on every rank."""

    def forward(self, x: Tensor, rows: int | None = None) -> Tensor:
        words = super().forward(x)
        columns = words.flatten(0, -2).T
        every = torch.ops.tilescale.regathered(columns, self.out_features, self.group_name)
        made: Tensor = every.T.reshape(*x.shape[:-1], self.out_features)
        return made


def parallelize(model: nn.Module, group: Any) -> Swaps:
    """Swaps the attention, feed-forward and norm layers of a Llama, and its head, for those of this package;
    collective. Parameters keep their numbers, and each rank keeps its part of them. Ranks of the group give
    the model the same batch.

    Args:
        model: a ``LlamaForCausalLM`` or ``LlamaModel`` of the library transformers, or a model of the same
            modules. It has the same parameters on all ranks.
        group: a DeviceMesh of one axis, which makes parameters DTensors, or another group, see
            `tilescale.ops.ranks.groups.team_of`.

    Returns:
        what was swapped: print it.

    Raises:
        TileTypeError: a module that is none of these.
        TileValueError: heads or widths that are no multiple of the ranks, an activation that there is not,
            dropout in attention.
    """
    body = getattr(model, "model", model)
    blocks, config = getattr(body, "layers", None), getattr(model, "config", None)
    if not isinstance(blocks, nn.ModuleList) or config is None or not hasattr(body, "norm"):
        raise TileTypeError(
            f"parallelize({type(model).__name__})",
            expected="a Hugging Face-style Llama: layers, norm, config",
        )
    made = _checked(blocks, body.norm)
    whole, swaps = Whole(), Swaps()
    prefix = "model." if body is not model else ""
    for at, block in enumerate(blocks):
        for name in made:
            _swap(block, name, f"{prefix}layers.{at}.{name}", config, group, whole, swaps)
    _swap(body, "norm", f"{prefix}norm", config, group, whole, swaps)
    config.use_cache = False
    group_name = body.norm.group_name

    def cut(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In front of the first block: this rank's rows."""
        x = args[0] if args else kwargs.pop("hidden_states")
        whole.batch, whole.length = x.shape[0], x.shape[1]
        rows = torch.ops.tilescale.kept(x.flatten(0, 1), group_name)
        return (rows, *args[1:]), kwargs

    blocks[0].register_forward_pre_hook(cut, with_kwargs=True)
    head = getattr(model, "lm_head", None)
    tied = head is not None and any(
        m.weight is head.weight for m in body.modules() if isinstance(m, nn.Embedding)
    )
    if isinstance(head, nn.Linear) and not tied and head.out_features % body.norm.ranks == 0:
        how = {"group": group, "sequence_parallel": False, **_like(head.weight)}
        now = Head(head.in_features, head.out_features, head.bias is not None, **how)
        for name in ("weight", "bias") if head.bias is not None else ("weight",):
            now.set_whole(name, getattr(head, name))
        _put(model, "lm_head", "lm_head", now, swaps)
    return swaps


#: of a block: module's name → the linears that it has
_KNOWN = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
    "input_layernorm": (),
    "post_attention_layernorm": (),
}


def _checked(blocks: nn.ModuleList, norm: nn.Module) -> dict[str, tuple[str, ...]]:
    """What blocks consist of, when it is what is known: a block that is half known would compute something
    else on rows.

    Raises:
        TileTypeError: something else is in a block.
    """
    for block in blocks:
        children = dict(block.named_children())
        for name, linears in _KNOWN.items():
            found = children.pop(name, None)
            inner = (
                {k for k, m in found.named_children() if next(m.parameters(), None) is not None}
                if found
                else None
            )
            if inner != set(linears) or not (linears or hasattr(found, "variance_epsilon")):
                raise TileTypeError(
                    f"{type(block).__name__}.{name} is {type(found).__name__} of {sorted(inner or ())}",
                    expected=f"a Llama's, of {sorted(linears)}" if linears else "an RMSNorm",
                )
        if children:
            raise TileTypeError(
                f"{type(block).__name__} has {sorted(children)}", expected=f"{sorted(_KNOWN)} alone"
            )
    if not hasattr(norm, "variance_epsilon"):
        raise TileTypeError(f"norm is {type(norm).__name__}", expected="an RMSNorm")
    return _KNOWN


def _like(weight: Tensor) -> dict[str, Any]:
    return {"device": weight.device, "dtype": weight.dtype}


def _put(parent: nn.Module, name: str, path: str, now: nn.Module, swaps: Swaps) -> None:
    was = getattr(parent, name)
    now.train(was.training)
    for p in now.parameters():
        p.requires_grad_(next(was.parameters()).requires_grad)
    setattr(parent, name, now)
    swaps.swaps.append(Swap(path, type(was).__name__, f"{type(now).__mro__[0].__name__}({now.extra_repr()})"))


def _swap(
    parent: nn.Module, name: str, path: str, config: Any, group: Any, whole: Whole, swaps: Swaps
) -> None:
    was: Any = getattr(parent, name)
    now: Any
    how: dict[str, Any] = {"group": group, **_like(next(was.parameters()))}
    if name == "self_attn":
        if getattr(was, "attention_dropout", 0.0):
            raise TileValueError(
                f"attention_dropout={was.attention_dropout}", expected="0: attention has no dropout here"
            )
        heads, dim = config.num_attention_heads, was.head_dim
        kv = getattr(config, "num_key_value_heads", None) or heads
        now = BlockAttention(
            config.hidden_size, heads, kv, dim, bias=was.q_proj.bias is not None, rotary=None,
            out_bias=was.o_proj.bias is not None, scale=getattr(was, "scaling", None), **how,
        )  # fmt: skip
        now.set_parts(was.q_proj, was.k_proj, was.v_proj, was.o_proj)
    elif name == "mlp":
        act = {"SiLU": "silu", "SiLUActivation": "silu", "GELUActivation": "gelu", "GELU": "gelu"}
        kind = type(was.act_fn).__name__
        if kind not in act:
            raise TileValueError(f"{path} with {kind}", expected="SiLU, or GELU by erf")
        gate = was.gate_proj
        now = BlockMLP(gate.in_features, gate.out_features, act[kind], gate.bias is not None, **how)
        now.set_parts(was.gate_proj, was.up_proj, was.down_proj)
    else:
        kinds: type[RMSNorm] = LastNorm if name == "norm" else RMSNorm
        now = kinds(was.weight.shape[0], was.variance_epsilon, **how)
        now.set_whole("weight", was.weight)
    now.whole = whole
    _put(parent, name, path, now, swaps)
