"""Every fault of the corpus is found by name under every schedule, and nothing else is; no finding in any
repaired twin."""

from __future__ import annotations

import pytest

from tests.ranks.faulty.kernels import CASES, Case

#: a few seeds always, the hundred of the promise under the marker slow
SEEDS = [3, pytest.param(100, marks=pytest.mark.slow)]


def test_every_fault_is_there_once():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names) >= 44
    assert all(case.build.__doc__ and case.lines for case in CASES)


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_the_fault_is_named_and_the_twin_is_clean(case: Case, seeds: int):
    for schedule in ("random", "adversary"):
        report = case.check(True, schedule, seeds)
        assert case.named(report), (
            f"{case.kind} with {case.says} expected, at lines {sorted(case.lines)}:\n{report}"
        )
        report = case.check(False, schedule, seeds)
        assert report, report


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_the_schedule_keeps_the_fault_and_adds_none(case: Case):
    """With roles and rings the fault is found at its own statements as well, and both levels of the twin
    agree."""
    report = case.check(True, "adversary", 3, "scheduled")
    assert report.findings and all(map(case.belongs, report.findings)), report
    report = case.check(False, "adversary", 3, "both")
    assert report, report
