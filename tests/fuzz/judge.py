"""The simulator's schedules against the oracle: programs of tests/fuzz/orders.py, and who names what is wrong
with them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.fuzz.compare import kernel_of
from tests.fuzz.oracle import Truth, truth
from tests.fuzz.orders import COUNTERS, FLAGS, PARTS, Orders, draw_orders
from tilescale.compiler.checks.run import check
from tilescale.compiler.findings import Report

#: further runs of a program under each schedule; the exhaustive one has a bound
SEEDS, BOUND = 10, 4_000
SCHEDULES = ("random", "adversary", "exhaustive")
#: what a program can be wrong with, and the kinds of findings that say so; "unawaited" is read off the text
#: and not off a run
FAULTS = {"race": ("race",), "deadlock": ("deadlock", "endless")}


@dataclass
class Verdict:
    """What was said of one program: by each schedule the faults that it names, and what is said and is not
    so."""

    program: Orders
    truth: Truth
    named: dict[str, set[str]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    complete: bool = False

    @property
    def faults(self) -> set[str]:
        return {
            name
            for name, there in (("race", bool(self.truth.races)), ("deadlock", self.truth.stuck))
            if there
        }

    @property
    def missed(self) -> set[str]:
        """The faults that no schedule names."""
        return self.faults - set().union(*self.named.values())

    @property
    def failure(self) -> str:
        """Why the simulator is not right about it; empty where it is."""
        missed = [f"no schedule names the {fault}" for fault in sorted(self.missed)]
        return "; ".join([*missed, *self.wrong])


def judge(seed: int, schedules: Iterable[str] = SCHEDULES) -> Verdict:
    """The program of a seed, by the oracle and under each schedule."""
    program = draw_orders(seed)
    found = truth(program)
    assert found is not None, f"seed {seed} has too many states"
    text, places = program.source()
    kernel, verdict = kernel_of(text), Verdict(program, found)
    for schedule in schedules:
        report = check(kernel, program.ranks, arguments(program), schedule=schedule, seeds=SEEDS, bound=BOUND)
        verdict.complete = bool(report.complete)
        verdict.named[schedule] = {fault for fault, kinds in FAULTS.items() if report.kinds & set(kinds)}
        verdict.wrong += [f"{schedule}: {text}" for text in untrue(report, verdict, places)]
    return verdict


def arguments(program: Orders) -> dict[str, Any]:
    """Everything is written before the launch, so that order is all that can be wrong."""
    longest = max(1, *map(len, program.ops))
    return {
        "A": np.ones(2, np.int32),
        "x": np.zeros((PARTS, 2), np.int32),
        "c": np.zeros(COUNTERS, np.int64),
        "f": np.zeros(FLAGS, np.int32),
        "kept": np.zeros((program.blocks, longest, 2), np.int32),
    }


def untrue(report: Report, verdict: Verdict, places: dict[int, tuple[int, int]]) -> list[str]:
    """The findings that the oracle knows nothing of: a race of other statements, a deadlock where everybody
    comes to the end."""
    out = []
    for finding in report.findings:
        if finding.kind == "race":
            pair = frozenset(places[line] for _, line in finding.lines)
            wrong = pair not in verdict.truth.races
        else:
            wrong = finding.kind != "unawaited" and not (
                finding.kind in FAULTS["deadlock"] and verdict.truth.stuck
            )
        if wrong:
            out.append(f"not so: {finding}")
    return out
