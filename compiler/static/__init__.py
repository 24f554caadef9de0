"""Checks of a tile program at compile time, over symbolic ranks, blocks and shapes: proven, refuted with a
counterexample, or unknown.

``check(program)`` looks at every obligation that the program raises (see :data:`obligations.KINDS`):
arithmetic of our own first (prove.py, counting.py), then the corners of all bounds for a counterexample
(refute.py), then Z3 (solver.py) where the budget has room for it. Every counterexample is evaluated before it
is told.
"""

from __future__ import annotations

import time

from tilescale import log
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
from tilescale.compiler.static.prove import Budget, OverBudget
from tilescale.compiler.static.waits import waits

#: what a compilation may spend, in steps (see prove.Budget), 0.15 s at most; and what `tilescale check` does,
#: 15 s at most
COMPILE_BUDGET, CHECK_BUDGET = 20_000, 2_000_000
#: below so much the solver stays away: importing it alone takes most of a compilation's budget
SOLVER_BUDGET = 200_000


def check(
    program: TileProgram | Traceable,
    steps: int = CHECK_BUDGET,
    *,
    ranks: int | None = None,
    world: int | None = None,
    values: dict[str, int] | None = None,
) -> Obligations:
    """Looks at every obligation of a kernel.

    Args:
        program: a ``@T.prim_func`` or a traced program.
        steps: the budget; what is not decided by then is unknown. Nothing that is found depends on time.
        ranks: how many ranks the kernel runs on; open without. world: the most that it may run on (a team may
            have fewer).
        values: numbers and extents that are known, by the names of parameters and of ``T.dynamic``.
    """
    start = time.perf_counter()
    budget = Budget(steps)
    made = tile_level(program)
    out = Obligations(name=made.name)
    try:
        collector = Collector(made, 1 if world == 1 else ranks, world, values or {}, budget)
        judge = Judge(collector.terms, collector.run(), budget)
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
            out.items.extend(found)
        if judge.open and steps >= SOLVER_BUDGET:
            from tilescale.compiler.static.solver import attach

            attach(judge)
            judge.again()
    except OverBudget:
        pass
    out.milliseconds = (time.perf_counter() - start) * 1e3
    out.steps, out.budget, out.cut_short = budget.spent, steps, budget.left < 0
    return out


def first_refuted(
    program: TileProgram | Traceable,
    ranks: int | None = None,
    world: int | None = None,
    steps: int = COMPILE_BUDGET,
) -> Obligation | None:
    """The first obligation that is refuted for whatever arguments the kernel is called with: on ``ranks``
    ranks, or on whatever number up to ``world``. Of what a launch defines as dropped (ALLOWED), `tilescale
    check` alone tells. Where the budget ends before all is looked at, the log has a warning."""
    return _first(_asked(program, steps, ranks, world))


def _asked(program: TileProgram | Traceable, steps: int, ranks: int | None, world: int | None) -> Obligations:
    """What a compilation asks, with a warning where it was not asked to the end. Of the library's own kernels
    `tilescale check` tells, and their notes."""
    said = check(program, steps, ranks=ranks, world=world)
    if said.cut_short and _first(said) is None and log.of_caller():
        more = CHECK_BUDGET // COMPILE_BUDGET
        log.say("warning", f"{said.unfinished()}; `tilescale check` has {more} times as many", once=True)
    return said


def _first(said: Obligations) -> Obligation | None:
    return next((o for o in said.of(REFUTED) if o.kind not in ALLOWED), None)


def require(
    program: TileProgram | Traceable,
    ranks: int | None = None,
    world: int | None = None,
    steps: int = COMPILE_BUDGET,
) -> Obligations:
    """What a compilation asks: stops it where an obligation is refuted for whatever arguments the kernel is
    called with. Gives what is known else.

    Raises:
        TileValueError: at the statement, with the counterexample.
    """
    said = _asked(program, steps, ranks, world)
    if (found := _first(said)) is not None:
        raise found.error()
    return said


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
