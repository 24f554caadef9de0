"""One role that copies ahead: before it computes round n, it issues the copies of round n + depth - 1
(cp.async and its groups).

    the first depth - 1 rounds: acquire, copies, commit loop n: wait(n); where there is such a round:
    acquire(n + depth - 1), its copies, commit; compute; release(n)

Acquire stands behind the wait of round n, as where threads synchronize once a round: that barrier says to
everyone that round n has come and that round n - 1, whose stage is filled next, has been read. Everything
else stays in program order, so only what the loop itself does can be overtaken by its copies; `unfit` says
where it must not be.
"""

from __future__ import annotations

from typing import Any

from tilescale.compiler.ir.operations import REGISTRY, effects_of
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.passes.roles import (
    Unfit,
    calls,
    known_early,
    polls,
    releases,
    renewed,
    root,
    steady,
    synchronizes,
    views,
    waits,
    writes_locally,
)  # fmt: skip
from tilescale.compiler.tvm_compat import ir, structural_walk, tirx


def unfit(
    program: TileProgram, loop: Any, stmts: list[Any], first: int, last: int, buffers: list[Any]
) -> str | None:
    """Why the copies among statements ``first`` to ``last`` of a loop, into ``buffers``, must not run ahead;
    None where they may."""
    if not (isinstance(loop.min, tirx.IntImm) and int(loop.min.value) == 0):
        return "the loop does not begin at zero"
    head, others = stmts[first : last + 1], [*stmts[:first], *stmts[last + 1 :]]
    if any(waits(s) for s in others):
        return (
            "a wait in the loop that does not stand directly in front of the copies may guard those of "
            "later rounds"
        )
    guards = [c for s in head for c in calls(s) if c.op.name == "ts.wait"]
    if guards and any(releases(s) for s in stmts):
        return "the copies wait for others, who may wait for a signal of this loop"
    if not all(steady(program, c) for c in guards):
        return "the condition of a wait in front of the copies may become false again"
    if any(synchronizes(c) or polls(c) for s in stmts for c in calls(s)):
        return "a barrier, or an atomic operation that is looked at, stands in the loop"
    copies = [
        s
        for s in head
        for c in calls(s)
        if REGISTRY[c.op.name].moves and any(c.args[1].source.same_as(b) for b in buffers)
    ]
    sources = {
        root(program.func.body, c.args[0].source)
        for s in copies
        for c in calls(s)
        if REGISTRY[c.op.name].moves
    }
    if (
        written := next((w for s in stmts if (w := writes_locally(s, sources)) is not None), None)
    ) is not None:
        return f"{written.name} is written in the loop and copied in it"
    ours = [s for s in head if s in copies or waits(s) or isinstance(s, tirx.Bind)]
    needed = [*_bindings(ours, stmts[:first]), *ours]
    try:
        known_early(program, sequence(needed), _constant(program, needed, stmts))
    except Unfit as why:
        return str(why)
    return None


def runs_ahead(program: TileProgram, stmts: list[Any], made: Any, source: Any) -> bool:
    """Whether what a copy ``made`` of ``source`` looks up is the same rounds ahead of its place, in a loop
    of ``stmts``."""
    needed = [*_bindings([made], stmts), made]
    if any(writes_locally(s, {source}) is not None for s in stmts):
        return False
    try:
        known_early(program, sequence(needed), _constant(program, needed, stmts))
    except Unfit:
        return False
    return True


def _constant(program: TileProgram, needed: list[Any], stmts: list[Any]) -> set[Any]:
    """Variables, and tiles in shared memory, that ``needed`` reads and no statement of the loop writes."""
    loaded: set[Any] = set()
    structural_walk(sequence(needed), (ir.TensorLoad, lambda e: loaded.add(e.source)))
    tiles = {b for b in loaded if b.ty.storage_scope == "shared"} - _changing(program)
    found = tiles | {b for b in loaded if b.ty.storage_scope == "local.var"}
    return {b for b in found if all(writes_locally(s, {b}) is None for s in stmts)}


def _changing(program: TileProgram) -> set[Any]:
    """Tiles that may change where no statement of a loop writes them: other blocks of a cluster, an engine
    that a wait in the loop is for, or a view under another name may."""
    over = views(program.func.body)
    tiles = {*over, *over.values()}
    for call in calls(program.func.body):
        for access in effects_of(call):
            if access.mode != "read" and (access.asynchronous or access.proxy):
                tiles.add(access.region.source)
    if program.launch.cluster != (1, 1, 1):
        structural_walk(program.func.body, (tirx.AllocBuffer, lambda s: tiles.add(s.buffer)))
    return tiles


def prefetched(
    loop: Any,
    before: list[Any],
    fill: list[Any],
    awaited: Any,
    compute: list[Any],
    depth: int,
    behind: bool = False,
) -> Any:
    """The loop whose rounds consist of ``before``, ``fill``, ``awaited`` and ``compute``, with ``fill``
    ``depth`` - 1 rounds ahead; ``behind``: at the end of a round, not in front of its ``compute``."""
    distance = tirx.IntImm("int32", depth - 1)
    count = tirx.Var("rounds", "int32")
    needed = [*_bindings(fill, before), *fill]

    def fetch(round_: Any) -> Any:
        return renewed(sequence(needed), {loop.loop_var: round_})

    first = tirx.Var(loop.loop_var.name, "int32")
    plain = {"ts.kind": "serial"}
    prologue = tirx.For(
        first, loop.min, tirx.min(distance, count), loop.kind, fetch(first), annotations=plain, span=loop.span
    )
    later = loop.loop_var + distance
    # where the author issues them (passes/manual_stages.py)
    place = len(compute) if behind else int(loop.annotations.get("ts.issue", 0))
    issued = tirx.IfThenElse(later < count, fetch(later), None, loop.span)
    body = [*before, awaited, *compute[:place], issued, *compute[place:]]
    main = tirx.For(
        loop.loop_var,
        loop.min,
        count,
        loop.kind,
        sequence(body),
        annotations=dict(loop.annotations),
        span=loop.span,
    )
    return sequence([tirx.Bind(count, loop.extent, loop.span), prologue, main])


def _bindings(stmts: list[Any], before: list[Any]) -> list[Any]:
    """The names among ``before`` that ``stmts`` need, in order."""
    needed: set[Any] = set()
    for s in stmts:
        structural_walk(s, (ir.Var, needed.add))
    found = []
    for s in reversed(before):
        if isinstance(s, tirx.Bind) and s.var in needed:
            structural_walk(s.value, (ir.Var, needed.add))
            found.append(s)
    return found[::-1]
