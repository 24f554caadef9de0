"""What tests of attention run on each rank where key heads are fewer than the ranks: several of them use
one."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tilescale.ops
from tests.ranks.nn_checks import Errors, PlainAttention, compare, gradients, leaf, mine, normal, off
from tilescale import comm
from tilescale import nn as tsnn

FEATURES, HEADS, DIM, ROWS = 12, 8, 4, 10


def pair(
    group: Any, kv: int, bias: bool = True, causal: bool = True, base: Any = 100.0, **more: Any
) -> tuple[Any, PlainAttention]:
    """A layer, and an unsharded one with its parameters."""
    how = {"bias": bias, "out_bias": bias, "causal": causal, "rotary": base, "dtype": torch.float64} | more
    layer = tsnn.ParallelAttention(FEATURES, HEADS, kv, DIM, group=group, **how)
    plain = PlainAttention(FEATURES, HEADS, kv, DIM, bias, causal, base, how["dtype"])
    plain.load_state_dict(tsnn.full_state_dict(layer))
    return layer, plain


def everything(mesh: Any) -> Errors:
    """Layers of 1 and 2 key heads on more ranks, with DTensors and plain parameters."""
    torch.manual_seed(0)
    found: Errors = {}
    x = normal(ROWS, FEATURES, seed=11, dtype=torch.float64)
    for kv in (kv for kv in (1, 2) if kv < comm.world_size()):
        for group, split, causal, base, more in (
            (mesh["tp"], True, True, 100.0, {}),
            (mesh["tp"], False, False, None, {}),
            (None, True, True, 10.0, {"keep_gathered": True}),
        ):
            layer, plain = pair(group, kv, split, causal, base, sequence_parallel=split, **more)
            rows = {"rows": ROWS} if split else {}
            errors = compare(layer, plain, x, 2, split_in=split, split_out=split, **rows)
            errors["rows are there once"] = float(whole_rows(layer) != (HEADS + 2 * kv) * DIM)
            found |= {f"{kv} key heads {split} {base}: {k}": e for k, e in errors.items()}
        others = {"packed": packed, "trained": trained, "frozen": frozen} | (
            {"graph": one_graph} if kv == 1 else {}
        )
        for name, check in others.items():
            found |= {f"{kv} key heads, {name}: {k}": e for k, e in check(mesh, kv).items()}
    return found | refused(mesh)


def whole_rows(layer: Any) -> int:
    """Rows of the weight that all ranks have together."""
    part = layer.qkv_proj.weight
    part = part.to_local() if hasattr(part, "to_local") else part
    return int(tilescale.ops.all_reduce(torch.tensor([part.shape[0]], dtype=torch.float64)))


def packed(mesh: Any, kv: int) -> Errors:
    """Sequences of different lengths beside each by itself."""
    ends = (0, 3, 3, 9, 10)
    layer, plain = pair(mesh["tp"], kv)
    x, dy = (normal(ROWS, FEATURES, seed=k, dtype=torch.float64) for k in (41, 42))
    whole, own, starts = leaf(x), leaf(mine(x)), torch.tensor(ends, dtype=torch.int32)
    want = torch.cat([plain(whole[a:b], 1) for a, b in itertools.pairwise(ends) if b > a])
    got = layer(own, rows=ROWS, starts=starts, longest=6)
    want.backward(dy), got.backward(mine(dy))
    errors = {"y": off(got, mine(want)), "dx": off(own.grad, mine(whole.grad))}
    return errors | gradients(layer, plain)


def one_graph(mesh: Any, kv: int) -> Errors:
    """torch.compile and activation checkpointing have the numbers of the call."""
    from torch.utils.checkpoint import checkpoint

    layer, _ = pair(mesh["tp"], kv)
    x, grads = mine(normal(2 * comm.world_size(), FEATURES, seed=5, dtype=torch.float64)), []
    for call in (
        layer,
        torch.compile(layer, backend="aot_eager", fullgraph=True),
        lambda x: checkpoint(layer, x, use_reentrant=False),
    ):
        layer.zero_grad()
        call(x).square().sum().backward()
        grads.append([p.grad.full_tensor() for p in layer.parameters()])
    return {
        f"{way} {k}": off(b, a)
        for way, of in (("compiled", grads[1]), ("checkpointed", grads[2]))
        for k, (a, b) in enumerate(zip(grads[0], of, strict=True))
    }


def frozen(mesh: Any, kv: int) -> Errors:
    """Weights that are not trained."""
    layer, plain = pair(mesh["tp"], kv)
    layer.requires_grad_(False)
    x = normal(ROWS, FEATURES, seed=12, dtype=torch.float64)
    whole, own = leaf(x), leaf(mine(x))
    plain(whole, 1).square().sum().backward()
    layer(own, rows=ROWS).square().sum().backward()
    return {"dx": off(own.grad, mine(whole.grad)), "dw": float(layer.qkv_proj.weight.grad is not None)}


def trained(mesh: Any, kv: int) -> Errors:
    """Steps of AdamW with clipped gradients, after which the ranks of a key head use the same bits of it."""
    layer, plain = pair(mesh["tp"], kv)
    x = normal(ROWS, FEATURES, seed=13, dtype=torch.float64)
    norms: list[Tensor] = []
    for model, data in ((plain, x), (layer, mine(x))):
        rows = {} if model is plain else {"rows": ROWS}
        by = torch.optim.AdamW(model.parameters(), 0.01)
        for _ in range(3):
            by.zero_grad()
            model(data, 2, **rows).square().sum().backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            norms.append(norm if model is plain else norm.full_tensor())
            by.step()
    full = tsnn.full_state_dict(layer)
    found = {k: off(full[k], v) for k, v in plain.state_dict().items()}
    found["norms"] = off(torch.stack(norms[3:]), torch.stack(norms[:3]))
    return found | {f"copies of {k}": e for k, e in copies(layer, full).items()}


def copies(layer: Any, full: dict[str, Tensor]) -> Errors:
    """Whether what each rank uses of queries, keys and values is, bit for bit, what a checkpoint has."""
    heads, found = layer.local_heads, {}
    own = slice(layer.rank * heads * DIM, (layer.rank + 1) * heads * DIM)
    head = layer.rank * layer.kv_heads // layer.ranks
    keys = slice(head * DIM, (head + 1) * DIM)
    for name in ("weight", "bias"):
        used = layer.qkv_proj.local(name).detach()
        want = [full[f"{of}_proj.{name}"][rows] for of, rows in (("q", own), ("k", keys), ("v", keys))]
        found[name] = float(not used.equal(torch.cat(want)))
    return found


def refused(mesh: Any) -> Errors:
    """Heads that do not go to so many ranks, and to how many they do."""
    n, tp = comm.world_size(), mesh["tp"]
    found: Errors = {}
    for text, heads, kv, dim in (
        (f"kv_heads=3, head_dim=4 on {n} ranks", 3 * n, 3, 4),
        ("or a divisor of them", 3 * n, 3, 4),
        (f"a group of {n // 2}", n // 2, 1, 4),  # there is a rank without a query head
        ("heads a multiple of the ranks", n // 2, 1, 4),
    ):
        try:
            tsnn.ParallelAttention(FEATURES, heads, kv, dim, group=tp)
            found[f"refused {heads} {kv}"] = float("inf")
        except ValueError as e:
            found[f"refused {heads} {kv}"] = float(text not in str(e))
    return found


def contexts(mesh: Any, dtype: torch.dtype) -> Errors:
    """Two ranks share a key head, and two such pairs have half of each sequence."""
    both = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    cp, tp = both["cp"].get_local_rank(), both["tp"].get_local_rank()
    torch.manual_seed(0)
    found: Errors = {}
    length, kv = 8, 1
    x, dy = (normal(2, length, FEATURES, seed=s, dtype=dtype) for s in (41, 42))
    for way, layout in (("ring", "contiguous"), ("ulysses", "contiguous"), ("ulysses", "zigzag")):
        chunks = [2 * cp, 2 * cp + 1] if layout == "contiguous" else [cp, 3 - cp]
        at = torch.cat([torch.arange(2 * c, 2 * c + 2) for c in chunks])
        how = {"context": both["cp"], "context_by": way, "layout": layout}
        layer = tsnn.ParallelAttention(FEATURES, HEADS, kv, 8, group=both["tp"], dtype=dtype, **how)
        plain = PlainAttention(FEATURES, HEADS, kv, 8, False, True, 10000.0, dtype)
        plain.load_state_dict(tsnn.full_state_dict(layer))
        whole = leaf(x)
        want = plain(whole.flatten(0, 1), 2)
        want.backward(dy.flatten(0, 1))
        part = leaf(x[:, at].flatten(0, 1).chunk(2)[tp])
        got = layer(part, 2)
        got.backward(dy[:, at].flatten(0, 1).chunk(2)[tp])
        mine = lambda y: y.view(x.shape)[:, at].flatten(0, 1).chunk(2)[tp]  # noqa: E731
        errors = {"y": off(got, mine(want)), "dx": off(part.grad, mine(whole.grad))}
        for p in layer.parameters():
            p.grad.to_local().copy_(tilescale.ops.all_reduce(p.grad.to_local(), group=both["cp"]))
        errors |= gradients(layer, plain)
        small = 0.0 if dtype == torch.float64 else 0.02
        found |= {f"{dtype} {way} {layout}: {k}": max(0.0, e - small) for k, e in errors.items()}
    return found


def fully_sharded(mesh: Any) -> Errors:
    """FSDP2 along another axis, around DTensors and plain parts: each pair of ranks has half of the batch."""
    from torch.distributed.fsdp import fully_shard

    both = dist.init_device_mesh("cpu", (2, comm.world_size() // 2), mesh_dim_names=("dp", "tp"))
    dp, tp = both["dp"].get_local_rank(), both["tp"].get_local_rank()
    x, found = normal(12, FEATURES, seed=14, dtype=torch.float64), {}
    for kind, group in (("DTensors", both["tp"]), ("plain parts", both["tp"].get_group())):
        torch.manual_seed(4)
        layer, plain = pair(group, 1)
        for part in (layer.qkv_proj, layer):
            fully_shard(part, mesh=both["dp"])
        plain(x, 2).square().sum().div(2).backward()  # gradients are averaged over the two halves
        layer(x.chunk(2)[dp].chunk(both["tp"].size())[tp]).square().sum().backward()
        found |= {f"{kind} {k}": e for k, e in gradients(layer, plain).items()}
        torch.manual_seed(5)
        _, other = pair(both["tp"], 1)
        layer.load_state_dict(other.state_dict())
        full = tsnn.full_state_dict(layer)
        found |= {f"{kind}, loaded {k}": off(full.get(k), v) for k, v in other.state_dict().items()}
    return found


def saved(mesh: Any, folder: str, kv: int) -> Errors:
    """Writes a distributed checkpoint of parameters and AdamW's states after a step, and an unsharded one."""
    import torch.distributed.checkpoint as dcp

    torch.manual_seed(2)
    layer, _ = pair(mesh["tp"], kv)
    by = stepped(layer)
    dcp.save({"model": layer.state_dict(), "optimizer": by.state_dict()}, checkpoint_id=folder)
    full = tsnn.full_state_dict(layer)
    if comm.rank() == 0:
        torch.save(full, f"{folder}/full.pt")
    kept = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata["model.qkv_proj.weight"]
    once = sum(c.sizes[0] for c in kept.chunks) == kept.size[0] == (HEADS + 2 * kv) * DIM
    heads = full["k_proj.weight"].shape[0] == full["v_proj.weight"].shape[0] == kv * DIM
    return {"each head once": float(not once), "also unsharded": float(not heads)}


def stepped(layer: Any, by: Any = None) -> Any:
    by = by or torch.optim.AdamW(layer.parameters(), 0.01)
    by.zero_grad()
    x = normal(ROWS, FEATURES, seed=13, dtype=torch.float64)
    layer(mine(x), 2, rows=ROWS).square().sum().backward()
    by.step()
    return by


def resumed(mesh: Any, folder: str, kv: int) -> Errors:
    """Loads what other ranks have saved, both ways, takes a step, and compares it with the unsharded one."""
    import torch.distributed.checkpoint as dcp

    torch.manual_seed(3)
    layer, plain = pair(mesh["tp"], kv)
    by = stepped(layer)  # so that it has states
    state = {"model": layer.state_dict(), "optimizer": by.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    layer.load_state_dict(state["model"])
    by.load_state_dict(state["optimizer"])
    full = torch.load(f"{folder}/full.pt")
    found = {f"read {k}": off(v, full[k]) for k, v in tsnn.full_state_dict(layer).items()}
    again, _ = pair(mesh["tp"], kv)
    again.load_state_dict(full)
    found |= {f"unsharded {k}": off(v, full[k]) for k, v in tsnn.full_state_dict(again).items()}
    torch.manual_seed(2)
    _, plain = pair(mesh["tp"], kv)
    over = torch.optim.AdamW(plain.parameters(), 0.01)
    x = normal(ROWS, FEATURES, seed=13, dtype=torch.float64)
    for _ in range(2):
        over.zero_grad()
        plain(x, 2).square().sum().backward()
        over.step()
    full = tsnn.full_state_dict((stepped(layer, by), layer)[1])
    return found | {f"went on {k}": off(full[k], v) for k, v in plain.state_dict().items()}
