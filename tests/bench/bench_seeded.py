"""How many of the faults seeded into scheduled programs the simulator names; all survivors must be known to
be harmless.

make bench ARGS="-k seeded"
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.bench.record import record
from tests.unit.passes.seeded import CASES, PLANS, Judge, harmless, seeded


@pytest.mark.bench
def test_seeded_schedules():
    total, named, by_effect = Counter[str](), Counter[str](), Counter[str]()
    kinds, survivors, missed = Counter[str](), {}, []
    for case in CASES:
        judge = Judge(case)
        for plan in PLANS:
            for fault in seeded(judge.scheduled(PLANS[plan])):
                verdict = judge.judge(fault.program(), thorough=True)
                for key in ("all", plan, fault.name):
                    total[key] += 1
                    named[key] += verdict.finding is not None
                    by_effect[key] += verdict.without_order is not None
                if verdict.finding is not None:
                    kinds[verdict.finding.kind] += 1
                    continue
                why = harmless(plan, fault)
                survivors[f"{case.name}, {plan}: {fault.name} ({fault.at})"] = why or "UNEXPLAINED"
                missed += [] if why else [fault]
            print(f"{case.name}, {plan}: {named['all']} of {total['all']} so far", flush=True)
    for name in total:
        print(
            f"{name:40} {named[name]:5} of {total[name]:5}, {by_effect[name]:5} by races, deadlocks and results alone"
        )
    figures: dict[str, Any] = {
        "seeded": total["all"],
        "named": named["all"],
        "named_percent": round(100 * named["all"] / total["all"], 1),
        "named_by_races_deadlocks_and_results_alone_percent": round(100 * by_effect["all"] / total["all"], 1),
        "kinds": dict(kinds.most_common()),
        "by_plan": {p: f"{named[p]} of {total[p]}" for p in PLANS},
        "by_fault": {n: f"{named[n]} of {total[n]}" for n in sorted(total) if n not in PLANS and n != "all"},
        "harmless": survivors,
    }
    record("seeded_schedules", figures)
    assert not missed, missed
    assert named["all"] >= 0.95 * total["all"]
