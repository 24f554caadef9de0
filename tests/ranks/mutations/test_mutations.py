"""Mutants of the examples, and of the repaired kernels of the corpus, are named by `check`; those that are
not are listed with the reason why they are harmless.

A sample of the examples' runs always, every mutant under the marker slow.
"""

from __future__ import annotations

import pytest

from tests.ranks.mutations.mutate import mutants
from tests.ranks.mutations.subjects import SUBJECTS, Subject
from tests.ranks.mutations.twins import TWINS
from tilescale.compiler.checks.run import check

SEEDS = {"adversary": 4, "random": 2}


def kinds_of(
    subject: Subject, ranks: tuple[int, ...] = (), seeds: dict[str, int] = SEEDS, every: int = 1
) -> dict[str, set[str]]:
    """For each ``every``th mutant of a subject the kinds of findings that name it, on the number of ranks
    that comes first; empty where it survives all. Schedules are tried one after another until one names
    it."""
    found: dict[str, set[str]] = {}
    for n in ranks or subject.ranks:
        kernel, args = subject.make(n)
        for schedule, count in seeds.items():
            report = check(kernel, n, args, schedule=schedule, seeds=count)
            assert report, report
        for mutant in mutants(kernel)[::every]:
            for schedule, count in seeds.items():
                if not found.get(str(mutant)):
                    found[str(mutant)] = check(mutant.program, n, args, schedule=schedule, seeds=count).kinds
    return found


@pytest.mark.slow
@pytest.mark.parametrize("subject", (*SUBJECTS, *TWINS), ids=lambda s: s.name)
def test_mutants_are_named(subject: Subject):
    found = kinds_of(subject)
    assert {name for name, kinds in found.items() if not kinds} == set(subject.harmless)


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda s: s.name)
def test_some_mutants_are_named(subject: Subject):
    """Every fourth mutant, on three ranks."""
    found = kinds_of(subject, ranks=(3,), seeds={"adversary": 2}, every=4)
    survivors = {name for name, kinds in found.items() if not kinds}
    assert survivors <= set(subject.harmless)


def test_a_mutant_is_what_it_says():
    """The statement that is deleted or moved, and nothing else."""
    (subject,) = (s for s in SUBJECTS if s.name == "05_ring_shift")
    kernel, _ = subject.make(2)
    made = {str(m): m.program.func.script() for m in mutants(kernel)}
    put = "T.copy(A[i * block : (i + 1) * block], here, dst=(rank + 1) % n, signal=arrived[i])"
    assert set(made) == {
        f"signal of {put}: deleted",
        f"signal of {put}: moved up",
        f"signal of {put}: moved down",
        "wait T.wait(arrived[i]): deleted",
        "wait T.wait(arrived[i]): moved up",
        "wait T.wait(arrived[i]): moved down",
        "wait T.wait(arrived[i]): one fewer",
    }
    order = {
        name: [op for op in ("ts.remote_copy", "ts.signal", "ts.wait") if op in text]
        for name, text in made.items()
    }
    assert order["wait T.wait(arrived[i]): deleted"] == ["ts.remote_copy"]
    first = made[f"signal of {put}: moved up"]
    assert first.index("ts.signal") < first.index("ts.remote_copy") < first.index("ts.wait")
    last = made[f"signal of {put}: moved down"]
    assert last.index("ts.remote_copy") < last.index("ts.wait") < last.index("ts.signal")
    wait = made["wait T.wait(arrived[i]): moved down"]
    assert wait.rindex("ts.remote_copy") < wait.index("ts.wait")
    assert len({*made.values()}) == len(made)
