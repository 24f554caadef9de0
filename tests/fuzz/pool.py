"""Many seeds, in processes of their own: one that dies or hangs is a failure of its seed and takes nobody
along."""

from __future__ import annotations

import importlib
import os
import pickle
import selectors
import struct
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.fuzz.compare import compare, compare_ranks, forget, why
from tests.fuzz.draw import draw
from tests.fuzz.programs import Program
from tests.fuzz.ranks import draw_ranks
from tests.fuzz.shrink import shrink
from tilescale.lifetime import tie_to_parent
from tilescale.testing.processes import end_hanging, show_where

#: seconds for one program, or group of them, and for making one smaller; programs of one process (what TVM
#: keeps of each adds up); programs that share one group of ranks
LIMIT, SHRINKING, PORTION, GROUP = 240.0, 120.0, 400, 20


@dataclass
class Outcome:
    """One seed: ``failure`` is None where everyone agreed; ``text`` is the kernel, as small as it got."""

    seed: int
    failure: str | None = None
    text: str = ""
    statements: int = 0


@dataclass
class Summary:
    programs: int = 0
    statements: int = 0
    seconds: float = 0.0
    failed: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.programs += 1
        self.statements += outcome.statements
        if outcome.failure is not None:
            self.failed.append(outcome)

    @property
    def figures(self) -> dict[str, Any]:
        return {
            "programs": self.programs,
            "lines_of_kernels": self.statements,
            "differences": len(self.failed),
            "seconds": round(self.seconds, 1),
            "failing_seeds": [o.seed for o in self.failed],
        }

    def __str__(self) -> str:
        seeds = ", ".join(str(o.seed) for o in self.failed)
        return f"{self.programs} programs in {self.seconds:.0f} s; " + (
            f"differences: seeds {seeds}" if seeds else "no difference"
        )


def outcome(program: Program, failure: str | None, shrinks: bool) -> Outcome:
    """What became of a program; a failing one as small as it gets."""
    if failure is None:
        return Outcome(program.seed, statements=program.text.count("\n"))
    kind = failure.split(":")[0]

    def still(smaller: Program) -> bool:
        what = failing([smaller])[0]
        return (
            what is not None
            and what.split(":")[0] == kind
            and ("a finding" in what) == ("a finding" in failure)
        )

    least = shrink(program, still, 300 if program.ranks == 1 else 40, SHRINKING) if shrinks else program
    said = "\n".join(f"# {line}" for line in (failing([least])[0] or failure).splitlines())
    return Outcome(program.seed, failure, f"{least.text}\n{said}\n")


def drawn(seed: int, ranks: int) -> Program:
    return draw(seed) if ranks == 1 else draw_ranks(seed, ranks)


def failing(programs: Sequence[Program]) -> list[str | None]:
    """Why each program fails; None where all agree."""
    if programs[0].ranks > 1:
        return compare_ranks(programs)
    return [why(lambda p=p: compare(p)) for p in programs]


def run_seeds(
    seeds: Sequence[int],
    jobs: int,
    *,
    ranks: int = 1,
    shrinks: bool = True,
    show: Callable[[Outcome], None] = lambda o: None,
    minutes: float = float("inf"),
) -> Summary:
    """All seeds on ``jobs`` processes, or as many as ``minutes`` allow; ``show`` hears of each as it is
    done."""
    if ranks > 1:
        # Once, here: each group of ranks would load it anew, within its time limit.
        importlib.import_module("torch")
    start, done = time.monotonic(), Summary()
    waiting = [list(seeds[k : k + PORTION]) for k in range(0, len(seeds), PORTION)][::-1]
    sel = selectors.DefaultSelector()

    def launch(portion: list[int]) -> None:
        worker = _Worker(portion, ranks, shrinks)
        sel.register(worker.pipe, selectors.EVENT_READ, worker)

    told = start
    while waiting or sel.get_map():
        if time.monotonic() - told > 60:
            told = time.monotonic()
            print(done, flush=True)
        if time.monotonic() - start > 60 * minutes:
            for key in list(sel.get_map().values()):
                key.data.end()
            break
        while waiting and len(sel.get_map()) < jobs:
            launch(waiting.pop())
        for key, _ in sel.select(1.0):
            for outcome in key.data.read():
                done.add(outcome)
                show(outcome)
        done.seconds = time.monotonic() - start
        for key in list(sel.get_map().values()):
            worker = key.data
            if worker.open and time.monotonic() - worker.since <= LIMIT:
                continue
            sel.unregister(worker.pipe)
            lost = worker.end()
            suspects, rest = worker.unfinished()
            waiting += [rest] * bool(rest)
            if len(suspects) > 1:  # one of them, or all together: each by itself
                waiting += [[seed] for seed in suspects[::-1]]
            elif suspects:
                outcome = Outcome(suspects[0], lost, drawn(suspects[0], ranks).text)
                done.add(outcome)
                show(outcome)
    return done


class _Worker:
    """A forked process that goes through its seeds and sends an outcome of each."""

    def __init__(self, seeds: list[int], ranks: int, shrinks: bool):
        self.left, self.open, self.since, self.data = list(seeds), True, time.monotonic(), b""
        self.count, self.together = len(seeds), 1 if ranks == 1 else GROUP
        self.pipe, its = os.pipe()
        tie = tie_to_parent()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                tie()
                show_where(2)
                for k in range(0, len(seeds), self.together):
                    programs = [drawn(seed, ranks) for seed in seeds[k : k + self.together]]
                    for program, failure in zip(programs, failing(programs)):
                        made = pickle.dumps(outcome(program, failure, shrinks))
                        os.write(its, struct.pack("<I", len(made)) + made)
                code = 0
            finally:
                forget()
                os._exit(code)
        os.close(its)

    def read(self) -> list[Outcome]:
        piece = os.read(self.pipe, 1 << 16)
        self.open, self.since = bool(piece), time.monotonic()
        self.data += piece
        out = []
        while len(self.data) >= 4 and len(self.data) >= 4 + (size := struct.unpack("<I", self.data[:4])[0]):
            out.append(pickle.loads(self.data[4 : 4 + size]))
            self.data = self.data[4 + size :]
            self.left.pop(0)
        return out

    def unfinished(self) -> tuple[list[int], list[int]]:
        """The seeds that it was at, and those behind them."""
        at = self.together - (self.count - len(self.left)) % self.together
        return self.left[:at], self.left[at:]

    def end(self) -> str:
        """Ends the process, and with it the ranks that it started; how it ended."""
        if self.open:
            end_hanging([self.pid])
        os.close(self.pipe)
        _, status = os.waitpid(self.pid, 0)
        if self.open:
            return f"Timeout: not done after {LIMIT:g} s"
        return (
            f"Died: by signal {os.WTERMSIG(status)}"
            if os.WIFSIGNALED(status)
            else f"Died: exit code {os.WEXITSTATUS(status)}"
        )
