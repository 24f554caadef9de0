"""What tests of `tilescale.nn.parallelize` run on each rank: models of the library transformers, whole and
parallel."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.ranks.nn_checks import Errors, gradients, off, read_again
from tilescale import nn as tsnn


def everything(mesh: Any) -> Errors:
    """A Llama and a Mixtral of the library, whole and parallel."""
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    sizes = {
        "vocab_size": 36, "hidden_size": 12, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 4, "max_position_embeddings": 32,
    }  # fmt: skip
    found = swapped(mesh, "llama", LlamaForCausalLM(LlamaConfig(**sizes)))
    one: dict[str, Any] = sizes | {"num_key_value_heads": 1, "head_dim": 6}  # which all ranks share
    one["hidden_act"] = "relu"
    found |= swapped(mesh, "llama of one key head, relu", LlamaForCausalLM(LlamaConfig(**one)))
    config = MixtralConfig(**sizes, num_local_experts=6, num_experts_per_tok=2, sliding_window=None)
    config._experts_implementation = "eager"  # the other takes no float64
    found |= frozen(mesh, MixtralForCausalLM(config))
    found |= asked_for_more(mesh, LlamaConfig(**sizes), LlamaForCausalLM)
    found |= compiled(mesh, LlamaForCausalLM(LlamaConfig(**sizes)))
    for how in ({}, {"foreach": True}, {"fused": True}):
        of: dict[str, Any] = sizes | {"tie_word_embeddings": bool(how)}
        found |= stepped(mesh, LlamaForCausalLM(LlamaConfig(**of)), how)
    for kind, of in ((LlamaForCausalLM, LlamaConfig(**sizes)), (MixtralForCausalLM, config)):
        found |= {f"{kind.__name__}, {k}": e for k, e in of_other_shapes(mesh, kind(of)).items()}
    return found | swapped(mesh, "mixtral", MixtralForCausalLM(config))


def numbered(model: Any) -> Any:
    """The model with parameters that are large enough to tell errors."""
    model = model.double()
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    return model


def words(batch: int, length: int) -> Tensor:
    return torch.arange(batch * length).view(batch, length) * 5 % 36


def of_other_shapes(mesh: Any, plain: Any) -> Errors:
    """Forwards of several batches before one backward, with checkpoints of activations and without, in copies
    of a model; a layer that is checkpointed by itself."""
    torch.manual_seed(8)
    plain, found = numbered(plain), {}
    first = copy.deepcopy(plain)
    tsnn.parallelize(first, mesh["tp"])
    second = copy.deepcopy(first)  # before any forward

    def losses(*models: Any) -> None:
        for model in {plain, *models}:
            model.zero_grad()
        given = [words(*shape) for shape in SHAPES]
        want = [plain(w, labels=w).loss for w in given]
        got = [m(w, labels=w).loss for m, w in zip(models, given, strict=True)]
        sum(want).backward(), sum(got).backward()
        found[f"losses {len(found)}"] = max(map(off, got, want))

    for reentrant in (None, False, True):
        if reentrant is not None:
            first.gradient_checkpointing_enable({"use_reentrant": reentrant})
        losses(first, first, first)
        found |= {f"reentrant {reentrant} {k}": e for k, e in gradients(first, plain).items()}
    losses(first, second, first)
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        p.grad += q.grad
    found |= {f"copies {k}": e for k, e in gradients(first, plain).items()}

    for name, e in packed(first, plain).items():
        found[f"packed {name}"] = e
    mlp, whole = second.model.layers[0].mlp, second.model.layers[0].mlp.forward
    mlp.forward = lambda x: checkpoint(whole, x, use_reentrant=False)
    loss = second(words(2, 7), labels=words(2, 7)).loss
    second(words(1, 5))
    found["a layer by itself"] = float(not refused_for("checkpoint whole blocks", loss.backward))
    return found


def compiled(mesh: Any, plain: Any) -> Errors:
    """A whole model as one graph, of which transformers makes a mask when it is traced."""
    plain, w = numbered(plain), words(2, 7)
    model = copy.deepcopy(plain)
    tsnn.parallelize(model, mesh["tp"])
    plain(w, labels=w).loss.backward()
    torch.compile(model, backend="aot_eager", fullgraph=True)(w, labels=w).loss.backward()
    return {f"compiled {k}": e for k, e in gradients(model, plain).items()}


def stepped(mesh: Any, plain: Any, how: dict[str, Any]) -> Errors:
    """Optimizers and clipping, which take all parameters at once; a head that shares the embedding's weight."""
    plain, w = numbered(plain), words(2, 7)
    model = copy.deepcopy(plain)
    tsnn.parallelize(model, mesh["tp"])
    found: Errors = {}
    optimizers = [torch.optim.AdamW(m.parameters(), 0.01, eps=0.1, **how) for m in (plain, model)]
    for step in range(2):
        norms = []
        for m, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            m(w, labels=w).loss.backward()
            norms.append(nn.utils.clip_grad_norm_(m.parameters(), 0.1, foreach=how.get("foreach")))
            optimizer.step()
        found[f"norm {step}"] = off(norms[1].full_tensor(), norms[0])
    full = tsnn.full_state_dict(model)
    found |= {k: off(full[k], v) for k, v in plain.state_dict().items()}
    return {f"stepped {how}: {k}": e for k, e in found.items()}


def packed(model: Any, plain: Any) -> Errors:
    """Positions that begin anew, in rows of a batch and in one; the same by where sequences begin."""
    found: Errors = {}
    at = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [0, 0, 1, 2, 3, 4, 0]])
    for name, places, given in (
        ("rows", at, words(2, 7)),
        ("alike", at[:1], words(2, 7)),
        ("one row", at.view(1, 14), words(1, 14)),
    ):
        want = plain(
            given, labels=given, position_ids=places, use_cache=False
        )  # with a cache it packs nothing
        mine = [model(given, labels=given, position_ids=places)]
        if name == "one row":
            starts = torch.tensor([0, 3, 7, 8, 13, 14], dtype=torch.int32)
            more = {"cu_seq_lens_q": starts, "max_length_q": 5}
            mine.append(model(given, labels=given, position_ids=places, **more))
            by_place = model.model(given, None, places).last_hidden_state
            found["by place"] = off(model.lm_head(by_place), want.logits)
        for k, got in enumerate(mine):
            model.zero_grad(), plain.zero_grad()
            want.loss.backward(retain_graph=True), got.loss.backward()
            found |= {f"{name} {k}: {n}": e for n, e in gradients(model, plain).items()}
            found[f"{name} {k}: logits"] = off(got.logits, want.logits)
    other = plain(given).logits
    found["packed or not"] = float(off(other, want.logits) < 0.01)
    return found


#: of batches, which divide nothing
SHAPES = ((2, 7), (3, 4), (1, 5))


def asked_for_more(mesh: Any, config: Any, kind: Any) -> Errors:
    """A forward that is to give what lies between blocks, of which each rank has its rows; a model that is
    split already, and one whose attention makes a mask of every forward."""
    from torch.distributed.fsdp import fully_shard

    model, found = kind(config), {}
    fully_shard(model.model.layers[1], mesh=mesh["tp"])
    told = "model.layers.1.self_attn.q_proj.weight is split over"
    found["split"] = float(not refused_for(told, lambda: tsnn.parallelize(model, mesh["tp"])))
    model = kind(config)
    tsnn.parallelize(model, mesh["tp"])
    for word in ("output_hidden_states", "output_attentions"):
        found[word] = float(not refused_for(word, lambda word=word: model(words(1, 4), **{word: True})))
    config._attn_implementation = "eager"
    found["eager"] = float(not refused_for("eager", lambda: tsnn.parallelize(kind(config), mesh["tp"])))
    return found


def refused_for(word: str, call: Callable[[], Any]) -> bool:
    try:
        call()
    except (TypeError, ValueError) as e:
        return word in str(e)
    return False


def frozen(mesh: Any, model: Any) -> Errors:
    """Parameters are frozen where those were that they come of, which are all of one or none."""
    other, block = copy.deepcopy(model), model.model.layers[0]
    for was in (block.mlp.gate.weight, block.self_attn.o_proj.weight):
        was.requires_grad_(False)
    tsnn.parallelize(model, mesh["tp"])
    kept = {name for name, p in block.named_parameters() if not p.requires_grad}
    other.model.layers[0].self_attn.v_proj.weight.requires_grad_(False)
    try:
        tsnn.parallelize(other, mesh["tp"])
        refused = False
    except ValueError as e:
        refused = "v_proj.weight" in str(e)
    return {
        "frozen": float(kept != {"mlp.router", "self_attn.o_proj.weight"}),
        "half frozen": float(not refused),
    }


def swapped(mesh: Any, name: str, plain: Any) -> Errors:
    """Logits, loss, gradients, checkpoints, what is refused."""
    torch.manual_seed(6)
    plain = numbered(plain)
    model = copy.deepcopy(plain)
    swaps = tsnn.parallelize(model, mesh["tp"])
    found: Errors = {"swaps": float(len(swaps) != 11), "table": float(len(str(swaps).splitlines()) != 12)}
    tokens = words(2, 7)
    want, got = plain(tokens, labels=tokens), model(tokens, labels=tokens)
    want.loss.backward()
    got.loss.backward()
    found |= {"logits": off(got.logits, want.logits), "loss": off(got.loss, want.loss)}
    full = tsnn.full_state_dict(model)
    found["names"] = float(set(full) != set(plain.state_dict()))
    found |= {k: off(full[k], v) for k, v in plain.state_dict().items()}
    found |= gradients(model, plain)
    for p in model.parameters():
        p.detach().zero_()
    model.load_state_dict(plain.state_dict())
    found["loaded"] = off(model(tokens).logits, want.logits)
    found["pickled"] = off(read_again(model)(tokens).logits, want.logits)
    try:
        model(tokens, attention_mask=torch.ones_like(tokens).tril())
        found["padding"] = 1.0
    except ValueError as e:
        found["padding"] = float("attention mask" not in str(e))
    return {f"{name}: {k}": e for k, e in found.items()}
