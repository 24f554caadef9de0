"""What GPUs' schedules make of programs is right, and a wrong one is found without a GPU: faults of products
and stores in flight, one of each sort here; all of them are in tests/bench/bench_seeded_gpu.py, whose figures
are kept."""

from __future__ import annotations

from collections import defaultdict

import pytest

from tests.unit.passes.seeded import Case, Fault, Judge
from tests.unit.passes.seeded_gpu import CASES, HOPPER, harmless, seeded


@pytest.fixture(scope="module")
def judges() -> dict[str, Judge]:
    return {case.name: Judge(case) for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_the_schedule_itself_is_right(case: Case, judges: dict[str, Judge]):
    program = judges[case.name].scheduled(HOPPER)
    text = program.func.script()
    assert not program.notes and '"ts.wgmma"' in text or "ts.wgmma(" in text
    assert judges[case.name].judge(program).finding is None


def test_seeded_faults_are_named(judges: dict[str, Judge]):
    """Of each sort one, of another case each time; the sorts that seeded.py has are tried there."""
    sorts: dict[str, list[tuple[Case, Fault]]] = defaultdict(list)
    for case in CASES:
        for fault in seeded(judges[case.name].scheduled(HOPPER)):
            sorts[fault.name].append((case, fault))
    assert len(sorts) >= 60
    own = [name for name in sorts if any(word in name for word in ("product", "store", "late", "in flight"))]
    assert len(own) >= 15
    missed = []
    for k, name in enumerate(sorted(own)):
        case, fault = sorts[name][5 * k % len(sorts[name])]
        if judges[case.name].judge(fault.program()).finding is None and not harmless(case, fault):
            missed.append(f"{name} in {case.name} ({fault.at})")
    assert not missed, missed
