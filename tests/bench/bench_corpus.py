"""The corpus of faulty kernels over 100 seeds of each schedule: how long it takes, and in how many of a
hundred single launches each fault is named. Bar: 5 minutes on 2 cores (this is one process). Figures:
tests/bench/results/corpus.json."""

from __future__ import annotations

import time
from typing import Any

from tests.bench.record import record
from tests.ranks.faulty.kernels import CASES, Case
from tilescale.compiler.checks.run import launch

SEEDS = 100


def launches_that_name(case: Case, schedule: str) -> int:
    """Of ``SEEDS`` launches, one a seed."""
    kernel, args = case.build(case.ranks, True), case.args(case.ranks)
    if isinstance(kernel, list):
        return SEEDS  # ranks that launch different programs are compared before anything runs
    return sum(
        case.named(launch(kernel, case.ranks, args, order=schedule, seed=s, limit=case.limit).report)
        for s in range(SEEDS)
    )


def test_corpus() -> None:
    start, cpu = time.perf_counter(), time.process_time()
    for case in CASES:
        for schedule in ("random", "adversary"):
            assert case.named(case.check(True, schedule, SEEDS)), case.name
            assert case.check(False, schedule, SEEDS), case.name
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    share: dict[str, Any] = {
        c.name: {s: launches_that_name(c, s) for s in ("random", "adversary")} for c in CASES
    }
    less = {name: by for name, by in share.items() if min(by.values()) < SEEDS}
    kinds: dict[str, int] = {}
    for case in CASES:
        kinds[case.kind] = kinds.get(case.kind, 0) + 1
    figures = {
        "faults": len(CASES),
        "kinds": kinds,
        "seeds": SEEDS,
        "seconds": seconds,
        "cpu_seconds": cpu,
        "bar_s": 300,
        "not_in_every_launch": less,
    }
    record("corpus", figures)
    print({k: figures[k] for k in ("faults", "seconds", "not_in_every_launch")})
    assert seconds < 300
