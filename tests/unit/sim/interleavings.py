"""Small programs and what all their interleavings lead to, with and without reduction."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import tilescale.language as T
from tilescale.compiler.checks.explore import exhaust
from tilescale.compiler.checks.run import Launch, Result, each_rank
from tilescale.compiler.findings import Report
from tilescale.compiler.passes.pipeline import tile_level
from tilescale.compiler.sim.interleave import Interleaving, Process
from tilescale.compiler.sim.prepare import prepare

#: what one run leaves behind: every array, and the kinds and places of what was found
Outcome = tuple[Any, ...]


def outcome(done: Result) -> Outcome:
    arrays = tuple(
        sorted((r, name, a.tobytes()) for r, named in enumerate(done.arrays) for name, a in named.items())
    )
    return arrays, frozenset(f.key for f in done.report.findings)


def made(kernel: Any, ranks: int = 1, args: dict[str, Any] | None = None) -> Launch:
    return Launch(prepare(tile_level(kernel)), each_rank(args, ranks))


class Enumerated(Interleaving):
    """Follows a list of choices, then takes the first process that can; remembers who could."""

    def __init__(self, choices: list[Process]):
        super().__init__()
        self.choices, self.could = choices, []

    def choose(self, index: int, able: dict[Process, Any], default: Process) -> Process | None:
        self.could.append(sorted(able))
        return self.choices[index] if index < len(self.choices) else self.could[index][0]


def enumerated(launch: Launch, most: int = 100_000) -> tuple[set[Outcome], int]:
    """The outcomes of all interleavings, one after another, and how many these are."""
    choices: list[Process] = []
    found: set[Outcome] = set()
    for count in range(1, most):
        run = Enumerated(choices)
        found.add(outcome(launch.run(run)))
        choices = [e.process for e in run.events]
        while choices:
            could, last = run.could[len(choices) - 1], choices.pop()
            if last != could[-1]:
                choices.append(could[could.index(last) + 1])
                break
        if not choices:
            return found, count
    raise AssertionError(f"more than {most} interleavings")


def reduced(launch: Launch) -> tuple[set[Outcome], Report]:
    """The outcomes of the interleavings that the exploration runs, and its report."""
    found: set[Outcome] = set()
    report = Report()

    class Listening:
        def run(self, schedule: Any, into: Report) -> Result:
            done = launch.run(schedule, into=into)
            if not schedule.pruned:
                found.add(outcome(done))
            return done

    report.complete = exhaust(Listening(), report, 100_000)  # type: ignore[arg-type]
    return found, report


def blocks_of(programs: list[list[tuple[Any, ...]]]) -> Any:
    """A kernel whose block k runs the k-th list of operations on counters, flags and elements that all share;
    what it reads is kept."""
    count = len(programs)

    @T.prim_func
    def main(
        c: T.Signal((2,)),
        x: T.Tensor((2,), "int32"),
        y: T.Tensor((2,), "int32"),
        kept: T.Tensor((count, 8), "int32"),
    ):
        with T.Kernel(count) as b, T.Scale("grid"):
            seen = T.alloc_var("int32")
            for k in range(count):
                if b == k:
                    for n, (what, i, *rest) in enumerate(programs[k]):
                        if what == "signal":
                            T.signal(c[i], rest[0], op=rest[1])
                        elif what == "wait":
                            T.wait(c[i], rest[0], rest[1])
                        elif what == "add":
                            kept[k, n] = T.atomic_add(x[i], rest[0], return_prev=True)
                        elif what == "set":
                            T.atomic_store(x[i], rest[0])
                        elif what == "get":
                            kept[k, n] = T.atomic_load(x[i])
                        elif what == "poll":
                            seen = 0
                            while seen == 0:
                                seen = T.atomic_load(x[i])
                        elif what == "if":
                            if T.atomic_load(x[i]) == rest[0]:
                                y[rest[1]] = k + 1
                        elif what == "write":
                            y[i] = rest[0]
                        elif what == "read":
                            kept[k, n] = y[i]

    return main


def _chooser(draw: random.Random, share: float) -> Callable[[], int]:
    """0, or in a ``share`` of the calls 1."""
    return lambda: int(draw.random() < share)


def drawn(seed: int, count: int, length: int) -> list[list[tuple[Any, ...]]]:
    """Random programs for ``blocks_of``. Most of them meet in one counter and one element."""
    draw = random.Random(seed)
    at, value = _chooser(draw, 0.15), _chooser(draw, 0.5)
    makers: list[Callable[[], tuple[Any, ...]]] = [
        lambda: ("signal", at(), 1, "add"),
        lambda: ("add", at(), 1),
        lambda: ("set", at(), 1 + value()),
        lambda: ("get", at()),
        lambda: ("if", at(), 1, at()),
        lambda: ("write", at(), 1 + value()),
        lambda: ("read", at()),
        lambda: ("wait", at(), 1 + value(), "ge"),
        lambda: ("wait", at(), 1, draw.choice(["ge", "eq", "le", "ne"])),
        lambda: ("signal", at(), value(), "set"),
        lambda: ("poll", at()),
    ]
    return [[draw.choice(makers)() for _ in range(length)] for _ in range(count)]


def ranks_of(programs: list[list[tuple[Any, ...]]]) -> Any:
    """A kernel whose rank k runs the k-th list of remote operations on symmetric memory; what it reads is
    kept."""
    count = len(programs)

    @T.prim_func
    def main(
        A: T.Tensor((2,), "int32"),
        x: T.SymmTensor((2, 2), "int32"),
        c: T.Signal((2,)),
        kept: T.Tensor((8, 2), "int32"),
    ):
        with T.Kernel(1), T.Scale("device") as rank, world:
            for k in range(count):
                if rank == k:
                    for n, (what, i, *rest) in enumerate(programs[k]):
                        if what == "put":
                            T.copy(A, x[i, 0:2], dst=rest[0] % world)
                        elif what == "put and signal":
                            T.copy(A, x[i, 0:2], dst=rest[0] % world, signal=c[i])
                        elif what == "signal":
                            T.signal(c[i], dst=rest[0] % world)
                        elif what == "wait":
                            T.wait(c[i], rest[0])
                        elif what == "read":
                            T.copy(x[i, 0:2], kept[n, 0:2])
                        elif what == "pull":
                            T.copy(x[i, 0:2], kept[n, 0:2], src=rest[0] % world)
                        elif what == "barrier":
                            T.barrier()

    return main


def drawn_for_ranks(seed: int, count: int, length: int) -> list[list[tuple[Any, ...]]]:
    """Random programs for ``ranks_of``: all have as many barriers."""
    draw = random.Random(seed)
    at = _chooser(draw, 0.15)
    makers: list[Callable[[], tuple[Any, ...]]] = [
        lambda: ("put", at(), draw.randrange(count)),
        lambda: ("put and signal", at(), draw.randrange(count)),
        lambda: ("signal", at(), draw.randrange(count)),
        lambda: ("wait", at(), 1),
        lambda: ("read", at()),
        lambda: ("pull", at(), draw.randrange(count)),
    ]
    programs = [[draw.choice(makers)() for _ in range(length)] for _ in range(count)]
    if draw.random() < 0.3:
        for program in programs:
            program.insert(draw.randrange(length + 1), ("barrier", 0))
    return programs
