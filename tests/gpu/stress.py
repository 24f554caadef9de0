"""Many launches of each operation of several ranks, in a random order of its ways, shapes and data, with random
delays on random ranks; then of all operations among one another ("interleaved").

    TILESCALE_TARGET=cuda tilescale launch -n 2 -m tests.gpu.stress --launches 100000 --seconds 540
    TILESCALE_TARGET=cpu tilescale launch -n 2 -m tests.gpu.stress --launches 20 ranks.gather

Each launch writes into poisoned memory, and its bits are compared on the device with those of the first launch
of the same data, which were compared with float64; a wrong one adds to a counter on the device. On GPUs most
launches are replayed by CUDA graphs of `LENGTH` each, which hold delays as long as the memory in front of a
replay says. All ranks draw alike, by the seed and the number of thousands that are done: ``--first 12000`` goes
on behind 12,000 launches of the same ``--seed``. ``--seconds`` ends it early, with equal shares for the
operations. A line for each: PASS, FAIL, or LATE where the time was over. Figures go to stress.json.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from typing import Any

import torch

import tilescale
import tilescale.language as T
from tests.bench.record import record
from tilescale import comm
from tilescale.ops import RANK_MODULES, host, load_ranks
from tilescale.ops.case import as_tuple, copied, worst
from tilescale.ops.ranks.case import Case, RankOp

#: launches between two looks at the counters, of which so many are replayed by one graph; sets of data;
#: cases of an operation and way
CHUNK, LENGTH, SETS, CASES = 1000, 240, 3, 2
#: graphs of a phase, of which each is one order; how far a delay counts at most, some 150 µs
GRAPHS, PAUSE = 4, 60_000


@T.prim_func
def pause(rounds: T.Tensor((LENGTH,), "int32"), k: T.int32, end: T.Tensor((1,), "int32")):
    """As long as rounds[k] says: steps that wait for one another and have no closed form."""
    with T.Kernel(1, threads=32):
        x = T.alloc_var("int32")
        x = k
        for _ in T.serial(rounds[k]):
            x = x * 1664525 ^ 1013904223
        end[0] = x


def ways(op: RankOp, case: Case, device: str) -> dict[str, dict[str, Any]]:
    """The ways of a case and what asks for them, the library's left out; its own where it names one."""
    if "how" in case.shape:
        return {str(case.shape["how"]): {}}
    if case.shape.get("engine"):
        return {"engine": {}}
    if "scales" in case.shape:
        return {f"scales by {case.shape['scales']}": {}}
    if "BM" in case.shape:
        return {"fused, pulls" if case.shape.get("pull") else "fused, small tiles": {}}
    units = host.units(torch.device(device))
    found = op.ways(world=comm.world_size(), units=units, **case.shape)
    return {way: more for way, more in found.items() if way != "library"}


class Target:
    """A case of an operation in one way: its sets of arguments and what each gives."""

    def __init__(self, op: RankOp, case: Case, more: dict[str, Any], device: str):
        self.run, rank, world = op.run, comm.rank(), comm.world_size()
        more, self.sets, self.want = dict(more), [], []
        reached = more.pop("symmetric", False)
        for seed in range(SETS):
            everyone = [
                op.draw(**case.shape, rank=r, world=world, seed=seed, device=device) for r in range(world)
            ]
            mine, want = everyone[rank] | more, as_tuple(op.reference(everyone)[rank])
            if reached and seed == 0:
                like = op.run(**everyone[rank])
                self.out = comm.empty(tuple(like.shape), like.dtype)
            got = op.run(**mine, out=self.out) if reached else op.run(**mine)
            off = max(map(worst, as_tuple(got), want))
            assert off <= 1, f"{op.name} {case} {more}: {off} times what rounding explains"
            self.sets.append(mine)
            self.want.append(copied(got))
        if not reached:
            self.out = copied(self.want[0])

    def launch(self, k: int, bad: torch.Tensor) -> None:
        for out in as_tuple(self.out):
            out.view(torch.uint8).fill_(0x7F)  # NaN of floating-point numbers
        self.run(**self.sets[k], out=self.out)
        for out, want in zip(as_tuple(self.out), as_tuple(self.want[k]), strict=True):
            bad += (out.view(torch.uint8) != want.view(torch.uint8)).any()


def targets(module: str, device: str) -> dict[str, list[Target]]:
    """An operation's, by their ways."""
    op, found = load_ranks(module), dict[str, list[Target]]()
    for case in op.cases:
        if case.small:
            for way, more in ways(op, case, device).items():
                of = found.setdefault(way, [])
                if len(of) < CASES:
                    of.append(Target(op, case, more, device))
    return found


class Phase:
    """Launches of some targets in a random order."""

    def __init__(self, name: str, drawn: list[Target], seed: int, device: str):
        self.name, self.targets, self.seed, self.device = name, drawn, seed, device
        self.bad = torch.zeros((), dtype=torch.int64, device=device)
        self.graphs: list[Any] = []
        if device == "cuda":
            self.rounds = torch.zeros(LENGTH, dtype=torch.int32, device=device)
            self.end = torch.zeros(1, dtype=torch.int32, device=device)
            self.graphs = [self.captured(random.Random(f"{seed} {name} {k}")) for k in range(GRAPHS)]

    def captured(self, draw: random.Random) -> Any:
        """So many launches, each behind its delay."""
        wait = tilescale.compile(pause, target="cuda")
        wait(self.rounds, 0, self.end)
        torch.cuda.synchronize()
        comm.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for k in range(LENGTH):
                wait(self.rounds, k, self.end)
                draw.choice(self.targets).launch(draw.randrange(SETS), self.bad)
        return graph

    def chunk(self, number: int) -> None:
        """The launches of one thousand."""
        draw, left = random.Random(f"{self.seed} {self.name} chunk {number}"), CHUNK
        for _ in range(len(self.graphs)):
            which, seed = draw.randrange(GRAPHS), draw.randrange(1 << 30)
            late_on_host(draw, 0.2)
            mine = torch.Generator(self.device).manual_seed(seed * comm.world_size() + comm.rank())
            share = torch.rand(2, LENGTH, generator=mine, device=self.device)
            rare = share[0] * 8 * comm.world_size() < 1
            self.rounds.copy_(share[1].mul(PAUSE).where(rare, 0.0))
            self.graphs[which].replay()
            left -= LENGTH
        self.some(draw, left)

    def some(self, draw: random.Random, count: int) -> None:
        """Launches without a graph."""
        for _ in range(count):
            late_on_host(draw, 1 / 8 if self.device == "cpu" else 1 / 40)
            draw.choice(self.targets).launch(draw.randrange(SETS), self.bad)


def late_on_host(draw: random.Random, share: float) -> None:
    """The host of one rank sleeps in this share of the cases."""
    late, often, long = draw.randrange(comm.world_size()), draw.random(), draw.random()
    if often < share and late == comm.rank():
        time.sleep(1e-3 * long)


class Clock:
    """Rank 0's, by which all ranks end together."""

    def __init__(self, device: str):
        self.over, self.device = comm.full((1,), 0, torch.int64), device

    def ended(self, until: float, bad: bool) -> bool:
        """Whether some rank has found something wrong, or the time is over; collective."""
        if bad or (comm.rank() == 0 and time.perf_counter() > until):
            for rank in range(comm.world_size()):
                comm.peer(self.over, rank).fill_(1)
        comm.barrier()
        ended = bool(self.over.item())
        comm.barrier()  # everyone has looked
        self.over.fill_(0)
        comm.barrier()
        return ended


def ran(phase: Phase, first: int, launches: int, until: float, clock: Clock) -> dict[str, Any]:
    """What a phase found, by the end of its launches or its time."""
    begin, done, bad = time.perf_counter(), first, 0
    while done < first + launches:
        if phase.graphs or launches >= CHUNK:
            phase.chunk(done // CHUNK)
            done += CHUNK
        else:
            phase.some(random.Random(f"{phase.seed} {phase.name} {done}"), launches)
            done += launches
        bad = int(phase.bad.item())
        if clock.ended(until, bad > 0):
            break
    verdict = "FAIL" if bad else "PASS" if done >= first + launches else "LATE"
    seconds = time.perf_counter() - begin
    if comm.rank() == 0 or bad:
        print(
            f"{verdict} {phase.name}: {done - first} launches, {bad} wrong on rank {comm.rank()}, {seconds:.1f} s",
            flush=True,
        )
    return {"launches": done - first, "wrong": bad, "verdict": verdict}


def work(
    modules: list[str], launches: int, first: int = 0, seed: int = 0, seconds: float = 1e9
) -> dict[str, Any]:
    """All phases on this rank, and what they found."""
    comm.init()
    device, until = str(comm.signals(1).device.type), time.perf_counter() + seconds
    clock, found, everything = Clock(device), dict[str, Any](), list[Target]()
    for k, module in enumerate(modules):
        by_way = targets(module, device)
        mine = [t for of in by_way.values() for t in of]
        everything += mine
        name = f"{load_ranks(module).name} ({'; '.join(by_way)})"
        now = time.perf_counter()
        share = (until - now) / (len(modules) + (len(modules) > 1) - k)
        found[name] = ran(Phase(name, mine, seed, device), first, launches, now + share, clock)
        if found[name]["wrong"]:
            return found
    if len(modules) > 1:
        found["interleaved"] = ran(
            Phase("interleaved", everything, seed, device), first, launches, until, clock
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("modules", nargs="*", help="default: all")
    parser.add_argument("--launches", type=int, default=100_000, help="of each operation")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9)
    args = parser.parse_args()
    found = work(args.modules or list(RANK_MODULES), args.launches, args.first, args.seed, args.seconds)
    comm.barrier()
    if comm.rank() == 0:
        record("stress", {"ranks": comm.world_size(), "seed": args.seed, "operations": found})
    return int(any(of["wrong"] for of in found.values()))


if __name__ == "__main__":
    sys.exit(main())
