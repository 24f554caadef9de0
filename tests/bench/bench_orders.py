"""A thousand generated programs of two to four ranks (tests/fuzz/orders.py), judged by an oracle of their own
(tests/fuzz/oracle.py): how many of their faults each schedule of the simulator names. Bar: all schedules
together miss none, and say nothing that is not so. Figures: tests/bench/results/orders.json."""

from __future__ import annotations

import time
from typing import Any

from tests.bench.record import record
from tests.fuzz.judge import BOUND, FAULTS, SCHEDULES, SEEDS, judge

PROGRAMS = 1000


def test_orders() -> None:
    start, failures = time.perf_counter(), {}
    faults = dict.fromkeys(FAULTS, 0)
    missed: dict[str, dict[str, list[int]]] = {
        schedule: {fault: [] for fault in FAULTS} for schedule in SCHEDULES
    }
    clean = incomplete = states = 0
    for seed in range(PROGRAMS):
        verdict = judge(seed)
        clean += not verdict.faults
        incomplete += not verdict.complete
        states += verdict.truth.states
        for fault in verdict.faults:
            faults[fault] += 1
            for schedule, named in verdict.named.items():
                if fault not in named:
                    missed[schedule][fault].append(seed)
        if verdict.failure:
            failures[seed] = verdict.failure
    figures: dict[str, Any] = {
        "programs": PROGRAMS,
        "clean": clean,
        "with": faults,
        "states": states,
        "seeds": SEEDS,
        "bound": BOUND,
        "not_explored_whole": incomplete,
        "missed_by": missed,
        "missed_by_all_or_untrue": failures,
        "seconds": time.perf_counter() - start,
    }
    record("orders", figures)
    print(figures)
    assert not failures
