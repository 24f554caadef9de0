"""A wrong schedule of several ranks is found without a GPU: faults of single statements, one of each sort here;
all of them are in tests/bench/bench_seeded_gpu.py, whose figures are kept."""

from __future__ import annotations

from tests.unit.cuda.seeded_ranks import CASES, Case, Fault, found, harmless, seeded


def test_seeded_faults_are_found():
    """Each sort in the first case that has it."""
    sorts: dict[str, tuple[Case, Fault]] = {}
    for case in CASES:
        assert not found(case, case.program, 2), case.name
        sorts = {f.name: (case, f) for f in seeded(case) if not harmless(case, f)} | sorts
    assert len(sorts) >= 24, sorted(sorts)
    missed = [f"{case.name}, {name}" for name, (case, f) in sorts.items() if not found(case, f.program)]
    assert not missed, missed
