"""What tests of tilescale.nn run on each rank beside nn_checks: gradients by differences, and the edges of
what layers take."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tilescale.ops
from tests.ranks.nn_checks import (
    Block,
    Errors,
    PlainAttention,
    PlainBlock,
    PlainMLP,
    batch,
    gradients,
    leaf,
    mine,
    normal,
    off,
    on_mesh,
)  # fmt: skip
from tilescale import comm
from tilescale import nn as tsnn
from tilescale.nn.parameters import local

# ---- gradients by differences


def part(layer: Any, name: str, whole: Tensor) -> Tensor:
    """This rank's part of a whole parameter, whose gradient is whole again on all ranks."""
    axis = layer.axes[name]
    if axis is None:
        return whole
    return torch.ops.tilescale.kept(whole.movedim(axis, 0), layer.group_name).movedim(0, axis)


def by_differences(
    layer: Any, x: Tensor | None, *rest: Any, gather: int | None, cut: bool, fast: bool
) -> float:
    """`torch.autograd.gradcheck` of a layer as a function of whole x and whole parameters, which are alike on
    all ranks, so that all of them vary the same number at once. ``gather``: the axis along which a rank's
    result is a part; None: all have all of it. ``cut``: a rank takes its rows of x alone."""
    owners, whole = {}, []
    for name, param in layer.named_parameters():
        at, _, own = name.rpartition(".")
        owners[name], shape = (layer.get_submodule(at), own), list(param.shape)
        if (axis := owners[name][0].axes[own]) is not None:
            shape[axis] *= layer.ranks
        whole.append(normal(*shape, seed=len(whole), dtype=torch.float64).mul_(0.5).requires_grad_())
    group = layer.group_name

    def call(*args: Tensor) -> Any:
        parts = {n: part(*owner, w) for (n, owner), w in zip(owners.items(), args, strict=False)}
        own = [torch.ops.tilescale.kept(a, group) if cut else a for a in args[len(parts) :]]
        y = torch.func.functional_call(layer, parts, (*own, *rest))
        if gather is None:
            return y
        y = y.movedim(gather, 0)
        rows = int(tilescale.ops.all_reduce(torch.tensor([y.shape[0]], dtype=torch.float64)))
        y = torch.ops.tilescale.regathered(y, rows, group).movedim(0, gather)
        return y if getattr(layer, "aux_loss", None) is None else (y, layer.aux_loss)

    torch.manual_seed(0)  # fast: a direction that is alike on all ranks
    given = [] if x is None else [leaf(x)]
    torch.autograd.gradcheck(call, (*whole, *given), fast_mode=fast)
    return 0.0  # it raises where they differ


def differences(fast: bool, every: bool) -> Errors:
    """Layers with uneven rows; ``every``: also those whose kernels take long to compile."""
    n = comm.world_size()
    rows, like = n + 1, {"dtype": torch.float64}
    x = normal(rows, 5, seed=1, dtype=torch.float64)
    targets = torch.arange(rows) % (2 * n)
    targets[1] = -100
    split: Callable[..., Any] = tsnn.ColumnParallelLinear
    of: dict[str, tuple[Any, ...]] = {
        "column": (split(5, 2 * n, **like), x, rows, 1),
        "column, kept": (split(5, 2 * n, keep_gathered=True, **like), x, rows, 1),
        "column, x alike": (split(5, 2 * n, sequence_parallel=False, **like), x, 1),
        "norm": (tsnn.RMSNorm(5, **like), x, 0),
        "mlp": (tsnn.ParallelMLP(5, 8 * n, bias=True, **like), x, rows, 0),
        "mlp, x alike": (tsnn.ParallelMLP(5, 8 * n, bias=True, sequence_parallel=False, **like), x, None),
        "attention": (tsnn.ParallelAttention(5, 2 * n, n, 2, bias=True, out_bias=True, **like), x, 1, rows, 0),
        "attention, one key head": (
            tsnn.ParallelAttention(5, n, 1, 2 * n, bias=True, **like), x, 1, rows, 0
        ),
        "loss": (tsnn.LinearCrossEntropy(5, 2 * n, chunk=n, **like), x, targets, rows, None),
        "embedding": (tsnn.VocabParallelEmbedding(2 * n, 3, **like), None, targets.clamp(0), 0),
        "experts": (tsnn.ExpertParallelMoE(5, 4, 3 * n, 2, scores="sigmoid", shared=8 * n, **like), x, rows, 0),
        "experts, dropped": (
            tsnn.ExpertParallelMoE(5, 4, 2 * n, 2, capacity=0.5, aux_loss=True, **like), x, rows, 0
        ),
    }  # fmt: skip
    return {
        f"gradcheck, {name}": by_differences(layer, *given, gather=gather, cut="alike" not in name, fast=fast)
        for name, (layer, *given, gather) in of.items()
        if every or not name.startswith(("attention", "experts"))
    }


# ---- edges


def edges(mesh: Any) -> Errors:
    """Numbers that are no words, rows that are ignored, no rows, layers without memory at first."""
    torch.manual_seed(0)
    n, tp = comm.world_size(), mesh["tp"]
    like: dict[str, Any] = {"group": tp, "dtype": torch.float64}
    loss, table = tsnn.LinearCrossEntropy(4, 2 * n, **like), tsnn.VocabParallelEmbedding(2 * n, 4, **like)
    x = leaf(normal(2, 4, seed=1, dtype=torch.float64))
    found: Errors = {}
    for name, call in {
        "target": lambda: loss(x, torch.full((2 * n,), 2 * n)),
        "token": lambda: table(torch.full((2 * n,), -1)),
    }.items():
        try:
            call()
            found[name] = float("inf")
        except ValueError as e:
            found[name] = float(f"a {name} is" not in str(e))
    loss(x, torch.full((2 * n,), -100)).backward()
    found["ignored"] = off(x.grad, torch.zeros_like(x))
    attention = tsnn.ParallelAttention(4, 2 * n, n, 2, **like)
    found["no rows"] = float(attention(x[:0]).shape != (0, 4))
    for kind, extents in (
        (tsnn.ExpertParallelMoE, (4, 8, n, 1)),
        (tsnn.ParallelMLP, (4, 8 * n)),
    ):  # fully_shard warns of views
        found[f"a view of {kind.__name__}"] = float(kind(*extents, **like)(x)._is_view())
    experts = tsnn.ExpertParallelMoE(4, 8, n, 1, aux_loss=True, **like)
    (experts(x[:0]).sum() + experts.aux_loss).backward()
    found["no rows, balance loss"] = float(experts.router.grad.full_tensor().abs().sum() + experts.aux_loss)
    with torch.device("meta"):
        layer = tsnn.ExpertParallelMoE(4, 8, n, 1, bias_rate=0.1, **like)
    layer.to_empty(device="cpu")
    layer.bias.fill_(torch.nan), layer.load.fill_(torch.nan)
    layer.reset_parameters()
    found["buffers"] = float((layer.bias.abs() + layer.load.abs()).sum())
    return found | scaled_halves(mesh) | packed(mesh, torch.float64) | other_extents(tp) | assigned(tp)


def assigned(tp: Any) -> Errors:
    """Layers on meta take a checkpoint's tensors as parameters, and keep this rank's part of their memory."""
    n, found = comm.world_size(), {}
    plain, x = PlainMLP(4, 8 * n, "silu", True, torch.float64), normal(2 * n, 4, seed=1, dtype=torch.float64)
    for name, group in (("on a mesh", tp), ("plain", tp.get_group())):
        with torch.device("meta"):
            mlp = tsnn.ParallelMLP(4, 8 * n, bias=True, group=group, dtype=torch.float64)
        mlp.load_state_dict(plain.state_dict(), assign=True)
        found[f"assigned {name}"] = off(mlp(mine(x)), mine(plain(x)))
        for kind, param in mlp.named_parameters():
            own = local(param)
            found[f"memory of {name} {kind}"] = float(own.untyped_storage().nbytes() - own.nbytes)
    return found


def other_extents(tp: Any) -> Errors:
    """Tensors of a state dict that are neither a parameter nor this rank's share of it."""
    n, rank, found = comm.world_size(), comm.rank(), {}
    own = f"rank {rank} of {n} has"
    for group, also in ((tp, ""), (None, ", which does as well")):
        mlp, col = tsnn.ParallelMLP(4, 8 * n, group=group), tsnn.ColumnParallelLinear(4, 2 * n, group=group)
        wrong = {
            "gate_proj.weight": (8 * n - 8, 4),
            "up_proj.weight": (8 * n, 4),
            "down_proj.weight": (5, 8 * n),
        }
        told = {
            f"gate_proj.weight is ({8 * n - 8}, 4)": f"({8 * n}, 4), all ranks' together; it is a part of "
            f"gate_up_proj.weight ({16 * n}, 4), of which {own} (16, 4)",
            f"down_proj.weight is (5, {8 * n})": f"(4, {8 * n}), all ranks' together; {own} (4, 8){also}",
        }
        found |= told_of_extents(mlp, {k: torch.zeros(v) for k, v in wrong.items()}, told)
        state = {"weight": torch.zeros(2 * n, 4), "bias": torch.zeros(2 * n + 1)}
        told = {f"bias is ({2 * n + 1},)": f"({2 * n},), all ranks' together; {own} (2,){also}"}
        found |= told_of_extents(col, state, told)
    return found


def told_of_extents(layer: nn.Module, state: dict[str, Tensor], told: dict[str, str]) -> Errors:
    """What torch says of it is ours alone."""
    try:
        layer.load_state_dict(state)
    except RuntimeError as e:
        text = str(e)
        missed = [f"{k} in the state dict\n  expected: {v}" for k, v in told.items()]
        missed = [m for m in missed if m not in text]
        return {text: float(bool(missed) or "mismatch" in text or "Missing" in text)}
    return {f"{layer} takes {state.keys()}": float("inf")}


def packed(mesh: Any, dtype: torch.dtype) -> Errors:
    """Sequences of different lengths, one of them empty, beside each by itself."""
    torch.manual_seed(0)
    n, ends = comm.world_size(), (0, 3, 3, 10, 11)
    starts, x = torch.tensor(ends, dtype=torch.int32), normal(11, 16, seed=41, dtype=dtype)
    dy, found = normal(11, 16, seed=42, dtype=dtype), {}
    for causal in (True, False):
        how = {"group": mesh["tp"], "causal": causal, "dtype": dtype}
        layer = tsnn.ParallelAttention(16, 4 * n, 2 * n, 8, **how)
        plain = PlainAttention(16, 4 * n, 2 * n, 8, False, causal, 10000.0, dtype)
        plain.load_state_dict(tsnn.full_state_dict(layer))
        whole, own = leaf(x), leaf(mine(x))
        pieces = [whole[a:b] for a, b in itertools.pairwise(ends) if b > a]
        want, got = torch.cat([plain(p, 1) for p in pieces]), layer(own, rows=11, starts=starts, longest=8)
        want.backward(dy), got.backward(mine(dy))
        errors = {"y": off(got, mine(want)), "dx": off(own.grad, mine(whole.grad))}
        errors |= gradients(layer, plain)
        found |= {f"packed {causal} {k}": e for k, e in errors.items()}
    for text, more in {
        "from 0 to 11": {"starts": starts + 1},
        "the longest of them": {"starts": starts, "longest": 6},
        "of int32": {"starts": starts.long()},
        "one of the three": {"starts": starts, "batch": 11},
    }.items():
        try:
            layer(mine(x), rows=11, **more)
            found[text] = float("inf")
        except (TypeError, ValueError) as e:
            found[text] = float(text not in str(e))
    return found


def sixteen(mesh: Any) -> Errors:
    """Packed sequences by our kernels, where errors less 2 % are rounding, also as one graph."""
    found = {k: max(0.0, e - 0.02) for k, e in packed(mesh, torch.bfloat16).items()}
    layer = tsnn.ParallelAttention(16, 4, 2, 8, group=mesh["tp"], dtype=torch.bfloat16)
    starts, x = (
        torch.tensor([0, 5, 12], dtype=torch.int32),
        mine(normal(12, 16, seed=1, dtype=torch.bfloat16)),
    )
    grads = []
    for call in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        layer.zero_grad()
        call(x, starts=starts, longest=7).sum().backward()
        grads.append(layer.qkv_proj.weight.grad.full_tensor())
    return found | {"packed graph": off(grads[1], grads[0])} | as_one_graph(mesh)


def as_one_graph(mesh: Any) -> Errors:
    """Experts whose memory follows from what came."""
    like: dict[str, Any] = {"group": mesh["tp"], "dtype": torch.float64, "exact": True}
    x, found = mine(normal(12, 16, seed=3, dtype=torch.float64)), {}
    for more in ({}, {"recompute": True}, {"keep_rows": True, "dispatch_dtype": torch.float8_e4m3fn}):
        layer, grads = tsnn.ExpertParallelMoE(16, 24, 4, 2, **like, **more), []
        for call in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
            layer.zero_grad()
            call(x).square().sum().backward()
            grads.append(torch.cat([p.grad.to_local().flatten() for p in layer.parameters()]))
        found[f"graph of experts {more}"] = off(grads[1], grads[0])
    return found


def scaled_halves(mesh: Any) -> Errors:
    """float16's gradients under a scaler's factor: a word is one of many, so that they are small."""
    rows, words = 256, 40 * comm.world_size()
    layer = tsnn.LinearCrossEntropy(16, words, group=mesh["tp"], dtype=torch.float16, chunk=rows)
    x, targets = normal(rows, 16, seed=3, dtype=torch.float16) * 0.3, torch.arange(rows) * 7 % words
    own, whole = leaf(mine(x)), leaf(x.double())
    weight = leaf(tsnn.full_state_dict(layer)["weight"].double())
    (layer(own, targets) * 2.0**16).backward()
    (nn.functional.cross_entropy(whole @ weight.T, targets) * 2.0**16).backward()
    got = layer.weight.grad.full_tensor()
    errors = {"dx": off(own.grad, mine(whole.grad)), "dw": off(got, weight.grad)}
    return {f"scaled {k}": max(0.0, e - 0.002) for k, e in errors.items()}


def all_edges(address: int) -> Errors:
    """In one job: edges, differences, and layers behind a process group that is no more."""
    found = on_mesh(address, edges) | differences(fast=True, every=False)
    torch.manual_seed(9)
    plain, block = PlainBlock(), Block(None)
    block.load_state_dict(plain.state_dict())
    x, targets = batch()
    for name in ("behind a group", "behind a job"):
        found[name] = off(block(mine(x), targets), plain(x, targets))
        comm.finalize()
        comm.init()
    return found


def plain_parameters_fully_sharded(mesh: Any) -> Errors:
    """FSDP2 along an axis, around layers whose parameters are plain parts: checkpoints of the whole."""
    from torch.distributed.fsdp import fully_shard

    both = dist.init_device_mesh("cpu", (2, comm.world_size() // 2), mesh_dim_names=("dp", "tp"))
    block, found = Block(both["tp"].get_group()), {}
    fully_shard(block, mesh=both["dp"])
    for seed in (4, 5):
        torch.manual_seed(seed)
        plain = PlainBlock()
        block.load_state_dict(plain.state_dict())
        full = tsnn.full_state_dict(block)
        found |= {f"plain parts {seed} {k}": off(full.get(k), v) for k, v in plain.state_dict().items()}
    return found


def drawn_behind_fully_shard(mesh: Any) -> Errors:
    """Layers on meta get memory behind FSDP2, and their numbers then: those of layers that had them at once."""
    from torch.distributed.fsdp import fully_shard

    both = dist.init_device_mesh("cpu", (2, comm.world_size() // 2), mesh_dim_names=("dp", "tp"))
    found: Errors = {}
    for name, group in (("on a mesh", both["tp"]), ("plain", both["tp"].get_group())):
        torch.manual_seed(6)
        want = tsnn.full_state_dict(Block(group))
        with torch.device("meta"):
            block = Block(group)
        fully_shard(block, mesh=both["dp"]).to_empty(device="cpu")
        torch.manual_seed(6)
        for module in block.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        full = tsnn.full_state_dict(block)
        found |= {f"drawn {name} {k}": off(full[k], v) for k, v in want.items()}
    return found
