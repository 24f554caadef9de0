"""How many mutants `check` names, by what was done to them: those of the examples, and those of the repaired
kernels of the corpus; the survivors with the reason why they are harmless. Bar: 95 % of those that are
faults. Figures: tests/bench/results/mutations.json."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from tests.bench.record import record
from tests.ranks.mutations.subjects import SUBJECTS, Subject
from tests.ranks.mutations.test_mutations import kinds_of
from tests.ranks.mutations.twins import TWINS


def figures_of(subjects: Iterable[Subject]) -> dict[str, Any]:
    """Counts, and the list of survivors; a survivor without a reason counts as a fault that was missed."""
    made: Counter[str] = Counter()
    named: Counter[str] = Counter()
    only_unawaited, survivors, of = 0, [], {}
    for subject in subjects:
        found = kinds_of(subject)
        of[subject.name] = [sum(map(bool, found.values())), len(found)]
        for name, kinds in found.items():
            what = name.rsplit(": ", 1)[1]
            made[what] += 1
            named[what] += bool(kinds)
            only_unawaited += kinds == {"unawaited"}
            if not kinds:
                survivors.append(
                    {"kernel": subject.name, "mutant": name, "harmless": subject.harmless.get(name)}
                )
    faults = made.total() - sum(s["harmless"] is not None for s in survivors)
    return {
        "mutants": made.total(), "named": named.total(), "named_of_all": named.total() / made.total(),
        "faults": faults, "named_of_faults": named.total() / faults,
        "by_mutation": {what: [named[what], n] for what, n in made.items()},
        "named_by_the_unawaited_signal_alone": only_unawaited, "by_kernel": of, "survivors": survivors,
    }  # fmt: skip


def test_mutations() -> None:
    figures = {"bar": 0.95, "examples": figures_of(SUBJECTS), "twins": figures_of(TWINS)}
    record("mutations", figures)
    for which in ("examples", "twins"):
        print(
            which,
            {
                k: figures[which][k]
                for k in ("mutants", "named", "named_of_all", "named_of_faults", "by_mutation")
            },
        )
        assert figures[which]["named_of_faults"] >= 0.95
