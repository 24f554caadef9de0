"""How many of the faults seeded into what GPUs get are found without a GPU: those of scheduled programs by
the simulator, those of thread IR and of several ranks by the emulator. All survivors must be known to be harmless.

    make bench ARGS="-k seeded_gpu"
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.bench.record import record
from tests.unit.cuda import seeded_ranks, seeded_threads
from tests.unit.passes import seeded_gpu
from tests.unit.passes.seeded import Judge


class Tally:
    """Figures of one level."""

    def __init__(self) -> None:
        self.total, self.named, self.kinds = Counter[str](), Counter[str](), Counter[str]()
        self.survivors: dict[str, str] = {}
        self.missed: list[str] = []

    def add(self, name: str, what: str, kind: str, why: str | None) -> None:
        """``kind``: how it was found, "" where it was not; ``why`` that changes nothing."""
        for key in ("all", name):
            self.total[key] += 1
            self.named[key] += bool(kind)
        if kind:
            self.kinds[kind] += 1
            return
        self.survivors[what] = why or "UNEXPLAINED"
        self.missed += [] if why else [what]

    def figures(self) -> dict[str, Any]:
        return {
            "seeded": self.total["all"],
            "found": self.named["all"],
            "found_percent": round(100 * self.named["all"] / self.total["all"], 1),
            "found_percent_of_those_that_change_something": round(
                100 * self.named["all"] / (self.total["all"] - len(self.survivors) + len(self.missed)), 1
            ),
            "kinds": dict(self.kinds.most_common()),
            "by_fault": {n: f"{self.named[n]} of {self.total[n]}" for n in sorted(self.total) if n != "all"},
            "harmless": self.survivors,
        }


@pytest.mark.bench
def test_scheduled_programs():
    tally = Tally()
    for case in seeded_gpu.CASES:
        judge, survived = Judge(case), Counter[str]()
        for fault in seeded_gpu.seeded(judge.scheduled(seeded_gpu.HOPPER)):
            finding = judge.judge(fault.program()).finding
            survived[fault.name] += finding is None
            why = seeded_gpu.harmless(case, fault, survived[fault.name])
            tally.add(
                fault.name, f"{case.name}: {fault.name} ({fault.at})", finding.kind if finding else "", why
            )
        print(f"{case.name}: {tally.named['all']} of {tally.total['all']} so far", flush=True)
    record("seeded_gpu_schedules", tally.figures())
    assert not tally.missed, tally.missed
    assert tally.named["all"] >= 0.95 * tally.total["all"]


@pytest.mark.bench
def test_threads():
    tally = Tally()
    for case in seeded_threads.CASES:
        judge, survived = seeded_threads.Judge(case), Counter[str]()
        for fault in seeded_threads.seeded(judge.kernel):
            verdict = judge.judge(fault.kernel)
            survived[fault.name] += not verdict.found
            kind = "named" if verdict.said else "wrong results" if verdict.wrong else ""
            why = seeded_threads.harmless(case, fault, survived[fault.name])
            tally.add(fault.name, f"{case.name}: {fault.name} ({fault.at})", kind, why)
        print(f"{case.name}: {tally.named['all']} of {tally.total['all']} so far", flush=True)
    record("seeded_gpu_threads", tally.figures())
    assert not tally.missed, tally.missed
    assert tally.named["all"] >= 0.95 * tally.total["all"]


@pytest.mark.bench
def test_programs_of_several_ranks():
    tally = Tally()
    for case in seeded_ranks.CASES:
        for fault in seeded_ranks.seeded(case):
            how = seeded_ranks.found(case, fault.program)
            kind = how if how == "other results" or not how else how.split()[0]
            why = seeded_ranks.harmless(case, fault) or None
            tally.add(fault.name, f"{case.name}, {fault.name} ({fault.at})", kind, why)
    record("seeded_gpu_ranks", tally.figures())
    assert not tally.missed, tally.missed
