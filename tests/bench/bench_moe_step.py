"""A whole layer of experts: route, dispatch, gated first product, second product, combine; beside its parts by
torch and NCCL.

    TILESCALE_TARGET=cuda tilescale launch -n 4 -m tests.bench.bench_moe_step

The layer is captured once in a CUDA graph and first replayed with other tokens and choices, against float64.
Ours and the peers are then timed by the operations' own harness (tilescale/ops/ranks/measure.py). Where ranks
share a GPU there is no NCCL, and nothing but ours to be timed unless there is one rank: ``blocks=32`` bounds
the kernels that wait, which all have to fit on it together. ``check`` alone times nothing. ``fused``: also
layers whose first product, last one or both are in one kernel with the way to them, or back.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import silu

from tests.bench.record import record
from tilescale import comm, ops
from tilescale.ops import host
from tilescale.ops.ranks import dispatch_gemm, gemm_combine, measure
from tilescale.ops.ranks.experts import room
from tilescale.ops.ranks.groups import share
from tilescale.ops.ranks.workspace import release

SHAPES = (
    {"tokens": 4096, "hidden": 7168, "experts": 64, "inner": 2048, "topk": 8},
    {"tokens": 1024, "hidden": 7168, "experts": 64, "inner": 2048, "topk": 8},
    {"tokens": 4096, "hidden": 4096, "experts": 8, "inner": 14336, "topk": 2},
    {"tokens": 128, "hidden": 7168, "experts": 64, "inner": 2048, "topk": 8},
)
#: products that are computed in one kernel with the way to them, or back
WHICH = ("first", "last", "both")
#: of tokens, alike for all: what the check takes
SMALL = {"tokens": 300, "hidden": 264, "experts": 12, "inner": 136, "topk": 3}


def weights_of(shape: dict[str, int], seed: int, device: str = "cuda") -> tuple[torch.Tensor, torch.Tensor]:
    """All experts' weights of both products."""
    E, H, inner = shape["experts"], shape["hidden"], shape["inner"]
    g = torch.Generator(device).manual_seed(seed)
    up = torch.randn(E, H, 2 * inner, generator=g, device=device, dtype=torch.bfloat16) * H**-0.5
    down = torch.randn(E, inner, H, generator=g, device=device, dtype=torch.bfloat16) * inner**-0.5
    return up, down


def tokens_of(shape: dict[str, int], rank: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's tokens and their logits."""
    g = torch.Generator("cuda").manual_seed(1000 * seed + rank)
    x = torch.randn(shape["tokens"], shape["hidden"], generator=g, device="cuda", dtype=torch.bfloat16)
    return x, torch.randn(shape["tokens"], shape["experts"], generator=g, device="cuda")


def in_one_kernel(shape: dict[str, int], local: int, blocks: int | None) -> tuple[Any, Any]:
    """How each product is computed in one kernel with the way to it, and with the way back."""
    _, pairs = room(shape["tokens"], shape["topk"], shape["experts"], comm.world_size())
    units = host.units(torch.device("cuda")) if blocks is None else blocks
    first = dispatch_gemm.choose(pairs, local, 2 * shape["inner"], "silu", units)
    return replace(first, fused=True), replace(
        gemm_combine.choose(pairs, local, shape["hidden"], units), fused=True
    )


def layer(
    x: torch.Tensor, logits: torch.Tensor, up: torch.Tensor, down: torch.Tensor, shape: dict[str, int],
    blocks: int | None, fused: str = "",
) -> torch.Tensor:  # fmt: skip
    """``fused``: "first", "last" or "both" products in one kernel with the way to them, or back."""
    weights, chosen = ops.moe_route(logits, shape["topk"])
    there, back = in_one_kernel(shape, len(up), blocks)
    E = shape["experts"]
    if fused in ("first", "both"):
        hidden, sent = ops.dispatch_grouped_matmul(
            x, up, chosen, weights, num_experts=E, gate="silu", config=there
        )
    else:
        sent = ops.moe_dispatch(x, chosen, weights, num_experts=E, blocks=blocks)
        hidden = ops.grouped_matmul(sent.expanded(), up, sent.sizes, gate="silu")
    if fused in ("last", "both"):
        return ops.grouped_matmul_combine(hidden, down, sent, config=back)
    return ops.moe_combine(ops.grouped_matmul(hidden, down, sent.sizes), sent, blocks=blocks)


def reference(
    x: torch.Tensor, logits: torch.Tensor, up: torch.Tensor, down: torch.Tensor, k: int
) -> torch.Tensor:
    """In float64, without any rounding in between."""
    weights, chosen = logits.double().softmax(-1).topk(k)
    weights = weights / weights.sum(-1, keepdim=True)
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for e in range(len(up)):
        token, which = (chosen == e).nonzero(as_tuple=True)
        gate, value = (x[token].double() @ up[e].double()).chunk(2, 1)
        out[token] += silu(gate) * value @ down[e].double() * weights[token, which, None]
    return out


def check(blocks: int | None, fused: str) -> float:
    """The greatest error of a replayed graph, relative to the greatest number."""
    rank, world, worst = comm.rank(), comm.world_size(), 0.0
    up, down = weights_of(SMALL, 7)
    local = share(SMALL["experts"], world)
    mine = slice(rank * local, rank * local + local)
    x, logits = tokens_of(SMALL, rank, 0)
    first, second = up[mine].contiguous(), down[mine].contiguous()
    layer(x, logits, first, second, SMALL, blocks, fused)
    torch.cuda.synchronize()
    comm.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = layer(x, logits, first, second, SMALL, blocks, fused)
    for seed in range(1, 6):
        others = tokens_of(SMALL, rank, seed)
        x.copy_(others[0])
        logits.copy_(others[1])
        if seed == 4:
            logits[:, -1] = 50  # all tokens to one expert, too
        if seed == 5:
            logits[:, : SMALL["experts"] // 2] = -50  # and some experts without any
        graph.replay()
        want = reference(x, logits, up, down, SMALL["topk"])
        worst = max(worst, float((y.double() - want).abs().max() / want.abs().max()))
        comm.barrier()
    return worst


def by_torch(
    x: torch.Tensor, logits: torch.Tensor, up: torch.Tensor, down: torch.Tensor, shape: dict[str, int]
) -> Callable[[], Any]:
    """One rank: torch's own sort, gathers, grouped products and index_add."""
    E, k = shape["experts"], shape["topk"]
    product: Any = torch._grouped_mm

    def call() -> torch.Tensor:
        weights, chosen = logits.softmax(-1).topk(k)
        weights = weights / weights.sum(-1, keepdim=True)
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        token = order // k
        ends = torch.zeros(E, dtype=torch.int32, device=x.device)
        ends.index_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
        ends = ends.cumsum(0, dtype=torch.int32)
        gate, value = product(x[token], up, offs=ends).chunk(2, 1)
        y = product(silu(gate) * value, down, offs=ends)
        terms = y * weights.flatten()[order][:, None].to(y.dtype)
        return torch.zeros_like(x).index_add_(0, token, terms)

    return call


def by_nccl(
    x: torch.Tensor,
    logits: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    shape: dict[str, int],
    group: Any,
) -> Callable[[], Any]:
    """The same with an all-to-all of packed pairs there and back. Who sends how many is known before, which
    no layer knows: a graph holds it so."""
    E, k, world = shape["experts"], shape["topk"], torch.distributed.get_world_size(group)
    local, product = share(E, world), torch._grouped_mm
    weights, chosen = logits.softmax(-1).topk(k)
    counts = torch.zeros(E, dtype=torch.int64, device=x.device)
    counts.index_add_(0, chosen.flatten(), torch.ones_like(chosen.flatten()))
    counts = torch.nn.functional.pad(counts, (0, local * world - E))
    come = torch.empty_like(counts)
    torch.distributed.all_to_all_single(come, counts, group=group)
    sent = counts.view(world, local).sum(1).tolist()
    got = come.view(world, local).sum(1).tolist()
    expert = torch.arange(local, device=x.device).repeat(world).repeat_interleave(come)

    def call() -> torch.Tensor:
        weights, chosen = logits.softmax(-1).topk(k)
        weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        token = order // k
        there = x.new_empty(sum(got), x.shape[1])
        torch.distributed.all_to_all_single(there, x[token], got, sent, group=group)
        by_expert = expert.argsort(stable=True)
        ends = torch.zeros(local, dtype=torch.int32, device=x.device)
        ends.index_add_(0, expert, torch.ones_like(expert, dtype=torch.int32))
        ends = ends.cumsum(0, dtype=torch.int32)
        gate, value = product(there[by_expert], up, offs=ends).chunk(2, 1)
        y = product(silu(gate) * value, down, offs=ends)
        back, mine = torch.empty_like(y), x.new_empty(len(order), x.shape[1])
        back[by_expert] = y
        torch.distributed.all_to_all_single(mine, back, sent, got, group=group)
        terms = mine * weights.flatten()[order][:, None].to(y.dtype)
        return torch.zeros_like(x).index_add_(0, token, terms)

    return call


def one(shape: dict[str, int], blocks: int | None, nccl: Any, group: Any, fused: bool) -> dict[str, Any]:
    rank, world = comm.rank(), comm.world_size()
    local = share(shape["experts"], world)
    up, down = weights_of({**shape, "experts": local}, 7 + rank)
    drawn = [tokens_of(shape, rank, k) for k in range(2)]
    pairs = shape["tokens"] * shape["topk"]
    rows = torch.randn(pairs, shape["hidden"], device="cuda", dtype=torch.bfloat16)
    even = torch.full((local,), pairs // local, dtype=torch.int32, device="cuda")

    def products() -> Any:
        hidden = ops.grouped_matmul(rows, up, even, gate="silu")
        return ops.grouped_matmul(hidden, down, even)

    variants: dict[str, list[Callable[[], Any]]] = {
        "ours": [lambda d=d: layer(*d, up, down, shape, blocks) for d in drawn],
        "products": [products],
    }
    if fused:
        for which in WHICH:
            variants[f"{which} fused"] = [
                lambda d=d, w=which: layer(*d, up, down, shape, blocks, w) for d in drawn
            ]
    if world == 1:
        variants["torch"] = [by_torch(*d, up, down, shape) for d in drawn]
    if nccl is not None:
        variants["torch"] = [by_nccl(*d, up, down, shape, nccl) for d in drawn]
    times = measure.measure(variants, "cuda", 15, group)
    found = {name: measure.spread(taken)["median"] for name, taken in times.items()}
    if rank == 0:
        ratio = f"  {found['torch'] / found['ours']:.3f} × torch" if "torch" in found else ""
        print(shape, {k: round(v, 1) for k, v in found.items()}, ratio, flush=True)
    release()
    return {"shape": shape, "blocks": blocks, "ranks": world, "us": found}


def main() -> int:
    words = dict(w.split("=") for w in sys.argv[1:] if "=" in w)
    comm.init()
    torch.distributed.init_process_group("gloo", rank=comm.rank(), world_size=comm.world_size())
    group, alone = torch.distributed.group.WORLD, torch.cuda.device_count() >= comm.world_size() > 1
    nccl = torch.distributed.new_group(backend="nccl") if alone else None
    blocks = int(words["blocks"]) if "blocks" in words else None
    fused = "fused" in sys.argv
    worst = max(check(blocks, which) for which in ("", *(WHICH if fused else ())))
    print(f"rank {comm.rank()}: replayed with other choices, the greatest error is {worst:.2e}", flush=True)
    if not worst < 2e-2:
        return 1
    if "check" not in sys.argv:
        lines = [one(s, blocks, nccl, group, fused) for s in SHAPES]
        if comm.rank() == 0:
            record(f"moe_step_{comm.world_size()}", {"cases": lines})
    comm.barrier()
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
