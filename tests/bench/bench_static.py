"""The static checks over the examples' kernels: how many obligations are proven, and how long a compilation
spends on them.

    make bench ARGS="-k static"

Bars: 90 % proven, none refuted; 100 ms in a compilation. Milliseconds are the processor's, of a second check
in one process.
"""

from __future__ import annotations

import json
import time
from typing import Any

from tests.bench.record import record
from tests.unit.static.example_kernels import RANKS, alone, together
from tilescale.compiler.static import COMPILE_BUDGET, check
from tilescale.compiler.static.obligations import PROVEN, REFUTED, UNKNOWN


def test_static() -> None:
    kinds: dict[str, dict[str, int]] = {}
    took: dict[str, float] = {}
    left: set[str] = set()
    inside = guarded = 0
    for n in RANKS:
        for name, kernel in [*(alone() if n == 1 else ()), *together(n)]:
            program = kernel.trace()
            check(program, COMPILE_BUDGET, ranks=n)
            start = time.process_time()
            said = check(program, COMPILE_BUDGET, ranks=n)
            took[f"{name} on {n}"] = (time.process_time() - start) * 1e3
            inside, guarded = inside + said.inside, guarded + said.guarded
            for kind, row in said.counts.items():
                for status, count in row.items():
                    kinds.setdefault(kind, {PROVEN: 0, REFUTED: 0, UNKNOWN: 0})[status] += count
            left |= {
                f"{name} on {n}, {o.kind} at {o.loc and o.loc.line}: {o.reason}" for o in said.of(UNKNOWN)
            }
    total = {status: sum(row[status] for row in kinds.values()) for status in (PROVEN, REFUTED, UNKNOWN)}
    milliseconds = sorted(took.values())
    slowest = max(took, key=lambda name: took[name])
    figures: dict[str, Any] = {
        "obligations": kinds,
        "total": total,
        "proven_share": round(total[PROVEN] / sum(total.values()), 4),
        "tensor_accesses": {"inside": inside, "guarded": guarded},
        "unknown": sorted(left),
        "processor_milliseconds": {
            "median": round(milliseconds[len(milliseconds) // 2], 2),
            "most": round(milliseconds[-1], 2),
            "slowest": slowest,
        },
    }
    record("static", figures)
    print(json.dumps(figures, indent=2))
    assert figures["proven_share"] >= 0.9 and not total[REFUTED]
