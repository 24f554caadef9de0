"""Layers of tilescale.nn in bfloat16, forward and backward, beside unsharded ones in float64 that have the same
parameters, and unsharded ones in bfloat16, which say how far a layer may be off. Then steps of a block in a CUDA
graph, and compiled by torch.compile in one graph, beside its plain steps.

    TILESCALE_TARGET=cuda tilescale launch -n 2 -m tests.gpu.layers
    TILESCALE_TARGET=cpu tilescale launch -n 2 -m tests.gpu.layers      # small, without graphs

A line for each case: PASS or FAIL.
"""

from __future__ import annotations

import copy
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.ranks.nn_checks import PlainAttention, PlainLoss, PlainMLP, PlainMoE, gradients, leaf, mine, off
from tilescale import comm
from tilescale import nn as tsnn

BF = torch.bfloat16
#: how far a layer may be off, as a share of what the unsharded one is in bfloat16: the root of the mean square of
#: errors, and the greatest. Parts of sums are rounded where they cross ranks, once more than an unsharded layer's:
#: √3 of what is rounded once there (a bias' gradient).
MEAN, GREATEST = 2.0, 2.0
#: what an error may be whatever the unsharded one's is, as a share of the mean and of the greatest number
LEAST = (2.0**-9, 3 * 2.0**-9)
#: what of an error is the order of sums: between two ways to compute one step in bfloat16
ROUNDED = 0.02


def drawn(*shape: int, seed: int) -> Tensor:
    device = torch.get_default_device()
    return torch.randn(shape, generator=torch.Generator(device).manual_seed(seed)).to(BF)


def apart_by(got: Any, want: Tensor) -> tuple[float, float]:
    """The root of the mean square of the errors, relative to that of the numbers, and the greatest (`off`)."""
    greatest = off(got, want)
    if not want.numel() or greatest == float("inf"):
        return greatest, greatest
    far = (got.detach().double() - want.detach().double()).square().mean().sqrt()
    return float(far / want.detach().double().square().mean().sqrt().clamp(min=1e-30)), greatest


def worst(layer: Any, plain: Any, x: Tensor, *rest: Any, parts: Callable[[Tensor], Tensor] = mine,
          whole_x: bool = False, whole_y: bool = False, alone: bool = True, **more: Any) -> tuple[float, str]:  # fmt: skip
    """The greatest error, as a share of what it may be, and whose it is. ``alone``: the unsharded layer in
    bfloat16 says what it may be; without, ``ROUNDED`` of the greatest number, and of all."""
    plain.load_state_dict(tsnn.full_state_dict(layer))
    exact, found = copy.deepcopy(plain).double(), {}
    dy = None
    for name, module, dtype in (("exact", exact, torch.float64), ("plain", plain, BF)):
        given = leaf(x.to(dtype)) if x.is_floating_point() else x
        y = module(given, *rest)
        if dy is None:
            dy = drawn(*y.shape, seed=77) if y.dim() else torch.ones(())
        y.backward(dy.to(y.dtype))
        grads = {f"d {k}": p.grad for k, p in module.named_parameters()}
        found[name] = {"y": y.detach(), **({"dx": given.grad} if given.grad is not None else {}), **grads}
        if name == "exact" and not alone:
            break
    assert dy is not None
    part = x if whole_x or not x.is_floating_point() else parts(x)
    part = leaf(part) if x.is_floating_point() else part
    layer.zero_grad()
    got = layer(part, *rest, **more)
    cut = (lambda t: t) if whole_y or not got.dim() else parts
    got.backward(cut(dy).to(got.dtype))
    errors = {"y": apart_by(got, cut(found["exact"]["y"]))}
    if part.grad is not None:
        errors["dx"] = apart_by(part.grad, found["exact"]["dx"] if whole_x else parts(found["exact"]["dx"]))
    errors |= gradients(layer, exact, apart_by)
    rows = {"y": cut, "dx": (lambda t: t) if whole_x else parts}  # relative to what is there
    same = {k: rows.get(k, lambda t: t) for k in errors}

    def allowed(k: str) -> tuple[float, ...]:
        if not alone:
            return ROUNDED, ROUNDED
        plain = apart_by(same[k](found["plain"][k]), same[k](found["exact"][k]))
        return tuple(max(w * p, at) for w, p, at in zip((MEAN, GREATEST), plain, LEAST, strict=True))

    return max(
        (error / may, f"{k}, {what}")
        for k, both in errors.items()
        for error, may, what in zip(both, allowed(k), ("the mean", "the greatest"), strict=True)
    )


def layers(mesh: Any, scale: int) -> Iterator[tuple[str, Callable[[], tuple[float, str]]]]:
    """Every layer, of rows that do not divide and of rows that do."""
    n = comm.world_size()
    F, H = 32 * scale, 96 * scale
    for rows in ((24 * n - 5) * scale + 1, 32 * n * scale):
        x = drawn(rows, F, seed=1)
        for group in (mesh, None):
            for alike in (False, True):
                like: dict[str, Any] = {"group": group, "dtype": BF, "sequence_parallel": not alike}
                how = {"whole_x": alike, "whole_y": alike, **({} if alike else {"rows": rows})}
                told = f"{rows} rows{', x alike' if alike else ''}{', mesh' if group else ''}"

                def mlp(like: Any = like, how: Any = how, x: Tensor = x) -> tuple[float, str]:
                    return worst(
                        tsnn.ParallelMLP(F, H, bias=True, **like), PlainMLP(F, H, "silu", True, BF), x, **how
                    )

                def norm(like: Any = like, how: Any = how, x: Tensor = x) -> tuple[float, str]:
                    more = {k: v for k, v in how.items() if k != "rows"}
                    return worst(tsnn.RMSNorm(F, 1e-5, **like), nn.RMSNorm(F, 1e-5, dtype=BF), x, **more)

                def loss(like: Any = like, how: Any = how, x: Tensor = x) -> tuple[float, str]:
                    words = 48 * n * scale
                    targets = torch.arange(len(x)) * 5 % words
                    targets[1] = -100
                    more = how | {"whole_y": True}
                    layer = tsnn.LinearCrossEntropy(F, words, chunk=len(x) // 3, **like)
                    return worst(layer, PlainLoss(F, words, "mean", BF), x, targets, **more)

                yield f"mlp, {told}", mlp
                yield f"norm, {told}", norm
                yield f"loss, {told}", loss
                for kv in (2 * n, 1):

                    def attention(like: Any = like, how: Any = how, kv: int = kv) -> tuple[float, str]:
                        even = drawn(len(x) // 2 * 2, F, seed=2)
                        layer = tsnn.ParallelAttention(F, 4 * n, kv, 64, bias=True, out_bias=True, **like)
                        plain = PlainAttention(F, 4 * n, kv, 64, True, True, 10000.0, BF)
                        more = how | ({"rows": len(even)} if "rows" in how else {})
                        return worst(layer, plain, even, 2, **more)

                    if kv == 1 or not alike:
                        yield f"attention, {kv} key heads, {told}", attention
        for kind in ({}, {"shared": H, "scores": "sigmoid"}, {"topk": 1, "normalized": False}):

            def experts(kind: Any = kind, x: Tensor = x, rows: int = rows) -> tuple[float, str]:
                layer: Any = tsnn.ExpertParallelMoE(
                    F, H // 2, 4 * n, **{"topk": 3, **kind}, group=mesh, dtype=BF
                )
                plain = PlainMoE(layer, n, BF)
                if "shared" in kind:
                    plain.shared = PlainMLP(F, H, layer.activation, False, BF)
                return worst(layer, plain, x, alone=False, rows=rows)

            yield f"experts {kind}, {rows} rows", experts


def contexts(mesh: Any, scale: int) -> Iterator[tuple[str, Callable[[], tuple[float, str]]]]:
    """Attention of sequences that are cut among ranks."""
    n, rank = comm.world_size(), comm.rank()
    half, F = 16 * scale, 32 * scale
    for way, layout in (("ring", "contiguous"), ("ring", "zigzag"), ("ulysses", "contiguous")):

        def attention(way: str = way, layout: str = layout) -> tuple[float, str]:
            chunks = [2 * rank, 2 * rank + 1] if layout == "contiguous" else [rank, 2 * n - 1 - rank]
            at = torch.cat([torch.arange(c * half, c * half + half) for c in chunks])
            at = torch.cat([at, at + 2 * n * half])  # of two sequences
            how: dict[str, Any] = {"context": mesh, "context_by": way, "layout": layout, "dtype": BF}
            layer = tsnn.ParallelAttention(F, 4 * n, 2 * n, 64, group=comm.team([rank]), **how)
            for p in layer.parameters():  # each rank has all, and gradients of its tokens
                dist.broadcast(p.data, 0)
                p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
            plain = PlainAttention(F, 4 * n, 2 * n, 64, False, True, 10000.0, BF)
            x = drawn(4 * n * half, F, seed=5)
            return worst(layer, plain, x, 2, parts=lambda t: t[at])

        yield f"attention by {way}, {layout}", attention


class Block(nn.Module):
    """Norm, attention, norm, MLP, experts, norm and loss."""

    def __init__(self, F: int, H: int, words: int, n: int, how: dict[str, Any]):
        super().__init__()
        self.first, self.second, self.last = (tsnn.RMSNorm(F, **how) for _ in range(3))
        self.attention = tsnn.ParallelAttention(F, 4 * n, 2 * n, 64, **how)
        self.mlp = tsnn.ParallelMLP(F, H, **how)
        self.experts = tsnn.ExpertParallelMoE(F, F, 4 * n, 2, **how)
        self.loss = tsnn.LinearCrossEntropy(F, words, **how)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        x = x + self.mlp(self.second(x))
        return self.loss(self.last(x + self.experts(x)), targets)


def step(call: Callable[..., Tensor], block: nn.Module, x: Tensor, targets: Tensor) -> list[Tensor]:
    """The loss, then gradients of x and of the parameters."""
    x = x.detach().requires_grad_()
    y = call(x, targets)
    return [y.detach(), *torch.autograd.grad(y, (x, *block.parameters()))]


def apart(got: list[Tensor], want: list[Tensor]) -> tuple[float, str]:
    parts = lambda t: t.to_local() if hasattr(t, "to_local") else t  # noqa: E731
    errors = [off(parts(a), parts(b)) / ROUNDED for a, b in zip(got, want, strict=True)]
    return max(errors), str(errors.index(max(errors)))


def steps(mesh: Any, scale: int) -> Iterator[tuple[str, Callable[[], tuple[float, str]]]]:
    n = comm.world_size()
    F, rows, words = 32 * scale, 16 * n * scale, 48 * n * scale

    def block() -> Block:
        torch.manual_seed(7)
        return Block(F, 3 * F, words, n, {"group": mesh, "dtype": BF})

    def batch(seed: int) -> tuple[Tensor, Tensor]:
        device = torch.get_default_device()
        draw = torch.Generator(device).manual_seed(seed)
        return mine(drawn(rows, F, seed=seed)), torch.randint(0, words, (rows,), generator=draw)

    def in_graph() -> tuple[float, str]:
        made = block()
        x, targets = batch(1)
        x = x.requires_grad_()
        given, beside = (x, *made.parameters()), torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(2):
                torch.autograd.grad(made(x, targets), given)
        torch.cuda.current_stream().wait_stream(beside)
        torch.cuda.synchronize()
        comm.barrier()
        graph, found = torch.cuda.CUDAGraph(), (0.0, "")
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            y = made(x, targets)
            grads = torch.autograd.grad(y, given)
        for seed in range(2, 6):
            other, others = batch(seed)
            with torch.no_grad():
                x.copy_(other), targets.copy_(others)
            graph.replay()
            got = [t.clone() for t in (y.detach(), *grads)]
            found = max(found, apart(got, step(made, made, other, others)))
        comm.barrier()
        return found

    def compiled() -> tuple[float, str]:
        made, found = block(), (0.0, "")
        call = torch.compile(made, fullgraph=True)
        for seed in (1, 2):
            given = batch(seed)
            found = max(found, apart(step(call, made, *given), step(made, made, *given)))
        return found

    if torch.get_default_device().type == "cuda":
        yield "steps in a CUDA graph", in_graph
        yield "steps compiled in one graph", compiled


def main() -> int:
    comm.init()
    rank, world = comm.rank(), comm.world_size()
    on_gpu = comm.empty(1).device.type == "cuda"
    torch.set_default_device("cuda" if on_gpu else "cpu")
    alone = on_gpu and torch.cuda.device_count() >= world  # NCCL's ranks do not share a GPU
    dist.init_process_group("nccl" if alone else "gloo", rank=rank, world_size=world)
    mesh = dist.init_device_mesh("cuda" if on_gpu else "cpu", (world,), mesh_dim_names=("tp",))["tp"]
    scale, bad, wanted = 16 if on_gpu else 2, 0, sys.argv[1:]
    for family in (layers, contexts, steps):
        for name, case in family(mesh, scale):
            if wanted and not any(w in name for w in wanted):
                continue
            torch.manual_seed(3)
            try:
                share, whose = case()
                told, right = f"{share:.3f} of what it may be off, at {whose}", share <= 1
            except Exception:  # noqa: BLE001  # the next case goes on, where all ranks fail alike
                told, right = traceback.format_exc(limit=-4), False
            bad += not right
            if rank == 0 or not right:
                print(f"{'PASS' if right else 'FAIL'} rank {rank}: {name}: {told}", flush=True)
    comm.barrier()
    dist.destroy_process_group()
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
