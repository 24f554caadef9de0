"""A wrong lowering for Hopper is found without a GPU: faults of single instructions, one of each sort here;
all of them are in tests/bench/bench_seeded_gpu.py, whose figures are kept."""

from __future__ import annotations

from tests.unit.cuda.seeded_threads import CASES, Case, Fault, Judge, harmless, seeded


def test_seeded_faults_are_found():
    """Each sort in the first case that has it."""
    sorts: dict[str, tuple[Case, Judge, Fault]] = {}
    for case in CASES[:1]:
        judge = Judge(case)
        assert not judge.program.notes and not judge.judge(judge.kernel, 4).found
        for fault in seeded(judge.kernel):
            sorts.setdefault(fault.name, (case, judge, fault))
    assert len(sorts) >= 36, sorted(sorts)
    missed, named = [], 0
    for name, (case, judge, fault) in sorts.items():
        verdict = judge.judge(fault.kernel)
        named += bool(verdict.said)
        if not verdict.found and not harmless(case, fault):
            missed.append(f"{name} ({fault.at})")
    assert not missed, missed
    assert named >= 0.7 * len(sorts)  # the others compute something else, in order
