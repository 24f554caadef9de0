"""What a rank has in memory while layers are trained, made and dropped."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.ranks.nn_checks import Block, Mixed, batch, mine, normal, on_mesh
from tilescale import comm
from tilescale import nn as tsnn

#: what is counted → by how much it may grow. Memory grows a little by itself: pages of the allocator
SLACK = {"MB": 3.0, "tensors": 0, "objects": 150, "files": 0, "threads": 0, "mappings": 8}


def megabytes() -> float:
    """Memory that this process has written, its own and what it shares. Pages of files are left out: the system maps
    and drops those of a library as it likes, 40 MB at once."""
    rows = dict(row.split(":") for row in Path("/proc/self/status").read_text().splitlines())
    return sum(int(rows[name].split()[0]) for name in ("RssAnon", "RssShmem")) / 1024


def counted() -> dict[str, float]:
    """Of this process."""
    gc.collect()
    objects = gc.get_objects()
    return {
        "MB": megabytes(),
        "tensors": sum(issubclass(type(o), Tensor) for o in objects),
        "objects": len(objects),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "mappings": Path("/proc/self/maps").read_text().count("\n"),
    }


def grown(before: dict[str, float], after: dict[str, float]) -> dict[str, tuple[float, float]]:
    """What has grown by more than it may."""
    return {k: (before[k], after[k]) for k in SLACK if after[k] > before[k] + SLACK[k]}


def steps(mesh: dist.DeviceMesh, counts: tuple[int, ...]) -> list[dict[str, float]]:
    """Steps of AdamW of a block, attention and experts; what is there after so many of them in all."""
    block, mixed = Block(mesh["tp"]), Mixed(mesh["tp"], torch.float64)
    by = torch.optim.AdamW([*block.parameters(), *mixed.parameters()], 0.001)
    (x, targets), z, found = batch(), normal(12, 16, seed=31, dtype=torch.float64), []
    for step in range(1, counts[-1] + 1):
        by.zero_grad()
        (block(mine(x), targets) + mixed(mine(z))).backward()
        torch.nn.utils.clip_grad_norm_(block.parameters(), 1.0)
        by.step()
        if step in counts:
            found.append(counted())
    return found


def jobs(ports: list[int], counts: tuple[int, ...], first: int) -> list[dict[str, tuple[float, float]]]:
    """What grew over steps, and over jobs behind the ``first`` ones, which are set up and torn down."""
    found = [grown(*on_mesh(ports[0], steps, counts))]
    for k, address in enumerate(ports):
        comm.finalize()
        on_mesh(address, steps, (2,)) if k else None
        comm.finalize()
        if k == first:
            before = counted()
    return [*found, grown(before, counted())]


# ---- experts


def peak(call: Callable[[], object]) -> int:
    """Bytes that torch has taken at most during a call, beyond those before it."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    return max(itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


def of_torch(x: Tensor, router: Tensor, up: Tensor, down: Tensor, topk: int) -> Tensor:
    """A mixture of one rank by torch's operations: pairs sorted by expert."""
    weights, chosen = (x @ router.T).softmax(-1).topk(topk)
    order = chosen.flatten().argsort(stable=True)
    sizes = chosen.flatten().bincount(minlength=len(up)).tolist()
    parts = zip(x[order // topk].split(sizes), up, strict=True)
    gate, scaled = torch.cat([rows @ b.T for rows, b in parts]).chunk(2, -1)
    parts = zip((nn.functional.silu(gate) * scaled).split(sizes), down, strict=True)
    y = torch.cat([rows @ b.T for rows, b in parts])
    return torch.zeros_like(x).index_add(0, order // topk, y * weights.flatten()[order][:, None])


def experts(mesh: dist.DeviceMesh, tokens: int = 512, H: int = 64, F: int = 96) -> dict[str, int]:
    """Peaks of a forward and backward of experts, two of a token, as many experts on each rank, all of which get as
    many."""
    own, seed, dtype = 8, comm.rank(), torch.float32
    x, dy = normal(tokens, H, seed=seed, dtype=dtype).requires_grad_(), torch.ones(tokens, H)
    kinds: dict[str, dict[str, bool]] = {
        "all": {"exact": False}, "exact": {}, "recompute": {"recompute": True}
    }  # fmt: skip
    chosen = (torch.arange(2 * tokens, dtype=torch.int32) % (own * comm.world_size())).view(tokens, 2)
    weights, found = torch.full((tokens, 2), 0.5, requires_grad=True), {}
    for name, more in kinds.items():
        layer = tsnn.ExpertParallelMoE(H, F, own * comm.world_size(), 2, group=mesh["tp"], **more)
        layer.route = lambda *_: (weights, chosen)  # type: ignore[method-assign]

        def step(layer: nn.Module = layer) -> None:
            x.grad = weights.grad = None
            layer.zero_grad()
            layer(x).backward(dy)

        step()
        found[name] = peak(step)
    sizes = ((own, H), (own, 2 * F, H), (own, H, F))
    given = [normal(*s, seed=1, dtype=dtype).requires_grad_() for s in sizes]
    x.grad = None
    return found | {"torch": peak(lambda: of_torch(x, *given, topk=2).backward(dy))}
