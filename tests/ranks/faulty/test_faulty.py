"""Every fault of the corpus is found by name under every schedule; no finding in any repaired twin."""

from __future__ import annotations

import pytest

from tests.ranks.faulty.kernels import CASES, Case
from tilescale.compiler.sim.run import check

SEEDS = 12


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("schedule", ["round_robin", "random", "adversary"])
def test_the_fault_is_named(case: Case, schedule: str):
    report = check(case.build(case.ranks, True), case.ranks, case.args(case.ranks), schedule=schedule, seeds=1)
    found = [f for f in report.findings if f.kind == case.kind]
    assert found, f"{case.kind} expected:\n{report}"
    text = str(found[0])
    assert all(word in text for word in case.says), text
    assert found[0].loc is not None and found[0].loc.file.endswith("kernels.py"), text


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_the_twin_is_clean(case: Case):
    for schedule in ("random", "adversary"):
        report = check(case.build(case.ranks, False), case.ranks, case.args(case.ranks), schedule=schedule, seeds=SEEDS)
        assert report, report
