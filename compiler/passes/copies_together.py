"""Copies of tensors into shared tiles that threads make in turn, side by side: in a loop that has no ring
(copies under a condition, no stages asked for) a later copy goes up behind an earlier one where nothing in
between keeps it. Loads of both are under way at once then, and a round waits for memory once; threads cannot
issue the second one's early by themselves, since a barrier stands in between.

    K → shared; S = Q Kᵀ; softmax; V → shared; O += P V       becomes
    K → shared; V → shared; S = Q Kᵀ; softmax; O += P V

Tiles that a loop fills are there for the whole loop (allocate_shared.py), so no more memory is in use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilescale.compiler.ir.nests import is_nest
from tilescale.compiler.ir.operations import name_of
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.passes.commuting import Facts, between, facts
from tilescale.compiler.passes.copy_nests import copy_nest
from tilescale.compiler.passes.products import flat, has_producer
from tilescale.compiler.passes.roles import views
from tilescale.compiler.tvm_compat import structural_map, tirx


def copies_together(program: TileProgram) -> TileProgram:
    """The program with such copies side by side, where no producer makes copies."""
    if has_producer(program):
        return program
    bases = views(program.func.body)

    def arranged(s: Any) -> Any:
        stmts = flat(s)
        if sum(map(_brings, stmts)) < 2:
            return s
        made = _together(stmts, bases)
        return s if all(a is b for a, b in zip(made, stmts, strict=True)) else sequence(made)

    def loop(s: Any) -> Any:
        body = s.body if is_nest(s) else structural_map(s.body, (tirx.SeqStmt, arranged))
        if body.same_as(s.body):
            return s
        return tirx.For(
            s.loop_var, s.min, s.extent, s.kind, body, annotations=dict(s.annotations), span=s.span
        )

    body = structural_map(program.func.body, (tirx.For, loop))
    return program if body.same_as(program.func.body) else program.with_body(body)


def _together(stmts: list[Any], bases: Mapping[Any, Any]) -> list[Any]:
    """The statements of a list, each copy as far up as another copy that it can stand behind."""
    made: list[tuple[Any, Facts]] = []
    for s in stmts:
        own = facts([s], bases)
        place = _place(made, s, own) if _brings(s) else None
        made.insert(len(made) if place is None else place, (s, own))
    return [s for s, _ in made]


def _place(before: list[tuple[Any, Facts]], copy: Any, own: Facts) -> int | None:
    """Where a copy may stand, directly behind the first of the copies above it that it reaches; None where it
    reaches none."""
    place = None
    for k in range(len(before) - 1, -1, -1):
        s, theirs = before[k]
        if _brings(s):
            place = k + 1
        if between(theirs, own) or _declares(s) & (own.read | own.written):
            break
    return place


def _declares(s: Any) -> set[Any]:
    return {s.buffer} if isinstance(s, tirx.AllocBuffer | tirx.DeclBuffer) else set()


def _brings(s: Any) -> bool:
    """Whether a statement is a copy of the block's threads from a tensor into a shared tile, whose place its
    author has not fixed."""
    if isinstance(s, tirx.For):
        nest = copy_nest(s) if is_nest(s) else None
        return nest is not None and "ts.begun" not in (s.annotations or {})
    if name_of(s) != "copy":
        return False
    call = s.value
    source, tile = (r.source.ty.storage_scope for r in call.args[:2])
    return (
        source.startswith("global")
        and tile == "shared"
        and str(call.attrs["executor"]) == "block"
        and "pinned" not in call.attrs
    )
