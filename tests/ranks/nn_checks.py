"""What the tests of tilescale.nn run on each rank: layers beside unsharded ones with the same numbers. Each
check gives errors by name, relative to the greatest number."""

from __future__ import annotations

import io
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tilescale.ops
from tilescale import comm
from tilescale import nn as tsnn

Errors = dict[str, float]


def port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def on_mesh(address: int, what: Callable[..., Any], *args: Any) -> Any:
    """Calls ``what(mesh, …)`` on a rank that has joined torch's job, too."""
    comm.init()
    where = f"tcp://127.0.0.1:{address}"
    dist.init_process_group("gloo", init_method=where, rank=comm.rank(), world_size=comm.world_size())
    try:
        return what(dist.init_device_mesh("cpu", (comm.world_size(),), mesh_dim_names=("tp",)), *args)
    finally:
        comm.barrier()
        dist.destroy_process_group()


def mine(whole: Tensor) -> Tensor:
    """This rank's rows, as torch.chunk splits them."""
    parts = whole.chunk(comm.world_size())
    return parts[comm.rank()] if comm.rank() < len(parts) else whole[:0]


def off(got: Any, want: Tensor) -> float:
    """The greatest error, relative to the greatest number; infinite where shapes differ or a NaN is."""
    if got is None or tuple(got.shape) != tuple(want.shape):
        return float("inf")
    if not want.numel():
        return 0.0
    worst = float((got.detach().double() - want.detach().double()).abs().max())
    return worst / max(1e-30, float(want.detach().double().abs().max())) if worst == worst else float("inf")


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def normal(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def compare(
    layer: nn.Module, plain: nn.Module, x: Tensor, *rest: Any, split_in: bool = True, split_out: bool = True,
    columns: bool = False, **more: Any,
) -> Errors:  # fmt: skip
    """A layer's result and gradients beside those of the unsharded one that has its parameters, by name.
    ``columns``: a rank's result is its columns."""
    full = tsnn.full_state_dict(layer)
    plain.load_state_dict(full)
    whole = leaf(x)
    want = plain(whole, *rest)
    dy = normal(*want.shape, seed=77, dtype=want.dtype)
    plain.zero_grad()
    want.backward(dy)
    part = leaf(mine(x)) if split_in else leaf(x)
    got = layer(part, *rest, **more)
    if columns:
        want, dy = (t.chunk(comm.world_size(), -1)[comm.rank()] for t in (want, dy))
    elif split_out:
        want, dy = mine(want), mine(dy)
    layer.zero_grad()
    got.backward(dy)
    found = {"y": off(got, want), "dx": off(part.grad, mine(whole.grad) if split_in else whole.grad)}
    return found | gradients(layer, plain)


def gradients(
    layer: nn.Module, plain: nn.Module, measure: Callable[[Any, Tensor], Any] = off
) -> dict[str, Any]:
    """Errors of parameters' gradients, gathered as a checkpoint is."""
    kept = {k: p.detach().clone() for k, p in layer.named_parameters()}
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(p.grad)
        found = tsnn.full_state_dict(layer)
        for k, p in layer.named_parameters():
            p.copy_(kept[k])
    return {f"d {k}": measure(found[k], p.grad) for k, p in plain.named_parameters()}


class PlainMLP(nn.Module):
    """What `ParallelMLP` computes."""

    def __init__(self, features: int, hidden: int, activation: str, bias: bool, dtype: torch.dtype):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(features, hidden, bias, dtype=dtype) for _ in range(2))
        self.down_proj = nn.Linear(hidden, features, bias, dtype=dtype)
        self.act = {"silu": nn.functional.silu, "gelu": nn.functional.gelu}[activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class PlainAttention(nn.Module):
    """What `ParallelAttention` computes, by the formulas."""

    def __init__(
        self, features: int, heads: int, kv: int, dim: int, bias: bool, causal: bool, base: Any, dtype: Any
    ):
        super().__init__()
        self.q_proj = nn.Linear(features, heads * dim, bias, dtype=dtype)
        self.k_proj, self.v_proj = (nn.Linear(features, kv * dim, bias, dtype=dtype) for _ in range(2))
        self.o_proj = nn.Linear(heads * dim, features, bias, dtype=dtype)
        self.heads, self.kv, self.dim, self.causal, self.base = heads, kv, dim, causal, base

    def turned(self, x: Tensor) -> Tensor:
        if self.base is None:
            return x
        place = torch.arange(x.shape[-2])[:, None] * self.base ** -(
            torch.arange(0, self.dim, 2).double() / self.dim
        )
        pairs = torch.view_as_complex(torch.stack(x.chunk(2, -1), -1).double().contiguous())
        turn = torch.polar(torch.ones_like(place), place)
        return torch.cat(torch.view_as_real(pairs * turn).unbind(-1), -1).to(x.dtype)

    def forward(self, x: Tensor, batch: int) -> Tensor:
        split = lambda y: y.view(batch, -1, y.shape[-1] // self.dim, self.dim).transpose(1, 2)  # noqa: E731
        q, k, v = split(self.q_proj(x)), split(self.k_proj(x)), split(self.v_proj(x))
        q, k = self.turned(q), self.turned(k).repeat_interleave(self.heads // self.kv, 1)
        score = q @ k.transpose(-1, -2) * self.dim**-0.5
        if self.causal:
            score = score.masked_fill(torch.ones(score.shape[-2:]).triu(1).bool(), -torch.inf)
        o = score.softmax(-1) @ v.repeat_interleave(self.heads // self.kv, 1)
        return self.o_proj(o.transpose(1, 2).flatten(2).flatten(0, 1))


class PlainMoE(nn.Module):
    """What `ExpertParallelMoE` computes, each expert of all tokens. ``parts``: of how many ranks' tokens each
    counts what an expert takes."""

    def __init__(self, layer: Any, parts: int, dtype: torch.dtype):
        super().__init__()
        self.layer, self.parts = [layer], parts  # not its parameters
        for name in ("router", "gate_up_proj", "down_proj"):
            shape = list(getattr(layer, name).shape)
            if layer.mesh is None and name != "router":
                shape[0] *= layer.ranks
            setattr(self, name, nn.Parameter(torch.empty(shape, dtype=dtype)))
        if layer.bias_rate:
            self.register_buffer("bias", torch.zeros(layer.experts))
        if layer.shared is not None:
            self.shared = PlainMLP(layer.features, 192, layer.activation, False, dtype)

    def forward(self, x: Tensor) -> Tensor:
        (layer,) = self.layer
        logits = x @ self.router.T
        scores = logits.softmax(-1) if layer.scores == "softmax" else logits.sigmoid()
        key = scores + self.bias if layer.bias_rate else scores
        chosen = key.topk(layer.topk).indices
        weights = scores.gather(1, chosen)
        if layer.normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights * layer.scaling
        if layer.capacity is not None:
            chosen = chosen.clone()
            for rows in chosen.split(-(-len(x) // self.parts)):
                most = -(-layer.capacity * -(-len(x) // self.parts) * layer.topk // layer.experts)
                taken = [0] * layer.experts
                for k in range(layer.topk):
                    for i in range(len(rows)):
                        e = int(rows[i, k])
                        taken[e] += 1
                        if taken[e] > most:
                            rows[i, k] = -1
        self.counts = torch.bincount(chosen[chosen >= 0], minlength=layer.experts)
        act = {"silu": nn.functional.silu, "gelu": nn.functional.gelu, "relu": nn.functional.relu}[
            layer.activation
        ]
        y, seen = torch.zeros_like(x), x
        if layer.small:  # what 8 bits leave, and gradients as if they left all
            rows = nn.functional.pad(x, (0, -x.shape[1] % 128)).unflatten(1, (-1, 128)).float()
            scale = rows.abs().amax(-1, keepdim=True) / 448
            rows = ((rows / scale).to(torch.float8_e4m3fn).float() * scale).flatten(1)[:, : x.shape[1]]
            seen = x + (rows - x).detach()
        for e in range(layer.experts):
            gate, up = (seen @ self.gate_up_proj[e].T).chunk(2, -1)
            mine = (weights * (chosen == e)).sum(-1, keepdim=True)
            y = y + mine * ((act(gate) * up) @ self.down_proj[e].T)
        if layer.shared is not None:
            y = y + self.shared(x)
        if layer.wants_aux:
            share = scores / scores.sum(-1, keepdim=True)
            part = torch.bincount(chosen.flatten(), minlength=layer.experts).to(x.dtype) / chosen.numel()
            self.aux_loss = layer.experts * (part * share.mean(0)).sum()
        return y


class PlainLoss(nn.Module):
    """What `LinearCrossEntropy` computes."""

    def __init__(self, features: int, words: int, reduction: str, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(words, features, dtype=dtype))
        self.reduction = reduction

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = (x @ self.weight.T).double().flatten(0, -2)
        return nn.functional.cross_entropy(logits, targets.flatten(), reduction=self.reduction)


def linears(group: Any, dtype: torch.dtype) -> Errors:
    found: Errors = {}
    like: dict[str, Any] = {"group": group, "dtype": dtype}
    n = comm.world_size()
    for rows in (7, 1, 4 * n):
        x, z = normal(rows, 12, seed=1, dtype=dtype), normal(rows, 24, seed=2, dtype=dtype)
        for bias in (True, False):
            col, row = (
                tsnn.ColumnParallelLinear(12, 24, bias, **like),
                tsnn.RowParallelLinear(24, 12, bias, **like),
            )
            name = f"{rows} rows, bias {bias}"
            plain = nn.Linear(12, 24, bias, dtype=dtype)
            errors = compare(col, plain, x, rows=rows, columns=True)
            found |= {f"column {name}: {k}": e for k, e in errors.items()}
            found |= {f"row {name}: {k}": e for k, e in by_rows(row, z, bias, dtype).items()}
    x, z = normal(2 * n, 3, 12, seed=3, dtype=dtype), normal(5, 3, 24, seed=4, dtype=dtype)
    col = tsnn.ColumnParallelLinear(12, 24, **like)
    found |= {
        f"column of 3 axes: {k}": e
        for k, e in compare(col, nn.Linear(12, 24, dtype=dtype), x, columns=True).items()
    }
    like["sequence_parallel"] = False
    col, row = tsnn.ColumnParallelLinear(12, 24, **like), tsnn.RowParallelLinear(24, 12, **like)
    errors = compare(col, nn.Linear(12, 24, dtype=dtype), x, columns=True, split_in=False)
    found |= {f"column, x alike: {k}": e for k, e in errors.items()}
    return found | {f"row, y alike: {k}": e for k, e in by_rows(row, z, True, dtype, split_out=False).items()}


def by_rows(row: nn.Module, z: Tensor, bias: bool, dtype: torch.dtype, split_out: bool = True) -> Errors:
    """A RowParallelLinear, whose x is a rank's columns."""
    plain = nn.Linear(24, 12, bias, dtype=dtype)
    plain.load_state_dict(tsnn.full_state_dict(row))
    whole, part = leaf(z), leaf(z.chunk(comm.world_size(), -1)[comm.rank()])
    want, got = plain(whole), row(part)
    dy = normal(*want.shape, seed=5, dtype=dtype)
    want.backward(dy)
    got.backward(mine(dy) if split_out else dy)
    dx = whole.grad.chunk(comm.world_size(), -1)[comm.rank()]
    return {"y": off(got, mine(want) if split_out else want), "dx": off(part.grad, dx)} | gradients(
        row, plain
    )


def layers(group: Any, dtype: torch.dtype) -> Errors:
    """MLP, norm, embedding and loss."""
    found: Errors = {}
    n = comm.world_size()
    x = normal(9, 12, seed=6, dtype=dtype)
    for split in (True, False):
        like: dict[str, Any] = {"group": group, "dtype": dtype, "sequence_parallel": split}
        more: dict[str, Any] = {"split_in": split, "split_out": split}
        rows = {"rows": 9} if split else {}
        for activation, bias in (("silu", False), ("gelu", True)):
            mlp = tsnn.ParallelMLP(12, 192, activation, bias, keep_gathered=bias, **like)
            errors = compare(mlp, PlainMLP(12, 192, activation, bias, dtype), x, **more, **rows)
            found |= {f"mlp {activation} {split}: {k}": e for k, e in errors.items()}
        norm, plain = tsnn.RMSNorm(12, 1e-5, **like), nn.RMSNorm(12, 1e-5, dtype=dtype)
        nn.init.normal_(
            norm.weight.to_local() if hasattr(norm.weight, "to_local") else norm.weight,
            generator=torch.Generator().manual_seed(3),
        )
        found |= {f"norm {split}: {k}": e for k, e in compare(norm, plain, x, **more).items()}
        for reduction, chunk in (("mean", 4), ("sum", 100), ("mean", 1)):
            targets = torch.arange(9) * 5 % 24
            targets[2] = -100
            loss = tsnn.LinearCrossEntropy(12, 24, reduction=reduction, chunk=chunk, **like)
            more["split_out"] = False
            errors = compare(loss, PlainLoss(12, 24, reduction, dtype), x * 4, targets, **more, **rows)
            found |= {f"loss {reduction} {chunk} {split}: {k}": e for k, e in errors.items()}
        tokens = (torch.arange(4 * n).view(-1, 2) * 7) % 24
        table, plain = tsnn.VocabParallelEmbedding(24, 12, **like), nn.Embedding(24, 12, dtype=dtype)
        plain.load_state_dict(tsnn.full_state_dict(table))
        want, got = plain(tokens), table(tokens)
        dy = normal(*want.shape, seed=8, dtype=dtype)
        want.backward(dy)
        got.backward(mine(dy) if split else dy)
        errors = {"y": off(got, mine(want) if split else want)} | gradients(table, plain)
        found |= {f"embedding {split}: {k}": e for k, e in errors.items()}
    return found


def attentions(group: Any, dtype: torch.dtype) -> Errors:
    found: Errors = {}
    x = normal(10, 12, seed=11, dtype=dtype)
    for split, bias, causal, base in (
        (True, True, True, 100.0),
        (False, False, False, 10000.0),
        (True, False, True, None),
    ):
        layer = tsnn.ParallelAttention(
            12, 48, 24, 4, bias=bias, out_bias=bias, causal=causal, rotary=base, group=group,
            sequence_parallel=split, dtype=dtype,
        )  # fmt: skip
        plain = PlainAttention(12, 48, 24, 4, bias, causal, base, dtype)
        more: dict[str, Any] = {"rows": 10} if split else {}
        errors = compare(layer, plain, x, 2, split_in=split, split_out=split, **more)
        found |= {f"attention {split} {base}: {k}": e for k, e in errors.items()}
    return found


def mixtures(group: Any, dtype: torch.dtype, every: bool) -> Errors:
    """Experts: uneven tokens, all tokens to one expert, experts without any, dropped tokens, biases."""
    found: Errors = {}
    n = comm.world_size()
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "sigmoid": {"scores": "sigmoid", "scaling": 2.5, "shared": 192, "activation": "gelu"},
        "capacity": {"capacity": 1.0, "normalized": False},
        "to one": {"topk": 1, "normalized": False},
        "bias": {"bias_rate": 0.5, "scores": "sigmoid", "aux_loss": True},
        "dropped, uneven": {"capacity": 0.7},
        "fewer tokens than ranks": {},
        "exact, kept": {"exact": True, "keep_rows": True},
        "chunks": {"chunks": 3},
        "chunks, dropped, uneven": {"chunks": 2, "capacity": 0.7, "keep_rows": True},
    }
    if every:
        kinds["exact, computed again"] = {"exact": True, "recompute": True}
        kinds["eight bits"] = {"dispatch_dtype": torch.float8_e4m3fn, "recompute": True}
        kinds["eight bits, kept"] = {"dispatch_dtype": torch.float8_e4m3fn, "exact": True, "keep_rows": True}
        kinds["chunks, computed again"] = {"chunks": 4, "recompute": True}
        kinds["chunks of eight bits"] = {"chunks": 2, "dispatch_dtype": torch.float8_e4m3fn}
        kinds["chunks to one"] = {"chunks": 2, "topk": 1, "normalized": False}
        kinds["fewer tokens than chunks"] = {"chunks": 16}
        kinds["one chunk"] = {"chunks": 1, "recompute": True, "exact": True}
    uneven = {"plain": 9, "dropped, uneven": 4 * n - 1, "fewer tokens than ranks": 1}
    uneven |= {"chunks": 4 * n + 1, "chunks, dropped, uneven": 4 * n - 1, "fewer tokens than chunks": 2 * n}
    for name, more in kinds.items():
        layer = tsnn.ExpertParallelMoE(12, 10, 24, **{"topk": 3, **more}, group=group, dtype=dtype)
        plain = PlainMoE(layer, n, dtype)
        rows = uneven.get(name, 4 * n)
        x = normal(rows, 12, seed=21, dtype=dtype)
        if name.endswith("to one"):
            x = x[:1].repeat(rows, 1) + 0.01 * x
        if name == "bias":
            layer.bias += normal(24, seed=22, dtype=torch.float32) * 0.3
        errors = compare(layer, plain, x, rows=rows)
        found |= {f"experts, {name}: {k}": e for k, e in errors.items()}
        if name == "capacity":
            found["nothing was dropped"] = float(int(plain.counts.sum()) == 3 * rows)
        if name == "bias":
            found |= balanced(layer, plain, x)
    return found


def balanced(layer: Any, plain: Any, x: Tensor) -> Errors:
    """The balance loss, its gradient and the bias's step."""
    found = {"aux loss": off(layer.aux_loss, plain.aux_loss)}
    layer.zero_grad(), plain.zero_grad()
    layer(mine(x), rows=len(x)), plain(x)
    layer.aux_loss.backward(), plain.aux_loss.backward()
    grad = layer.router.grad
    grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    found["aux d router"] = off(grad, plain.router.grad)
    before, counts = layer.bias.clone(), 2 * plain.counts.float()
    layer.update_bias()
    want = before + layer.bias_rate * (counts.mean() - counts).sign()
    return found | {"bias": off(layer.bias, want), "load": float(layer.load.abs().sum())}


def everything(mesh: Any, dtype: torch.dtype = torch.float64) -> Errors:
    """All layers with DTensors, and some with plain parameters."""
    torch.manual_seed(0)
    found = linears(mesh["tp"], dtype) | layers(mesh["tp"], dtype)
    found |= attentions(mesh["tp"], dtype)
    return found | {f"plain parameters: {k}": e for k, e in layers(None, dtype).items()}


def experts(mesh: Any, every: bool) -> Errors:
    """The mixture of experts; ``every``: also those whose kernels take long to compile."""
    torch.manual_seed(0)
    return mixtures(mesh["tp"], torch.float64, every)


def contexts(mesh: Any, dtype: torch.dtype) -> Errors:
    """Sequences that are cut among ranks; 16-bit floats by our kernels, where errors less 2 % are rounding."""
    torch.manual_seed(0)
    found: Errors = {}
    n, rank = comm.world_size(), comm.rank()
    alone = comm.team([rank])
    length = 6 * n
    x, dy = (normal(2, length, 16, seed=s, dtype=dtype) for s in (41, 42))
    for way, layout in (("ring", "contiguous"), ("ulysses", "zigzag"), ("ring", "zigzag")):
        half = 6 if layout == "contiguous" else 3
        chunks = [rank] if layout == "contiguous" else [rank, 2 * n - 1 - rank]
        at = torch.cat([torch.arange(c * half, c * half + half) for c in chunks])
        layer = tsnn.ParallelAttention(
            16, 4, 2, 8, group=alone, dtype=dtype, context=mesh["tp"], context_by=way, layout=layout
        )
        plain = PlainAttention(16, 4, 2, 8, False, True, 10000.0, dtype)
        for p in layer.parameters():
            comm_broadcast(p)
        plain.load_state_dict(tsnn.full_state_dict(layer))
        whole, part = leaf(x), leaf(x[:, at])
        want = plain(whole.flatten(0, 1), 2).view(x.shape)
        want.backward(dy)
        got = layer(part.flatten(0, 1), 2).view(part.shape)
        got.backward(dy[:, at])
        errors = {"y": off(got, want[:, at]), "dx": off(part.grad, whole.grad[:, at])}
        for p in layer.parameters():
            p.grad = tilescale.ops.all_reduce(p.grad)
        errors |= gradients(layer, plain)
        small = 0.0 if dtype == torch.float64 else 0.02
        found |= {f"{dtype} {way} {layout}: {k}": max(0.0, e - small) for k, e in errors.items()}
    return found


def comm_broadcast(p: Tensor) -> None:
    p.data.copy_(tilescale.ops.broadcast(p.data, 0))


# ---- what PyTorch does around layers


class Block(nn.Module):
    """Norm, MLP and loss."""

    def __init__(self, group: Any, dtype: torch.dtype = torch.float64):
        super().__init__()
        like: dict[str, Any] = {"group": group, "dtype": dtype}
        self.norm = tsnn.RMSNorm(12, **like)
        self.mlp = tsnn.ParallelMLP(12, 48, bias=True, **like)
        self.loss = tsnn.LinearCrossEntropy(12, 24, **like)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return self.loss(x + self.mlp(self.norm(x)), targets)


class PlainBlock(nn.Module):
    """The same of one rank."""

    def __init__(self, dtype: torch.dtype = torch.float64):
        super().__init__()
        self.norm = nn.RMSNorm(12, 1e-6, dtype=dtype)
        self.mlp = PlainMLP(12, 48, "silu", True, dtype)
        self.loss = PlainLoss(12, 24, "mean", dtype)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return self.loss(x + self.mlp(self.norm(x)), targets)


ROWS = 12


def batch(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return normal(ROWS, 12, seed=9, dtype=dtype), torch.arange(ROWS) * 7 % 24


def same(block: nn.Module, plain: nn.Module, name: str, call: Callable[..., Tensor] | None = None) -> Errors:
    """Loss and gradients of a `Block` that has a `PlainBlock`'s parameters."""
    x, targets = batch(next(plain.parameters()).dtype)
    plain.zero_grad()
    want = plain(x, targets)
    want.backward()
    block.zero_grad()
    got = (block if call is None else call)(mine(x), targets)
    got.backward()
    return {f"{name}: {k}": e for k, e in ({"loss": off(got, want)} | gradients(block, plain)).items()}


def around(mesh: Any) -> Errors:
    """torch.compile, activation checkpointing, accumulation, unsharded checkpoints, an optimizer."""
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    torch.manual_seed(0)
    plain, block = PlainBlock(), Block(mesh["tp"])
    block.load_state_dict(plain.state_dict())  # an unsharded checkpoint
    found = same(block, plain, "loaded")
    full = tsnn.full_state_dict(block)
    found["names"] = float(list(full.keys() ^ plain.state_dict().keys()) != [])
    found |= {f"full {k}": off(full[k], v) for k, v in plain.state_dict().items()}
    again = Block(mesh["tp"])
    again.load_state_dict(block.state_dict())  # of this many ranks
    found |= same(again, plain, "sharded state")

    found |= same(block, plain, "compiled", torch.compile(block, backend="aot_eager", fullgraph=True))

    found |= same(block, plain, "checkpointed", lambda x, t: checkpoint(block, x, t, use_reentrant=False))
    kept = []

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = op is torch.ops.tilescale.all_gather_gated.default
        kept.append(saved)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    found |= same(
        block, plain, "some checkpointed",
        lambda x, t: checkpoint(
            block, x, t, use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        ),
    )  # fmt: skip
    found["policy saw the product"] = float(not any(kept))

    x, targets = batch()
    block.zero_grad(), plain.zero_grad()
    for part in (slice(0, 6), slice(6, 12)):
        plain(x[part], targets[part]).backward()
        block(mine(x[part]), targets[part]).backward()
    found |= {f"accumulated: {k}": e for k, e in gradients(block, plain).items()}
    found |= in_one_graph(mesh, torch.float64) | in_autocast(mesh) | refused(mesh) | pickled(mesh)
    return found | trained(mesh)


def read_again(module: nn.Module) -> Any:
    """What `torch.save` writes of a whole module, not of its state alone."""
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def pickled(mesh: Any) -> Errors:
    """Layers whose parameters are several of a checkpoint."""
    found, x, like = {}, normal(4, 8, seed=61, dtype=torch.float64), {"dtype": torch.float64}
    for name, group in (("on a mesh", mesh["tp"]), ("plain", None)):
        for layer in (
            tsnn.ParallelMLP(8, 48, group=group, **like),
            tsnn.ParallelAttention(8, 6, 6, 4, group=group, **like),
            tsnn.ExpertParallelMoE(8, 8, 6, 2, shared=48, group=group, **like),
        ):
            again, key = read_again(layer), f"pickled {type(layer).__name__} {name}"
            found[key] = off(again(x), layer(x))
            full = tsnn.full_state_dict(again)
            found |= {f"{key} {k}": off(full[k], v) for k, v in tsnn.full_state_dict(layer).items()}
    return found


def in_autocast(mesh: Any) -> Errors:
    """bfloat16 products of float32 parameters; errors less 2 % are rounding."""
    plain, block = PlainBlock(torch.float32), Block(mesh["tp"], torch.float32)
    block.load_state_dict(plain.state_dict())

    def call(x: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return block(x, targets)

    found = {k: max(0.0, e - 0.02) for k, e in same(block, plain, "autocast", call).items()}
    found["autocast: dtypes"] = float(any(p.grad.dtype != torch.float32 for p in block.parameters()))
    with torch.autocast("cpu", torch.bfloat16):
        found["autocast: product"] = float(block.mlp(mine(batch(torch.float32)[0])).dtype != torch.bfloat16)
    return found


def trained(mesh: Any) -> Errors:
    """Steps of AdamW with clipped gradients."""
    torch.manual_seed(1)
    plain, block = PlainBlock(), Block(mesh["tp"])
    block.load_state_dict(plain.state_dict())
    x, targets = batch()
    norms: list[Tensor] = []
    for model, data in ((plain, x), (block, mine(x))):
        by = torch.optim.AdamW(model.parameters(), 0.01)
        for _ in range(3):
            by.zero_grad()
            model(data, targets).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            norms.append(norm if model is plain else norm.full_tensor())
            by.step()
    full = tsnn.full_state_dict(block)
    found = {f"trained {k}": off(full[k], v) for k, v in plain.state_dict().items()}
    return found | {"norms": off(torch.stack(norms[3:]), torch.stack(norms[:3]))}


def saved(mesh: Any, folder: str) -> Errors:
    """Writes a distributed checkpoint of parameters and AdamW's states, after a step."""
    import torch.distributed.checkpoint as dcp

    torch.manual_seed(2)
    block = Block(mesh["tp"])
    by = torch.optim.AdamW(block.parameters(), 0.01)
    x, targets = batch()
    block(mine(x), targets).backward()
    by.step()
    dcp.save({"model": block.state_dict(), "optimizer": by.state_dict()}, checkpoint_id=folder)
    full = tsnn.full_state_dict(block)
    if comm.rank() == 0:
        torch.save(full, f"{folder}/full.pt")
    return {"saved": 0.0}


def resumed(mesh: Any, folder: str) -> Errors:
    """Loads what as many or other ranks have saved, takes a step, and compares it with the unsharded one."""
    import torch.distributed.checkpoint as dcp

    torch.manual_seed(3)
    block = Block(mesh["tp"])
    by = torch.optim.AdamW(block.parameters(), 0.01)
    x, targets = batch()
    block(mine(x), targets).backward()
    by.step()  # so that it has states
    state = {"model": block.state_dict(), "optimizer": by.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    block.load_state_dict(state["model"])
    by.load_state_dict(state["optimizer"])
    full = torch.load(f"{folder}/full.pt")
    found = {f"read {k}": off(v, full[k]) for k, v in tsnn.full_state_dict(block).items()}
    plain = PlainBlock()
    torch.manual_seed(2)
    plain.load_state_dict(tsnn.full_state_dict(Block(mesh["tp"])))
    over = torch.optim.AdamW(plain.parameters(), 0.01)
    for _ in range(2):
        over.zero_grad()
        plain(x, targets).backward()
        over.step()
    by.zero_grad()
    block(mine(x), targets).backward()
    by.step()
    full = tsnn.full_state_dict(block)
    return found | {f"went on {k}": off(full[k], v) for k, v in plain.state_dict().items()}


def fully_sharded(mesh: Any) -> Errors:
    """FSDP2 along another axis: each pair of ranks has half of the batch."""
    from torch.distributed.fsdp import fully_shard

    both = dist.init_device_mesh("cpu", (2, comm.world_size() // 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(4)
    plain, block = PlainBlock(), Block(both["tp"])
    block.load_state_dict(plain.state_dict())
    for part in (block.mlp, block):
        fully_shard(part, mesh=both["dp"])
    x, targets = batch()
    at, tp = both["dp"].get_local_rank(), both["tp"]
    half = slice(at * 6, at * 6 + 6)
    own = x[half].chunk(tp.size())[tp.get_local_rank()]
    plain(x, targets).backward()
    block(own, targets[half]).backward()
    found: Errors = {}
    full = {k: p.grad.full_tensor() for k, p in block.named_parameters()}
    for k, p in plain.named_parameters():
        if "gate" in k or "up_proj" in k:
            whole = full[k.replace("up_proj", "gate_up_proj").replace("gate_proj", "gate_up_proj")]
            got = whole.unflatten(0, (-1, 2, 8))[:, int("up_proj" in k)].flatten(0, 1)
        else:
            got = full[k]
        found[f"fully sharded d {k}"] = off(got, p.grad)
    full = tsnn.full_state_dict(block)
    found |= {f"fully sharded {k}": off(full[k], v) for k, v in plain.state_dict().items()}
    torch.manual_seed(5)
    other = PlainBlock()
    block.load_state_dict(other.state_dict())
    full = tsnn.full_state_dict(block)
    return found | {f"fully sharded, loaded {k}": off(full[k], v) for k, v in other.state_dict().items()}


class Mixed(nn.Module):
    """Attention and experts."""

    def __init__(self, group: Any, dtype: torch.dtype):
        super().__init__()
        like: dict[str, Any] = {"group": group, "dtype": dtype}
        self.attention = tsnn.ParallelAttention(16, 4, 2, 8, **like)
        self.experts = tsnn.ExpertParallelMoE(16, 24, 4, 2, aux_loss=True, capacity=1.5, **like)

    def forward(self, x: Tensor) -> Tensor:
        y = self.experts(x + self.attention(x))
        return y.float().square().mean() + self.experts.aux_loss.float()


def sixteen(mesh: Any) -> Errors:
    """Layers in bfloat16, by our kernels: errors less 2 % are rounding."""
    torch.manual_seed(7)
    found, kind = {}, torch.bfloat16
    like: dict[str, Any] = {"group": mesh["tp"], "dtype": kind}
    x = normal(12, 16, seed=31, dtype=kind)
    mlp, plain = tsnn.ParallelMLP(16, 48, **like), PlainMLP(16, 48, "silu", False, kind)
    found |= {f"mlp: {k}": e for k, e in compare(mlp, plain, x).items()}
    attention = tsnn.ParallelAttention(16, 4, 2, 8, **like)
    errors = compare(attention, PlainAttention(16, 4, 2, 8, False, True, 10000.0, kind), x, 2)
    found |= {f"attention: {k}": e for k, e in errors.items()}
    experts = tsnn.ExpertParallelMoE(16, 24, 4, 2, group=mesh["tp"], dtype=kind)
    whole = PlainMoE(experts, 2, torch.float32)
    full = {k: v.float() for k, v in tsnn.full_state_dict(experts).items()}
    whole.load_state_dict(full)
    at, part = leaf(x.float()), leaf(mine(x))
    want, got = whole(at), experts(part)
    dy = normal(*want.shape, seed=78, dtype=kind)
    want.backward(dy.float()), got.backward(mine(dy))
    found |= {"experts: y": off(got, mine(want)), "experts: dx": off(part.grad, mine(at.grad))}
    found |= {f"experts: {k}": e for k, e in gradients(experts, whole).items()}
    found = {k: max(0.0, e - 0.02) for k, e in found.items()}
    return found | in_chunks(mesh, kind) | in_one_graph(mesh, kind)


def in_chunks(mesh: Any, dtype: torch.dtype) -> Errors:
    """Experts in chunks have the bits of those in one piece, but for gradients of weights, whose rows are added
    up in another order: less 1 % is rounding. Two backwards accumulate."""
    found: Errors = {}
    x, dy = (mine(normal(30, 16, seed=k, dtype=dtype)) for k in (51, 52))
    for more in ({"recompute": True}, {"capacity": 0.8}):
        of = []
        for chunks in (0, 3):
            torch.manual_seed(3)
            layer = tsnn.ExpertParallelMoE(16, 24, 4, 2, group=mesh["tp"], dtype=dtype, chunks=chunks, **more)
            for _ in range(2):
                part = leaf(x)
                y = layer(part, rows=30)
                y.backward(dy)
            with torch.no_grad():
                plain = layer(x, rows=30)  # whose gate is part of the product
            of.append(
                (chunks, y.detach(), plain, part.grad, layer.router.grad.full_tensor(), *_experts_of(layer))
            )
        for chunks, *got in of[1:]:
            for k, (a, b) in enumerate(zip(got, of[0][1:], strict=True)):
                error = off(a, b)
                found[f"chunks {chunks} {more} {k}"] = max(0.0, error - 0.01) if k > 3 else error
    return found


def _experts_of(layer: Any) -> tuple[Tensor, ...]:
    return tuple(p.grad.to_local() for p in (layer.gate_up_proj, layer.down_proj))


def in_one_graph(mesh: Any, dtype: torch.dtype) -> Errors:
    """Attention and experts as one graph for any number of rows, beside the same layer by layer."""
    model, found = Mixed(mesh["tp"], dtype), {}
    graph = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (12, 24):
        x, grads = mine(normal(rows, 16, seed=31, dtype=dtype)), []
        for call in (model, graph):
            model.zero_grad()
            call(x).backward()
            grads.append([p.grad.full_tensor() for p in model.parameters()])
        for k, (a, b) in enumerate(zip(*grads, strict=True)):
            found[f"compiled for {rows} rows {k}"] = off(b, a)
    return found


def refused(mesh: Any) -> Errors:
    """What is refused says so."""
    tp, n = mesh["tp"], comm.world_size()
    col, norm = tsnn.ColumnParallelLinear(4, n, group=tp), tsnn.RMSNorm(4, group=tp)
    loss, x = tsnn.LinearCrossEntropy(4, n, group=tp), torch.ones(3, 4)
    row, experts = tsnn.RowParallelLinear(n, 4, group=tp), tsnn.ExpertParallelMoE(4, 8, n, 1, group=tp)
    alike = tsnn.ColumnParallelLinear(4, n, group=tp, sequence_parallel=False)
    every = tsnn.LinearCrossEntropy(4, n, group=tp, sequence_parallel=False)
    wide = torch.ones(4, 8 * n)
    told: list[tuple[str, Callable[[], Any]]] = [
        ("multiple of the ranks", lambda: tsnn.ColumnParallelLinear(4, n + 1, group=tp)),
        ("multiple of the ranks", lambda: tsnn.ParallelAttention(8, n + 1, n + 1, 2, group=tp)),
        ("a multiple of 8", lambda: tsnn.ParallelMLP(8, 4 * n, group=tp)),
        ("'silu'", lambda: tsnn.ParallelMLP(8, 8 * n, "tanh", group=tp)),
        (
            "gradients are computed with the loss",
            lambda: tsnn.LinearCrossEntropy(4, n, reduction="none", group=tp),
        ),
        ("1 to all of them", lambda: tsnn.ExpertParallelMoE(4, 8, n, n + 1, group=tp)),
        ("0 to 16", lambda: tsnn.ExpertParallelMoE(4, 8, n, n, chunks=17, group=tp)),
        ("0 to 1", lambda: tsnn.ExpertParallelMoE(4, 8, n, n, chunks=2, exact=True, group=tp)),
        ("(…, rows, 4)", lambda: col(torch.ones(3, 5))),
        ("x (m, features)", lambda: col(torch.ones(3, 2, 4), rows=3)),
        ("x has 3 rows, of rows=7 in all", lambda: alike(x, rows=7)),
        ("LinearCrossEntropy: x has 3 rows, of rows=4 in all", lambda: every.logits(x, rows=4)),
        (
            "ColumnParallelLinear: x has 3 rows, of rows=2 in all",
            lambda: tsnn.ParallelAttention(8 * n, n, group=tp, sequence_parallel=False)(x @ wide, rows=2),
        ),
        ("ColumnParallelLinear: x of torch.float64, weights of torch.float32", lambda: col(x.double())),
        ("RowParallelLinear: x of torch.float16, weights of torch.float32", lambda: row(x[:, :1].half())),
        ("ExpertParallelMoE: x of torch.bfloat16, weights of torch.float32", lambda: experts(x.bfloat16())),
        (f"of rows={3 * n + 9} in all", lambda: experts(x, rows=3 * n + 9)),
        ("(…, 4)", lambda: norm(torch.ones(3, 5))),
        ("one a row", lambda: loss(x, torch.zeros(2, dtype=torch.int64))),
        ("int64", lambda: loss(x, torch.zeros(3 * n))),
        ("one of ('ring', 'ulysses')", lambda: tsnn.ParallelAttention(8, n, context_by="tree", group=tp)),
        ("one axis", lambda: tsnn.RMSNorm(4, group=dist.init_device_mesh("cpu", (1, n)))),
        ("Hugging Face-style", lambda: tsnn.parallelize(nn.Linear(2, 2), tp)),
        ("torch.nn.Module", lambda: tsnn.full_state_dict({})),
    ]
    found: Errors = {}
    for text, call in told:
        try:
            call()
            found[text] = float("inf")
        except (ValueError, TypeError) as e:
            found[text] = float(text not in str(e))
    return found
