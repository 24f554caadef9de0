"""How many mutants of the examples `check` names, by what was done to them; the survivors with the reason why they are harmless.
Bar: 95 % of those that are faults. Figures: tests/bench/results/mutations.json."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.bench.record import record
from tests.ranks.mutations.subjects import SUBJECTS
from tests.ranks.mutations.test_mutations import kinds_of


def test_mutations() -> None:
    made: Counter[str] = Counter()
    named: Counter[str] = Counter()
    only_unawaited, survivors, of = 0, [], {}
    for subject in SUBJECTS:
        found = kinds_of(subject)
        of[subject.name] = {"mutants": len(found), "named": sum(map(bool, found.values()))}
        for name, kinds in found.items():
            what = name.rsplit(": ", 1)[1]
            made[what] += 1
            named[what] += bool(kinds)
            only_unawaited += kinds == {"unawaited"}
            if not kinds:
                survivors.append({"example": subject.name, "mutant": name, "harmless": subject.harmless.get(name, "NO REASON")})
    total, found_total = made.total(), named.total()
    faults = total - sum(s["harmless"] != "NO REASON" for s in survivors)
    figures: dict[str, Any] = {
        "mutants": total, "named": found_total, "named_of_all": found_total / total,
        "faults": faults, "named_of_faults": found_total / faults, "bar": 0.95,
        "by_mutation": {what: {"mutants": n, "named": named[what]} for what, n in made.items()},
        "named_by_the_unawaited_signal_alone": only_unawaited, "by_example": of, "survivors": survivors,
    }  # fmt: skip
    record("mutations", figures)
    print({key: figures[key] for key in ("mutants", "named", "named_of_all", "named_of_faults", "by_mutation")})
    assert figures["named_of_faults"] >= 0.95
