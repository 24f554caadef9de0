"""A wrong schedule is found without a GPU: faults seeded into scheduled programs, one of each sort here; all
of them are in tests/bench/bench_seeded.py, whose figures are kept."""

from __future__ import annotations

from collections import defaultdict

import pytest

from tests.unit.passes.seeded import CASES, PLANS, Case, Fault, Judge, harmless, seeded

#: the plans of which each sort of fault is tried
TRIED = ("2 stages, two roles", "3 stages, copies ahead")


@pytest.fixture(scope="module")
def judges() -> dict[str, Judge]:
    return {case.name: Judge(case) for case in CASES}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_the_schedule_itself_is_right(case: Case, plan: str, judges: dict[str, Judge]):
    judge = judges[case.name]
    program = judge.scheduled(PLANS[plan])
    assert not program.schedule.kept and [r.form for r in program.schedule.rings] != ["in_order"]
    assert judge.judge(program).finding is None


@pytest.mark.parametrize("plan", TRIED)
def test_seeded_faults_are_named(plan: str, judges: dict[str, Judge]):
    sorts: dict[str, list[tuple[Case, Fault]]] = defaultdict(list)
    for case in CASES:
        for fault in seeded(judges[case.name].scheduled(PLANS[plan])):
            sorts[fault.name].append((case, fault))
    assert len(sorts) >= 40
    found = []
    for k, (name, faults) in enumerate(sorted(sorts.items())):
        case, fault = faults[7 * k % len(faults)]
        finding = judges[case.name].judge(fault.program()).finding
        assert finding is not None or harmless(plan, fault), (
            f"{name} in {case.name} ({fault.at}) is not found"
        )
        found.append(finding is not None)
    assert sum(found) >= 0.95 * len(found)
