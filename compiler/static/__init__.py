"""Checks of a tile program at compile time, over symbolic ranks, blocks and shapes: proven, refuted with a
counterexample, or unknown.

``check(program)`` looks at every obligation that the program raises (see :data:`obligations.KINDS`):
arithmetic of our own first (prove.py, counting.py), then the corners of all bounds for a counterexample
(refute.py), then Z3 (solver.py) where the budget has room for it. Every counterexample is evaluated before it
is told.
"""

from __future__ import annotations

import time

from tilescale.compiler.findings import Finding
from tilescale.compiler.ir.program import TileProgram, Traceable
from tilescale.compiler.passes.pipeline import tile_level
from tilescale.compiler.static.bounds import bounds, counters, parts, peers
from tilescale.compiler.static.collect import Collector
from tilescale.compiler.static.coverage import coverage
from tilescale.compiler.static.judge import Judge
from tilescale.compiler.static.obligations import ALLOWED, REFUTED, Counterexample, Obligation, Obligations
from tilescale.compiler.static.overlap import overlaps
from tilescale.compiler.static.parallel import collisions
from tilescale.compiler.static.prove import Clock, OutOfTime
from tilescale.compiler.static.waits import waits

#: what a compilation may spend, in milliseconds, and what `tilescale check` does
COMPILE_BUDGET, CHECK_BUDGET = 100.0, 10_000.0
#: below so much the solver stays away: importing it alone takes most of a compilation's budget
SOLVER_BUDGET = 1_000.0


def check(
    program: TileProgram | Traceable,
    budget_ms: float = CHECK_BUDGET,
    *,
    ranks: int | None = None,
    world: int | None = None,
    values: dict[str, int] | None = None,
) -> Obligations:
    """Looks at every obligation of a kernel.

    Args:
        program: a ``@T.prim_func`` or a traced program.
        budget_ms: milliseconds; what is not decided by then is unknown.
        ranks: how many ranks the kernel runs on; open without. world: the most that it may run on (a team may
            have fewer).
        values: numbers and extents that are known, by the names of parameters and of ``T.dynamic``.
    """
    start = time.perf_counter()
    clock = Clock(budget_ms)
    out = Obligations()
    try:
        collector = Collector(tile_level(program), 1 if world == 1 else ranks, world, values or {}, clock)
        judge = Judge(collector.terms, collector.run(), clock)
        asked = (
            peers(judge),
            bounds(judge, out),
            counters(judge),
            collisions(judge),
            overlaps(judge),
            waits(judge),
            coverage(judge),
            parts(judge),
        )
        for found in asked:
            for made in found:
                out.items.append(made)
                if len(out.items) % 64 == 0:
                    clock.check()
        if judge.open and budget_ms >= SOLVER_BUDGET:
            from tilescale.compiler.static.solver import attach

            attach(judge)
            judge.again()
    except OutOfTime:
        pass
    out.milliseconds = (time.perf_counter() - start) * 1e3
    out.out_of_time = clock.left < 0
    return out


def first_refuted(
    program: TileProgram | Traceable,
    ranks: int | None = None,
    world: int | None = None,
    budget_ms: float = COMPILE_BUDGET,
) -> Obligation | None:
    """The first obligation that is refuted for whatever arguments the kernel is called with: on ``ranks``
    ranks, or on whatever number up to ``world``. Of what a launch defines as dropped (ALLOWED), `tilescale
    check` alone tells."""
    found = [
        o for o in check(program, budget_ms, ranks=ranks, world=world).of(REFUTED) if o.kind not in ALLOWED
    ]
    return found[0] if found else None


def require(
    program: TileProgram | Traceable,
    ranks: int | None = None,
    world: int | None = None,
    budget_ms: float = COMPILE_BUDGET,
) -> None:
    """What a compilation asks: stops it where an obligation is refuted for whatever arguments the kernel is
    called with.

    Raises:
        TileValueError: at the statement, with the counterexample.
    """
    found = first_refuted(program, ranks, world, budget_ms)
    if found is not None:
        raise found.error()


def static_report(
    program: TileProgram | Traceable, ranks: int | None = None, values: dict[str, int] | None = None
) -> list[Finding]:
    """What `tilescale check` says beside its runs: every refuted obligation as a finding."""
    return [o.finding() for o in check(program, CHECK_BUDGET, ranks=ranks, values=values).of(REFUTED)]


__all__ = [
    "Counterexample",
    "Finding",
    "Obligation",
    "Obligations",
    "check",
    "first_refuted",
    "require",
    "static_report",
]
