"""Many launches of the operations of several ranks, in a random sequence with random delays on random ranks.

    TILESCALE_TARGET=cuda tilescale launch -n 3 -m tests.gpu.stress --launches 100000
    TILESCALE_TARGET=cpu tilescale launch -n 2 -m tests.gpu.stress --launches 50 ranks.gather

Each launch writes into poisoned memory, and its bits are compared on the device with those of the first launch
of the same data, which were compared with float64. A quarter are replays of CUDA graphs. What is launched is
drawn by thousands, so that ``--first 12000`` goes on behind 12,000 launches of the same ``--seed``. ``--seconds``
ends it early. Launches and mismatches by operation go to stress.json.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from typing import Any

import torch

from tests.bench.record import record
from tilescale import comm
from tilescale.ops import RANK_MODULES, load_ranks
from tilescale.ops.case import as_tuple, copied, worst
from tilescale.ops.ranks.case import Case

CHUNK, SETS, CASES = 1000, 3, 4


class Target:
    """A case of an operation: its sets of arguments, what each gives, and a graph of a call."""

    def __init__(self, module: str, case: Case, device: str):
        op, rank, world = load_ranks(module), comm.rank(), comm.world_size()
        self.name, self.run = op.name, op.run
        self.sets, self.want = [], []
        for seed in range(SETS):
            everyone = [
                op.draw(**case.shape, rank=r, world=world, seed=seed, device=device) for r in range(world)
            ]
            got = op.run(**everyone[rank])
            off = max(map(worst, as_tuple(got), as_tuple(op.reference(everyone)[rank])))
            assert off <= 1, f"{op.name} {case}: {off} times what rounding explains"
            self.sets.append(everyone[rank])
            self.want.append(copied(got))
        self.out = copied(self.want[0])
        self.bad = torch.zeros((), dtype=torch.int64, device=device)
        self.launches, self.graph = 0, None
        if device == "cuda":
            torch.cuda.synchronize()
            comm.barrier()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.run(**self.sets[0], out=self.out)

    def launch(self, k: int, replay: bool) -> None:
        for out in as_tuple(self.out):
            out.fill_(float("nan") if out.is_floating_point() else 85)
        if replay and self.graph is not None:
            k = 0
            self.graph.replay()
        else:
            self.run(**self.sets[k], out=self.out)
        for out, want in zip(as_tuple(self.out), as_tuple(self.want[k]), strict=True):
            self.bad += (out.view(torch.uint8) != want.view(torch.uint8)).any()
        self.launches += 1


def delay(draw: random.Random, device: str) -> None:
    """Of one rank in eight launches, on its GPU or its host."""
    late, long, on_host = draw.randrange(8 * comm.world_size()), draw.random(), draw.random() < 0.05
    if late != comm.rank():
        return
    if on_host or device == "cpu":
        time.sleep(1e-3 * long)
    else:
        torch.cuda._sleep(int(200_000 * long))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("modules", nargs="*")
    parser.add_argument("--launches", type=int, default=100_000, help="of all operations together")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    args = parser.parse_args()
    comm.init()
    device = "cuda" if comm.signals(1).device.type == "cuda" else "cpu"
    targets = [
        Target(module, case, device)
        for module in args.modules or RANK_MODULES
        for case in [c for c in load_ranks(module).cases if c.small][:CASES]
    ]
    begin, done, bad = time.perf_counter(), args.first, 0
    over = comm.full((1,), 0, torch.int64)
    while done < args.first + args.launches and not int(over.item()):
        draw = random.Random(f"{args.seed} {done}")
        for _ in range(min(CHUNK, args.first + args.launches - done)):
            target, k, replay = draw.choice(targets), draw.randrange(SETS), draw.random() < 0.25
            delay(draw, device)
            target.launch(k, replay)
            done += 1
        bad = sum(int(t.bad) for t in targets)
        if comm.rank() == 0 or bad:
            print(f"{done} launches, {bad} wrong, {time.perf_counter() - begin:.0f} s", flush=True)
        if bad or comm.rank() == 0 and time.perf_counter() - begin > args.seconds:
            for rank in range(comm.world_size()):
                comm.peer(over, rank).fill_(1)
        if device == "cuda":
            torch.cuda.synchronize()
        comm.barrier()
    found: dict[str, Any] = {}
    for t in targets:
        of = found.setdefault(t.name, {"launches": 0, "wrong": 0})
        of["launches"] += t.launches
        of["wrong"] += int(t.bad)
    for name, of in found.items():
        if comm.rank() == 0 or of["wrong"]:
            print(f"{name}: {of['launches']} launches, {of['wrong']} wrong", flush=True)
    if comm.rank() == 0:
        record("stress", {"ranks": comm.world_size(), "seed": args.seed, "operations": found})
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
