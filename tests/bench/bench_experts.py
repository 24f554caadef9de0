"""Experts' operations where several ranks share one GPU, so without links, and which launch takes what.

    TILESCALE_TARGET=cuda tilescale launch -n 4 -m tests.bench.bench_experts blocks=32

``combine=8,512,2`` sets `combine_kernels.NEAR` and combine's threads and lines otherwise, ``only=combine`` times
one of them. All ranks' blocks have to fit on the GPU together, by MPS, since they wait for each other: `blocks` is a rank's.
"dispatch again" is what `like=` does, a dispatch without its plan. Graphs, ranks aligned on the device, the
median of the slowest rank's replays; bytes are those of the rows that leave a rank, for other ranks.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from tests.bench.record import record
from tilescale import comm
from tilescale.ops import moe_combine, moe_dispatch, moe_route
from tilescale.ops.ranks import combine, combine_kernels, experts, measure
from tilescale.ops.ranks.dispatch import of_pairs
from tilescale.ops.ranks.workspace import release

SHAPES = ({"tokens": 4096}, {"tokens": 1024}, {"tokens": 128})
COMMON = {"hidden": 7168, "topk": 8, "experts": 256}


def one(shape: dict[str, Any], blocks: int, only: str, group: Any) -> dict[str, Any]:
    rank, world = comm.rank(), comm.world_size()
    sets = max(2, -(-measure.TRAFFIC // (shape["tokens"] * COMMON["hidden"] * 2)))
    drawn = [
        experts.draw(**COMMON, **shape, rank=rank, world=world, device="cuda", seed=k)
        for k in range(min(sets, 4))
    ]
    logits = [torch.randn(shape["tokens"], COMMON["experts"], device="cuda") for _ in drawn]
    kept = [moe_dispatch(**a, blocks=blocks) for a in drawn[:1]]
    y = [of_pairs(kept[0]).clone() for _ in range(2)]
    variants = {
        "route": [lambda x=x: moe_route(x, COMMON["topk"]) for x in logits],
        "dispatch": [lambda a=a: moe_dispatch(**a, blocks=blocks) for a in drawn],
        "dispatch again": [lambda a=a: moe_dispatch(a["x"], like=kept[0], blocks=blocks) for a in drawn],
        "combine": [lambda v=v: moe_combine(v, kept[0], blocks=blocks) for v in y],
        "expand": [kept[0].expanded] * 2,
    }
    variants = {name: calls for name, calls in variants.items() if only in name}
    times = measure.measure(variants, "cuda", 15, group)
    leaves = experts.remote(world=world, **COMMON, **shape)
    found = {}
    for name, taken in times.items():
        us = measure.spread(taken)["median"]
        found[name] = {"us": us, "gbytes_per_s": leaves / us / 1e3}
        if rank == 0:
            print(
                f"{shape} blocks={blocks} {name:15s} {us:8.1f} µs {leaves / us / 1e3:7.1f} GB/s", flush=True
            )
    release()
    return {"shape": COMMON | shape, "blocks": blocks, "ranks": world, "found": found}


def main() -> int:
    words = dict(w.split("=") for w in sys.argv[1:])
    if "combine" in words:
        combine_kernels.NEAR, combine.THREADS, combine.LINES = map(int, words["combine"].split(","))
    comm.init()
    torch.distributed.init_process_group("gloo", rank=comm.rank(), world_size=comm.world_size())
    blocks, group = int(words.get("blocks", "32")), torch.distributed.group.WORLD
    lines = [one(dict(s), blocks, words.get("only", ""), group) for s in SHAPES]
    if comm.rank() == 0 and "only" not in words:
        record(f"experts_{comm.world_size()}_{blocks}", {"cases": lines})
    comm.barrier()
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
