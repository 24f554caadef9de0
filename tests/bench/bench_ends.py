"""``TILESCALE_TARGET=cuda tilescale launch -n 2 -m tests.bench.bench_ends``: what the two ends of a launch cost.

A kernel adds one to a counter of the next rank, with the flags at both ends of a launch and without them
(``ordered=False``), and beside it one that reaches nobody. Each is captured 50 times in a CUDA graph; replays
take turns, behind a meeting of all ranks on the device. Medians of rank 0, microseconds a launch: what the
ordered kernel takes more than the one without order is what stands around it. Ranks that share a GPU run side
by side under NVIDIA's MPS alone.
"""

from __future__ import annotations

import sys

import torch

import tilescale.language as T
from tests.bench.record import record
from tilescale import comm
from tilescale.jit import compile
from tilescale.ops.ranks.measure import Graph, spread

CALLS, REPLAYS = 50, 40


def telling(ordered: bool, blocks: int):
    @T.prim_func
    def tell(s: T.Signal((blocks,), keep=not ordered)):
        with T.Kernel(blocks, threads=128, ordered=ordered) as b, T.Scale("device") as (rank, n):
            T.signal(s[b], dst=(rank + 1) % n)

    return compile(tell, target="cuda")


def alone(blocks: int):
    @T.prim_func
    def count(x: T.Tensor((blocks,), "int64")):
        with T.Kernel(blocks, threads=128) as b:
            x[b] = b

    return compile(count, target="cuda")


def main() -> int:
    comm.init()
    torch.distributed.init_process_group("gloo", rank=comm.rank(), world_size=comm.world_size())
    group, figures = torch.distributed.group.WORLD, {}
    for blocks in (1, 132):
        s, kept = comm.signals((blocks,)), comm.signals((blocks,))
        x = torch.empty(blocks, dtype=torch.int64, device="cuda")
        kernels = {
            "ordered": (telling(True, blocks), s),
            "unordered": (telling(False, blocks), kept),
            "alone": (alone(blocks), x),
        }
        graphs = {name: Graph([lambda k=k, a=a: k(a)] * CALLS, group) for name, (k, a) in kernels.items()}
        times: dict[str, list[float]] = {name: [] for name in graphs}
        for _ in range(REPLAYS):
            for name, graph in graphs.items():
                times[name].append(graph.seconds())
        us = {name: spread(taken)["median"] for name, taken in times.items()}
        figures[f"{blocks} blocks"] = {**us, "around": us["ordered"] - us["unordered"]}
        if comm.rank() == 0:
            print(f"{blocks} blocks: {figures[f'{blocks} blocks']}", flush=True)
        del graphs, kernels
    comm.barrier()
    if comm.rank() == 0:
        record("ends", {"ranks": comm.world_size(), "us": figures})
    return 0


if __name__ == "__main__":
    sys.exit(main())
