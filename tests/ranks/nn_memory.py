"""What a rank has in memory while layers are trained, made and dropped."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from tests.ranks.nn_checks import Block, Mixed, batch, mine, normal, on_mesh
from tilescale import comm

#: what is counted → by how much it may grow. Memory grows a little by itself: pages of the allocator
SLACK = {"MB": 3.0, "tensors": 0, "objects": 150, "files": 0, "threads": 0, "mappings": 8}


def counted() -> dict[str, float]:
    """Of this process."""
    gc.collect()
    objects = gc.get_objects()
    return {
        "MB": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20,
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
