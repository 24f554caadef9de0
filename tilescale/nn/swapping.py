"""``parallelize(model, mesh["tp"])``: the layers of a Hugging Face-style Llama or Mixtral become parallel
ones, in place.

Between its blocks a model keeps its activations whole, (batch, length, features) alike on all ranks. Here
they are rows (m, features), of which each rank has its part: they are cut in front of the first block, and
put together behind the last norm. All in between is either swapped or adds rows to rows. What lies outside,
embeddings and the caller's loss, sees what it saw before.

Rows alone do not say of which batch they are. A block's arguments do: cosines and sines of its positions are
(batch, length, …). A block's attention, which comes first, tells the layers behind it (`Whole`). So a block
that is computed again for its gradients sees its own batch, whatever forwards there were since.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from tilescale import agree
from tilescale.errors import TileTypeError, TileValueError
from tilescale.nn import groups
from tilescale.nn.attention import ParallelAttention
from tilescale.nn.experts import ExpertParallelMoE
from tilescale.nn.linear import ColumnParallelLinear
from tilescale.nn.mlp import ParallelMLP
from tilescale.nn.norm import RMSNorm
from tilescale.nn.operations import call
from tilescale.nn.parameters import Parallel, Woven
from tilescale.ops.ranks.groups import rows_of


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
    """The extents of the batch that goes through a model, as the block that is computed now has them."""

    batch: int = 0
    length: int = 0

    def rows(self, x: Tensor, layer: Parallel) -> int:
        """All ranks' rows, of which x (m, features) are this rank's.

        Raises:
            TileValueError: x is of another batch.
        """
        rows = self.batch * self.length
        if x.shape[0] != rows_of(layer.rank, rows, layer.ranks):
            raise TileValueError(
                f"{type(layer).__name__}: {x.shape[0]} rows on rank {layer.rank} of {layer.ranks}",
                expected=f"this rank's rows of the batch that its block has, {self.batch} of {self.length}",
                hint="checkpoint whole blocks, not a layer by itself",
            )
        return rows


class BlockAttention(ParallelAttention):
    """`ParallelAttention` as a decoder's block calls its attention."""

    whole: Whole

    def forward(self, hidden_states: Tensor, **given: Any) -> tuple[Tensor, None]:  # type: ignore[override]
        """(m, features), and no weights. Of packed sequences ``cu_seq_lens_q`` and ``max_length_q``, see
        `_unmasked`.

        Raises:
            TileValueError: a mask that is more than causal, a cache, or an ``is_causal`` of its own.
        """
        starts, mask = given.get("cu_seq_lens_q"), given.get("attention_mask")
        if mask is not None and mask.numel():
            raise TileValueError(
                "a parallel Llama with an attention mask",
                expected="sequences without padding: of equal length, or packed ones",
                hint="leave attention_mask away, or let all of it be ones; position_ids that begin anew "
                "with each sequence pack several in a row",
            )
        if any(given.get(k) is not None for k in ("cache", "past_key_value", "past_key_values")):
            raise TileValueError("a parallel Llama with a cache", expected="training", hint="use_cache=False")
        if given.get("is_causal") not in (None, self.causal):
            raise TileValueError(
                f"is_causal={given['is_causal']} of attention with causal={self.causal}",
                expected="what its is_causal was when the model was parallelized",
            )
        cos, sin = given["position_embeddings"]
        self.whole.batch, self.whole.length = cos.shape[:2]
        rows, batch = self.whole.rows(hidden_states, self), self.whole.batch
        if starts is not None:
            at = (cos.flatten(0, 1), sin.flatten(0, 1))
            return super().forward(hidden_states, 1, rows, at, starts, given.get("max_length_q")), None
        if cos.stride(0) == 0:  # alike for the whole batch, see `_of_each`
            cos, sin = cos[:1], sin[:1]
        return super().forward(hidden_states, batch, rows, (cos, sin)), None


class BlockMLP(ParallelMLP):
    """`ParallelMLP` as a decoder's block calls it."""

    whole: Whole

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, self.whole.rows(x, self))


class BlockMoE(ExpertParallelMoE):
    """`ExpertParallelMoE` as a decoder's block calls it, with a Mixtral's names in checkpoints."""

    whole: Whole

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        named = {
            "router": "gate.weight",
            "gate_up_proj": "experts.gate_up_proj",
            "down_proj": "experts.down_proj",
        }
        for mine, theirs in named.items():
            self.woven[mine] = Woven((theirs,), _itself, _alone)

    def set_parts(self, router: Tensor, gate_up: Tensor, down: Tensor) -> None:
        """Fills the parameters from an unsharded block's."""
        for name, whole in (("router", router), ("gate_up_proj", gate_up), ("down_proj", down)):
            self.set_whole(name, whole)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, self.whole.rows(x, self))


def _itself(whole: Tensor) -> Tensor:
    return whole


def _alone(whole: Tensor) -> tuple[Tensor, ...]:
    return (whole,)


class LastNorm(RMSNorm):
    """The norm behind the last block, whose result is whole again."""

    whole: Whole

    def forward(self, x: Tensor) -> Tensor:
        rows = self.whole.rows(x, self)
        made: Tensor = call.regathered(super().forward(x), rows, self.group_name)
        return made.view(self.whole.batch, self.whole.length, -1)


class Head(ColumnParallelLinear):
    """The product that makes logits, which are whole on every rank."""

    def forward(self, x: Tensor, rows: int | None = None) -> Tensor:
        words = super().forward(x)
        columns = words.flatten(0, -2).T
        every = call.regathered(columns, self.out_features, self.group_name)
        made: Tensor = every.T.reshape(*x.shape[:-1], self.out_features)
        return made


class WholeTable(Parallel):
    """A table of words that all ranks have whole."""

    weight: nn.Parameter

    def __init__(self, was: nn.Embedding, group: Any):
        super().__init__(group)
        self.padding_idx = was.padding_idx
        self.place("weight", tuple(was.weight.shape), None, _like(was.weight))
        self.set_whole("weight", was.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.embedding(tokens, self.local("weight"), self.padding_idx)


class WholeLinear(Parallel):
    """A linear layer that all ranks have whole, of an x that is alike on all of them."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, was: nn.Linear, group: Any):
        super().__init__(group)
        self.register_parameter("bias", None)
        for name, param in was.named_parameters():
            self.place(name, tuple(param.shape), None, _like(param))
            self.set_whole(name, param)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.local("weight"), self.local("bias"))


def parallelize(model: nn.Module, group: Any) -> Swaps:
    """Swaps the attention, feed-forward and norm layers of a Llama or Mixtral, and its head, for those of
    this package; collective. Parameters keep their numbers, and each rank keeps its part of them. Ranks of
    the group give the model the same batch.

    Args:
        model: a ``LlamaForCausalLM``, ``MixtralForCausalLM``, or their body, of the library transformers, or
            a model of the same modules. It has the same parameters on all ranks. A head that shares its
            weight with the embedding, or whose words are no multiple of the ranks, stays as it is.
        group: a DeviceMesh of one axis, which makes all parameters DTensors, those that stay whole too, or
            another group, see `tilescale.ops.ranks.groups.team_of`.

    Returns:
        what was swapped: print it.

    Raises:
        TileTypeError: a module that is none of these, or has more than these: adapters, hooks,
            parametrizations.
        TileValueError: heads, widths or experts that are no multiple of the ranks, key heads that are no
            divisor of them either, an activation that there is not, dropout or a window in attention, noise
            or a loss of a router; parameters that are others on other ranks.
    """
    body = getattr(model, "model", model)
    blocks, config = getattr(body, "layers", None), getattr(model, "config", None)
    inner = all(hasattr(body, name) for name in ("norm", "rotary_emb"))
    if not isinstance(blocks, nn.ModuleList) or config is None or not inner:
        raise TileTypeError(
            f"parallelize({type(model).__name__})",
            expected="a Hugging Face-style Llama or Mixtral: layers, norm, rotary_emb, config",
        )
    _whole_yet(model, blocks)
    _checked(blocks, body.norm, config)
    _alike(model, group)
    whole, swaps = Whole(), Swaps()
    prefix = "model." if body is not model else ""
    places = [(b, name, f"{prefix}layers.{at}.{name}") for at, b in enumerate(blocks) for name in _KNOWN]
    for block, name, path in places:  # what cannot be is said before anything is swapped
        was = getattr(block, name)
        _freeze(was, _made(was, path, config, group, meta=True), path)
    for block, name, path in places:
        _swap(block, name, path, config, group, whole, swaps)
    _swap(body, "norm", f"{prefix}norm", config, group, whole, swaps)
    config.use_cache = False
    body.rotary_emb.register_forward_hook(_of_each, with_kwargs=True)
    blocks[0].register_forward_pre_hook(_cut, with_kwargs=True)
    body.register_forward_pre_hook(_unmasked, with_kwargs=True)
    for outer in {model, body}:
        outer.register_forward_pre_hook(_asks_for_outputs, with_kwargs=True)
    head = getattr(model, "lm_head", None)
    tied = isinstance(head, nn.Linear) and any(
        m.weight is head.weight for m in body.modules() if isinstance(m, nn.Embedding)
    )
    if isinstance(head, nn.Linear) and not tied and head.out_features % body.norm.ranks == 0:
        how = {"group": group, "sequence_parallel": False, **_like(head.weight)}
        now = Head(head.in_features, head.out_features, head.bias is not None, **how)
        for name in ("weight", "bias") if head.bias is not None else ("weight",):
            now.set_whole(name, getattr(head, name))
        _put(model, "lm_head", "lm_head", now, swaps)
    if body.norm.mesh is not None:
        _whole_ones(model, group, swaps)
    return swaps


def _whole_ones(model: nn.Module, group: Any, swaps: Swaps) -> None:
    """Tables and linear layers that stay whole get DTensors, too: what takes all parameters of a model at
    once, as `clip_grad_norm_` and fused optimizers do, takes no others beside these. What was one parameter
    stays one."""
    made: dict[Tensor, nn.Parameter] = {}
    for at, parent in list(model.named_modules()):
        for name, was in parent.named_children():
            if type(was) not in (nn.Embedding, nn.Linear) or isinstance(parent, Parallel):
                continue
            now: Any = WholeTable(was, group) if isinstance(was, nn.Embedding) else WholeLinear(was, group)
            for own, param in was.named_parameters():
                setattr(now, own, made.setdefault(param, getattr(now, own)))
            _put(parent, name, f"{at}.{name}" if at else name, now, swaps)


def _whole_yet(model: nn.Module, blocks: nn.ModuleList) -> None:
    """Refuses a model of which something is swapped or split already, or one thing in several blocks.

    Raises:
        TileTypeError: it is.
    """
    for name, module in model.named_modules():
        if isinstance(module, Parallel):
            raise TileTypeError(
                f"{name} is {type(module).__name__} already", expected="a model that is whole, swapped once"
            )
    for name, param in model.named_parameters():
        if hasattr(param, "placements"):
            raise TileTypeError(
                f"{name} is split over {param.device_mesh} already", expected="a model that is whole",
                hint="parallelize first, fully_shard behind it",
            )  # fmt: skip
    first: dict[Tensor, str] = {}
    for name, param in blocks.named_parameters("layers", remove_duplicate=False):
        if (other := first.setdefault(param, name)) != name:
            raise TileTypeError(
                f"{name} is {other}, too", expected="blocks that share nothing: each would have its own then"
            )


def _cut(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In front of the first block: this rank's rows."""
    x = args[0] if args else kwargs.pop("hidden_states")
    rows = call.kept(x.flatten(0, 1), module.input_layernorm.group_name)
    return (rows, *args[1:]), kwargs


def _unmasked(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In front of a body that gets no mask: an empty one, instead of that of length² which transformers makes
    of packed sequences and, where it is compiled, always. Of packed sequences also where they begin, by the
    names under which transformers takes that for other kernels of attention. As there, sequences are packed
    where positions do not go on by one."""
    names = ("input_ids", "attention_mask", "position_ids", "cache", "inputs_embeds")
    given: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
    x = given.get("inputs_embeds") if given.get("input_ids") is None else given["input_ids"]
    if x is None or given.get("attention_mask") is not None:
        return None
    starts = given.get("cu_seq_lens_q")
    causal = getattr(module.config, "is_causal", True)  # else transformers packs nothing by itself
    if starts is None and causal and given.get("position_ids") is not None:
        starts = _starts(given["position_ids"], *x.shape[:2])
    if starts is not None:
        kwargs["cu_seq_lens_q"] = starts
        if kwargs.get("max_length_q") is None:
            kwargs["max_length_q"] = int(starts.diff().max())
    none = torch.empty(1, 1, 0, 0, device=x.device)  # of floats: older ones look for them on GPUs
    if len(args) > 1:
        return (args[0], none, *args[2:]), kwargs
    return args, {**kwargs, "attention_mask": none}


def _starts(places: Tensor, batch: int, length: int) -> Tensor | None:
    """The row where each sequence begins and the last one ends; None where each row of a batch is one."""
    begins = places.diff(prepend=places[:, :1] - 1) != 1
    begins[:, 0] = True
    firsts = begins.expand(batch, length).flatten().nonzero().flatten()
    if len(firsts) == batch:
        return None
    return nn.functional.pad(firsts, (0, 1), value=batch * length).to(torch.int32)


def _of_each(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], found: Any) -> Any:
    """Cosines and sines (batch, length, …) instead of (1, length, …), without a copy."""
    x = args[0] if args else kwargs["x"]
    return tuple(t.expand(x.shape[0], -1, -1) for t in found)


def _asks_for_outputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses what would be of this rank's rows, or is not there.

    Raises:
        TileValueError: a forward that is to give more than its result.
    """
    for word in OUTPUTS:
        if kwargs.get(word):
            raise TileValueError(
                f"a parallel {type(module).__name__} with {word}=True",
                expected="none: between blocks each rank has rows of its own",
                hint="register_forward_hook gives a block's rows of this rank",
            )


#: words by which a forward gives more than its result
OUTPUTS = ("output_hidden_states", "output_attentions", "output_router_logits")

#: of the library transformers: whose attention, gated layers and norms are computed as here. Others have the
#: same names and turn positions in pairs, or not in each block, or subtract one attention from another
FAMILIES = ("csm", "granite", "llama", "mistral", "mixtral", "qwen2")

#: of a block: module's name → the modules with parameters that it has, as one or the other
_KNOWN: dict[str, tuple[tuple[str, ...], ...]] = {
    "self_attn": (("k_proj", "o_proj", "q_proj", "v_proj"),),
    "mlp": (("down_proj", "gate_proj", "up_proj"), ("experts", "gate")),
    "input_layernorm": ((),),
    "post_attention_layernorm": ((),),
}


def _checked(blocks: nn.ModuleList, norm: nn.Module, config: Any) -> None:
    """Refuses a block that is no Llama's or Mixtral's: one that is half known would compute something else on
    rows.

    Raises:
        TileTypeError: something else is in a block. TileValueError: the configuration asks for what there is
            not.
    """
    for block in blocks:
        children = dict(block.named_children())
        for name, kinds in _KNOWN.items():
            found: Any = children.pop(name, nn.Module())
            inner = (k for k, m in found.named_children() if next(m.parameters(), None) is not None)
            has = tuple(sorted(inner))
            what = f"{type(block).__name__}.{name}"
            if has not in kinds or (not has and not hasattr(found, "variance_epsilon")):
                raise TileTypeError(
                    f"{what} is {type(found).__name__} of {has}",
                    expected=" or ".join(map(str, kinds)) if kinds[0] else "an RMSNorm",
                )
            _as_here(found, what, has)
        if children:
            what = f"{type(block).__name__} has {sorted(children)}"
            raise TileTypeError(what, expected=f"{sorted(_KNOWN)} alone")
    if not hasattr(norm, "variance_epsilon"):
        raise TileTypeError(f"norm is {type(norm).__name__}", expected="an RMSNorm")
    _as_here(norm, "norm", ())
    for word in ("attention_dropout", "sliding_window", "router_jitter_noise", *OUTPUTS):
        if getattr(config, word, None):
            raise TileValueError(f"{word}={getattr(config, word)}", expected="none: there is none here")
    if getattr(config, "_attn_implementation", None) == "eager":
        raise TileValueError(
            'attn_implementation="eager"', expected='"sdpa": with eager attention every forward has a mask'
        )


def _as_here(module: nn.Module, what: str, has: tuple[str, ...]) -> None:
    """Refuses a module with the right names that is more than these, or computes something else with them.
    Its parts ``has`` parameters.

    Raises:
        TileTypeError: it does. TileValueError: it asks for what there is not.
    """
    own = next(c for c in type(module).__mro__ if "forward" in vars(c))
    if own.__module__.startswith("transformers.models.") and own.__module__.split(".")[2] not in FAMILIES:
        raise TileTypeError(
            f"{what} is {own.__name__}", expected=f"of the library transformers one of {', '.join(FAMILIES)}"
        )
    linears = has if "experts" not in has else ()
    known = {f"{name}.{kind}" for name in linears for kind in ("weight", "bias")}
    known |= {"gate.weight", "experts.gate_up_proj", "experts.down_proj"} if "experts" in has else set()
    params = dict(module.named_parameters())
    if more := sorted(params.keys() - (known or {"weight"})):
        raise TileTypeError(
            f"{what} has parameters {more}", expected=f"{sorted(known) or 'a weight'}",
            hint="adapters and parametrizations behind parallelize, around its layers",
        )  # fmt: skip
    for name in linears:
        if type(module.get_submodule(name)).forward is not nn.Linear.forward:
            kind = type(module.get_submodule(name)).__name__
            raise TileTypeError(f"{what}.{name} is {kind}", expected="a torch.nn.Linear")
    for word in ("attention_dropout", "sliding_window"):
        if getattr(module, word, None):
            raise TileValueError(
                f"{what} has {word}={getattr(module, word)}", expected="none: there is none here"
            )
    for together in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj", "down_proj")):
        biases = {f"{name}.bias" in params for name in together if name in linears}
        if len(biases) > 1:
            raise TileTypeError(f"{what}: a bias of some of {together}", expected="of all or of none")
    for part in module.modules():
        hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        if "forward" in vars(part) or any(getattr(part, kind) for kind in hooks):
            raise TileTypeError(
                f"{what}: {type(part).__name__} has hooks, or a forward of its own",
                expected="none: another module takes its place",
                hint="register_forward_hook and the like behind parallelize",
            )
    for name, param in params.items():
        if param._backward_hooks or param._post_accumulate_grad_hooks:
            raise TileTypeError(
                f"{what}.{name} has hooks", expected="none: another parameter takes its place",
                hint="register_hook behind parallelize",
            )  # fmt: skip


def _alike(model: nn.Module, group: Any) -> None:
    """Refuses parameters that are others on other ranks, as different seeds make them: each rank would keep
    its part of a model of its own. Collective.

    Raises:
        TileValueError: some are.
    """
    params = dict(model.named_parameters())
    if any(p.is_meta or isinstance(p, FakeTensor) for p in params.values()):
        return
    with torch.no_grad():
        sums = [float(p.sum(dtype=torch.float64)) for p in params.values()]
    found = zip(*agree.table(sums, groups.team(groups.name_of(group))), strict=True)
    wrong = [name for name, of in zip(params, found, strict=True) if len(set(map(repr, of))) > 1]
    if wrong:
        raise TileValueError(
            f"parameters that are others on other ranks: {', '.join(wrong[:3])}, {len(wrong)} in all",
            expected="the same model on all ranks of the group",
            hint="torch.manual_seed(seed), the same on all of them, before the model is made",
        )


def _like(weight: Tensor) -> dict[str, Any]:
    return {"device": weight.device, "dtype": weight.dtype}


def _put(parent: nn.Module, name: str, path: str, now: nn.Module, swaps: Swaps) -> None:
    """Puts a module in another one's place."""
    was = getattr(parent, name)
    now.train(was.training)
    _freeze(was, now, path)
    setattr(parent, name, now)
    swaps.swaps.append(Swap(path, type(was).__name__, f"{type(now).__mro__[0].__name__}({now.extra_repr()})"))


def _freeze(was: nn.Module, now: nn.Module, path: str) -> None:
    """Parameters are frozen where those were that they come of.

    Raises:
        TileValueError: some are of those that are one parameter now.
    """
    before, woven = dict(was.named_parameters()), getattr(now, "woven", {})
    for own, param in now.named_parameters():
        names = woven[own].names if own in woven else (own,)
        trained = {before[n].requires_grad for n in names}
        if len(trained) > 1:
            raise TileValueError(
                f"{path}: some of {names} are frozen", expected="all: they are one parameter"
            )
        param.requires_grad_(trained.pop())


def _activation(module: Any, path: str) -> str:
    """The name of a module's ``act_fn``.

    Raises:
        TileValueError: there is no such gate.
    """
    known = {"SiLUActivation": "silu", "GELUActivation": "gelu"}
    known |= {kind: kind.lower() for kind in ("SiLU", "GELU", "ReLU")}
    kind = type(module.act_fn).__name__
    if kind not in known or getattr(module.act_fn, "approximate", "none") != "none":
        raise TileValueError(f"{path} with {kind}", expected="SiLU, GELU by erf, or ReLU")
    return known[kind]


def _made(was: Any, path: str, config: Any, group: Any, meta: bool = False) -> Any:
    """What takes a module's place, with its numbers; on ``meta`` without, to see whether it can be made."""
    now: Any
    parts: tuple[Any, ...]
    how: dict[str, Any] = {"group": group, **_like(next(was.parameters()))}
    if meta:
        how["device"] = "meta"
    name = path.rpartition(".")[2]
    if name == "self_attn":
        heads, dim = config.num_attention_heads, was.head_dim
        kv = getattr(config, "num_key_value_heads", None) or heads
        causal = bool(getattr(config, "is_causal", True))
        if causal and not getattr(was, "is_causal", True):
            raise TileValueError(
                f"{path} has is_causal=False", expected="True, or config.is_causal=False, as masks are made"
            )
        now = BlockAttention(
            config.hidden_size, heads, kv, dim, bias=was.q_proj.bias is not None, rotary=None,
            out_bias=was.o_proj.bias is not None, scale=getattr(was, "scaling", None),
            causal=causal, **how,
        )  # fmt: skip
        parts = (was.q_proj, was.k_proj, was.v_proj, was.o_proj)
    elif hasattr(was, "experts"):
        experts, features, hidden = was.experts.down_proj.shape
        act = _activation(was.experts, path)
        now = BlockMoE(features, hidden, experts, config.num_experts_per_tok, activation=act, **how)
        parts = (was.gate.weight, was.experts.gate_up_proj, was.experts.down_proj)
    elif name == "mlp":
        gate, act = was.gate_proj, _activation(was, path)
        now = BlockMLP(gate.in_features, gate.out_features, act, gate.bias is not None, **how)
        parts = (was.gate_proj, was.up_proj, was.down_proj)
    else:
        kinds: type[RMSNorm] = LastNorm if name == "norm" else RMSNorm
        now = kinds(was.weight.shape[0], was.variance_epsilon, **how)
        now.set_whole("weight", was.weight)
        return now
    if not meta:
        now.set_parts(*parts)
    return now


def _swap(
    parent: nn.Module, name: str, path: str, config: Any, group: Any, whole: Whole, swaps: Swaps
) -> None:
    now = _made(getattr(parent, name), path, config, group)
    now.whole = whole
    _put(parent, name, path, now, swaps)
