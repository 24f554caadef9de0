"""What `parallelize` refuses before it swaps anything: models that are nearly a Llama, and others on each rank."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tilescale import comm
from tilescale import nn as tsnn
from tilescale.errors import TileError

pytest.importorskip("transformers.models.llama.modeling_llama")

SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "pad_token_id": 0,
}  # fmt: skip


def of(kind: str) -> Any:
    import transformers

    config = getattr(transformers, f"{kind}Config")(**SIZES)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


class Doubled(nn.Linear):
    """A linear layer, and more."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Adapted(nn.Module):
    """An adapter around a linear layer, as libraries make them."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base_layer, self.low = base, nn.Linear(base.in_features, base.out_features, False)

    @property
    def weight(self) -> Any:
        return self.base_layer.weight


def hooked(block: Any) -> None:
    block.self_attn.register_forward_hook(lambda *_: None)


def hooked_inside(block: Any) -> None:
    block.mlp.down_proj.register_full_backward_hook(lambda *_: None)


def hooked_parameter(block: Any) -> None:
    block.input_layernorm.weight.register_hook(lambda grad: grad)


def replaced_forward(block: Any) -> None:
    block.mlp.forward = lambda x: x


def doubled(block: Any) -> None:
    block.self_attn.q_proj.__class__ = Doubled


def adapted(block: Any) -> None:
    block.self_attn.v_proj = Adapted(block.self_attn.v_proj)


def parametrized(block: Any) -> None:
    nn.utils.parametrizations.weight_norm(block.mlp.up_proj)


def one_bias(block: Any) -> None:
    block.self_attn.k_proj.bias = nn.Parameter(torch.zeros(8))


def dropping(block: Any) -> None:
    block.self_attn.attention_dropout = 0.5


ODD: dict[str, Callable[[Any], None]] = {
    "self_attn: LlamaAttention has hooks": hooked,
    "mlp: Linear has hooks": hooked_inside,
    "input_layernorm.weight has hooks": hooked_parameter,
    "mlp: LlamaMLP has hooks, or a forward of its own": replaced_forward,
    "q_proj is Doubled": doubled,
    "self_attn has parameters ['v_proj.base_layer.weight', ": adapted,
    "mlp has parameters ['up_proj.parametrizations.": parametrized,
    "self_attn: a bias of some of ('q_proj',": one_bias,
    "self_attn has attention_dropout=0.5": dropping,
}


def both_sides(block: Any) -> None:
    block.self_attn.is_causal = False


def half_frozen(block: Any) -> None:
    block.mlp.gate_proj.weight.requires_grad_(False)


def other_gate(block: Any) -> None:
    block.mlp.act_fn = nn.Tanh()


#: refused by what takes the module's place, when others could have been swapped
ODD |= {
    "'up_proj.weight') are frozen": half_frozen,
    "mlp with Tanh": other_gate,
    "layers.1.self_attn has is_causal=False": both_sides,
}

#: they have a Llama's names: attention by differences, positions in pairs, twice, none in some blocks
OTHERS = ("DiffLlama", "Ernie4_5", "Helium", "SmolLM3")


def told(model: Any) -> str:
    before = [type(m) for m in model.modules()]
    try:
        tsnn.parallelize(model, None)
    except TileError as error:
        return str(error) if before == [type(m) for m in model.modules()] else "half swapped"
    return "nothing"


def nearly() -> list[str]:
    comm.init()
    missed = []
    for word, change in ODD.items():
        model = of("Llama")
        change(model.model.layers[1])
        if word not in (said := told(model)):
            missed.append(f"{word}: {said}")
    for kind in OTHERS:
        if f"self_attn is {kind}Attention" not in (said := told(of(kind))):
            missed.append(f"{kind}: {said}")
    return missed


def again() -> str:
    comm.init()
    model = of("Llama")
    tsnn.parallelize(model, None)
    return told(model)


def test_a_model_that_is_swapped_already(ranks: Any):
    assert "model.layers.0.self_attn is BlockAttention already" in ranks(1, target="cpu").call(again)[0]


def test_what_is_nearly_a_llama(ranks: Any):
    assert ranks(1, target="cpu").call(nearly) == [[]]


def seeded(by_rank: bool) -> str:
    comm.init()
    torch.manual_seed(comm.rank() if by_rank else 0)
    return told(of("Qwen2"))  # a bias of queries, keys and values alone


def test_models_that_are_others_on_other_ranks(ranks: Any):
    for said in ranks(2, target="cpu").call(seeded, True):
        assert "others on other ranks: model.embed_tokens.weight, " in said and "torch.manual_seed" in said
    assert ranks(2, target="cpu").call(seeded, False) == ["nothing"] * 2


def seen_from_both_sides() -> list[bool]:
    """Attention that is not causal: of positions in order, and of such as pack sequences for masks that are."""
    comm.init()
    words, places = torch.arange(14).view(2, 7) % 32, torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    plain, right = of("Llama").double(), []
    plain.config.is_causal = False
    model = copy.deepcopy(plain)
    tsnn.parallelize(model, None)
    for more in ({}, {"position_ids": places}):
        want = plain(words, use_cache=False, **more).logits
        right.append(torch.allclose(model(words, **more).logits, want, atol=1e-6))
    model = of("Llama")
    tsnn.parallelize(model, None)
    with pytest.raises(TileError, match="is_causal=False of attention with causal=True"):
        model(words, is_causal=False)
    return right


def test_attention_that_is_not_causal(ranks: Any):
    assert ranks(1, target="cpu").call(seen_from_both_sides) == [[True, True]]


def shared() -> list[str]:
    """One thing in two blocks; a head that is no linear layer is left where it is."""
    comm.init()
    said = []
    for part in ("", "mlp", "self_attn.q_proj.weight"):
        model = of("Llama")
        blocks = model.model.layers
        if part:
            at, _, name = part.rpartition(".")
            setattr(blocks[1].get_submodule(at), name, operator.attrgetter(part)(blocks[0]))
        else:
            blocks[1] = blocks[0]
        said.append(told(model))
    model = of("Llama")
    model.lm_head = nn.Identity()
    return [*said, told(model)]


def test_blocks_that_share(ranks: Any):
    ((block, mlp, weight, head),) = ranks(1, target="cpu").call(shared)
    assert "layers.1.self_attn.q_proj.weight is layers.0.self_attn.q_proj.weight, too" in block
    assert "layers.1.mlp.gate_proj.weight is layers.0.mlp" in mlp and "layers.1.self_attn.q_proj" in weight
    assert head == "nothing"
