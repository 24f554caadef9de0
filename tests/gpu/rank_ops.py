"""tilescale.ops of several ranks, every case that is no benchmark, against float64: a program for a launcher.

    TILESCALE_TARGET=cuda tilescale launch -n 2 -m tests.gpu.rank_ops
    TILESCALE_TARGET=cpu tilescale launch -n 2 -m tests.gpu.rank_ops --small ranks.gather

``graph``: besides, one call of each in a CUDA graph, replayed with new data.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

from tests.unit.ops.rank_cases import run
from tilescale import comm, env
from tilescale.ops import RANK_MODULES, load_ranks
from tilescale.ops.case import as_tuple, copied, worst
from tilescale.ops.ranks.case import Case, RankOp


def one(module: str, case: Case, device: str) -> str:
    """What is wrong with a case on this rank, "" for nothing."""
    op = load_ranks(module)
    r = run(module, dict(case.shape), device, seeds=2)
    bits = comm.full((1,), int(r["bits"][-1][:15], 16), torch.int64)
    comm.barrier()
    everyone = [int(comm.peer(bits, k).item()) for k in range(comm.world_size())]
    comm.barrier()
    wrong = [] if r["off"] <= 1 else [f"{r['off']} times what rounding explains"]
    wrong += [] if r["same"] else ["other bits in the second run"]
    wrong += [] if r["beside"] else ["memory beside the result was written"]
    wrong += ["other bits than other ranks"] if op.alike and len(set(everyone)) > 1 else []
    return ", ".join(wrong)


def replayed(op: RankOp, case: Case) -> str:
    """One call in a CUDA graph, replayed with the data of other seeds."""
    rank, world = comm.rank(), comm.world_size()

    def draw(seed: int) -> list[dict[str, Any]]:
        return [op.draw(**case.shape, rank=r, world=world, device="cuda", seed=seed) for r in range(world)]

    mine = draw(0)[rank]
    out = copied(op.run(**mine))
    torch.cuda.synchronize()
    comm.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op.run(**mine, out=out)
    off = 0.0
    for seed in range(4):
        everyone = draw(seed)
        for name, value in everyone[rank].items():
            if isinstance(value, torch.Tensor):
                mine[name].copy_(value)
        graph.replay()
        off = max(off, *map(worst, as_tuple(out), as_tuple(op.reference(everyone)[rank])))
    return "" if off <= 1 else f"{off} times what rounding explains in a graph"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="small cases alone")
    parser.add_argument("--graph", action="store_true", help="and one of each in a CUDA graph")
    parser.add_argument("--each", action="store_true", help="say when a case is done, and how long it took")
    parser.add_argument("modules", nargs="*", help="default: all")
    given = parser.parse_args()
    comm.init()
    device, bad = str(comm.empty(1).device.type), 0
    for module in given.modules or RANK_MODULES:
        op = load_ranks(module)
        cases = [c for c in op.cases if c.bar is None and (c.small or not given.small)]
        if env.REMOTE.get():  # copy engines need addresses, and refuse by name
            cases = [c for c in cases if not c.shape.get("engine") and c.shape.get("how") != "engine"]
        told = []
        for c in cases:
            begun = time.perf_counter()
            if text := one(module, c, device):
                told.append(f"{c}: {text}")
            if given.each and comm.rank() == 0:  # whoever waits sees for what
                print(f"{op.name} {c}: {time.perf_counter() - begun:.1f} s", flush=True)
        if given.graph:
            told += [f"{c}: {text}" for c in cases[:2] if (text := replayed(op, c))]
        for text in told:
            print(text, flush=True)
        if comm.rank() == 0:
            print(f"{op.name}: {len(cases)} cases, {len(told)} wrong", flush=True)
        bad |= bool(told)
    comm.barrier()
    return int(bad)


if __name__ == "__main__":
    raise SystemExit(main())
