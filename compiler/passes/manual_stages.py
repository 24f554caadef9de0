"""``T.Pipelined(order=…, stage=…)``: a schedule that the author wrote becomes the order of the loop's body
and what its copies may do.

Each statement of the body has a stage and a place in the order of issue; values that are only named (``base =
k * 64``) have none, and are computed in front of all. Copies into shared tiles that stand in an earlier stage
than the rest run ahead, through a ring of ``num_stages`` tiles (without it one more than the stages lie
apart). Everything else runs in the latest stage, in its order. A copy in the latest stage stays where it is.
Results are those of the body as it is written: an order that would change them is refused, on every target.

Computation in an earlier stage than the latest (attention: the next round's scores beside this one's second
product) must be possible with the tiles that there are: `_check_rounds`. The body stays as it is written
then, and `overlap_products` moves products across rounds where the target gains by it: rings are cut from
the whole loop, and a round that stood apart in front of it would have none.

On GPUs where one role copies ahead (cp.async) the copies of a later round are issued where the first of them
stands in the order; a producer of its own (TMA) issues them beside the computation, whatever their place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilescale import log
from tilescale.compiler.ir.buffers import buffer_uses
from tilescale.compiler.ir.operations import name_of
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.source import loc_of
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.passes import commuting, filled
from tilescale.compiler.passes.products import flat, touched
from tilescale.compiler.passes.roles import calls, root_in
from tilescale.compiler.tvm_compat import ir, structural_map, structural_walk, tirx
from tilescale.errors import TileError, TileValueError

#: the annotations of a loop that this takes away
ENTRIES = ("ts.stage", "ts.order", "ts.group", "ts.as_needed")


@dataclass
class Unit:
    """Statements that are scheduled as one. ``ahead``: they are a copy that runs ahead of the rest."""

    stmts: list[Any]
    order: int
    stage: int
    ahead: bool = False

    @property
    def copy(self) -> bool:
        """Whether it is one copy into a shared tile, which a ring can take."""
        return len(self.stmts) == 1 and filled.filled_tile(self.stmts[0]) is not None


def manual_stages(program: TileProgram) -> TileProgram:
    """The program with every loop in the order that its author asks for.

    Raises:
        TileValueError: entries that are not one a statement, a stage that no copy can run ahead in, an order
        that changes results.
    """
    found: list[Any] = []
    structural_walk(
        program.func.body,
        (tirx.For, lambda s: found.append(s) if "ts.stage" in (s.annotations or {}) else None),
    )
    if not found:
        return program
    work = _Reordering(program)
    body = structural_map(program.func.body, (tirx.For, work.visit))
    if work.refused is not None:
        raise work.refused
    return program.with_body(body)


class _Reordering:
    def __init__(self, program: TileProgram):
        self.uses = buffer_uses(program.func.body)
        self.bases: dict[Any, Any] = {}
        structural_walk(
            program.func.body, (tirx.DeclBuffer, lambda s: self.bases.__setitem__(s.buffer, s.data.args[0]))
        )
        self.refused: TileError | None = None

    def visit(self, loop: Any) -> Any:
        if "ts.stage" not in (loop.annotations or {}) or self.refused is not None:
            return loop
        try:
            return self._reordered(loop)
        except TileError as error:  # it must not pass through the walk
            self.refused = error
            return loop

    def _reordered(self, loop: Any) -> Any:
        lead, rest = self._apart(flat(loop.body))
        units = _units(loop, lead, rest)
        top = max(u.stage for u in units)
        rounds = any(0 <= u.stage < top and not u.copy for u in units)  # computation of several rounds in one
        for u in units:
            u.ahead = u.stage < top and not (rounds and not u.copy)
        distance = self._distance(loop, units, top)
        if rounds:
            self._check_rounds(units)
            log.say(
                "info",
                "stage= of T.Pipelined has computation in several stages: "
                "the compiler overlaps products by itself",
                once=True,
            )
        else:
            self._check_order(units)
        early = [u for u in units if u.ahead]
        late = [u for u in units if not u.ahead]
        if not rounds:
            early.sort(key=lambda u: u.order)
            late.sort(key=lambda u: u.order)
        notes = {k: v for k, v in dict(loop.annotations).items() if k not in ENTRIES}
        if not early and top >= 0:  # -1 everywhere: all is left to the compiler
            notes["ts.num_stages"] = 0
        elif loop.annotations["ts.as_needed"]:
            notes["ts.num_stages"] = distance + 1
        if place := sum(len(u.stmts) for u in late if early and u.order < early[0].order):
            notes["ts.issue"] = place
        body = [
            *lead,
            *(s for u in early for s in u.stmts),
            *(_staying(s) if early else s for u in late for s in u.stmts),
        ]
        made = tirx.For(
            loop.loop_var, loop.min, loop.extent, loop.kind, sequence(body), annotations=notes, span=loop.span
        )
        self._check_rings(made, early)
        return made

    def _apart(self, stmts: list[Any]) -> tuple[list[Any], list[Any]]:
        """What only names things, which is computed in front of the others, and the statements that have a
        place in the schedule."""
        written = {root_in(self.bases, b) for s in stmts for b in touched(s)[1]}
        lead: list[Any] = []
        rest: list[Any] = []
        for s in stmts:
            loads: list[Any] = []
            structural_walk(s, (ir.TensorLoad, lambda e, loads=loads: loads.append(e.source)))
            loads = [root_in(self.bases, b) for b in loads]
            late = {x.var for x in rest if isinstance(x, tirx.Bind)}
            names = (
                isinstance(s, (tirx.Bind, tirx.DeclBuffer))
                and not written & set(loads)
                and not late & commuting.names_in(s)
                and not calls(s)
            )
            (lead if names or isinstance(s, tirx.AllocBuffer) else rest).append(s)
        return lead, rest

    def _distance(self, loop: Any, units: list[Unit], top: int) -> int:
        """How many rounds the copies run ahead; nothing else does, and there is room for them."""
        early = [u for u in units if u.ahead]
        for u in early:
            if not u.copy:
                raise TileValueError(
                    f"stage= has {_what(u.stmts[0])} run ahead of the latest stage",
                    loc=loc_of(u.stmts[0].span),
                    expected="copies from global memory that fill a shared tile in the earlier stage, "
                    "everything else in the latest",
                    hint=f"{_suggestion(units)}, or neither: products and what stands between them are "
                    "overlapped without being asked",
                )
        stages = sorted({u.stage for u in early if u.stage >= 0})
        if len(stages) > 1 and len(early) == sum(u.stage < top for u in units):
            raise TileValueError(
                f"stage= has copies run ahead in the stages {', '.join(map(str, stages))}",
                loc=loc_of(loop.span),
                expected="one stage for all copies that run ahead",
                hint=_suggestion(units),
            )
        distance = top - stages[0] if stages else 0
        asked = int(loop.annotations["ts.num_stages"])
        if early and asked < distance + 1 and not loop.annotations["ts.as_needed"]:
            raise TileValueError(
                f"stage= has copies run {distance} rounds ahead, and num_stages={asked} has no room for them",
                loc=loc_of(loop.span),
                expected=f"num_stages={distance + 1} or more",
                hint="leave num_stages away",
            )
        return distance

    def _check_order(self, units: list[Unit]) -> None:
        """Whatever depends on one another keeps its order."""
        facts = [commuting.facts(u.stmts, self.bases) for u in units]
        for k, first in enumerate(units):
            for j in range(k + 1, len(units)):
                second = units[j]
                if (not first.ahead, first.order) < (not second.ahead, second.order):
                    continue
                why = commuting.between(facts[k], facts[j])
                if why:
                    raise TileValueError(
                        f"order= and stage= put {_what(second.stmts[0])} in front of "
                        f"{_what(first.stmts[0])}: {why}",
                        loc=loc_of(second.stmts[0].span),
                        expected="what depends on one another in the order in which it is written",
                        hint=_suggestion(units),
                    )

    def _check_rounds(self, units: list[Unit]) -> None:
        """A unit of stage s does round n - s of the loop in the n-th round of the schedule. Whatever depends
        on one another runs in the order of the text all the same: within a round of the loop, and of two
        rounds in a row (then also of rounds further apart). Tiles that a ring holds several times are in
        nobody's way."""
        held = {root_in(self.bases, filled.filled_tile(u.stmts[0])) for u in units if u.ahead}
        facts = [commuting.facts(u.stmts, self.bases).without(held) for u in units]
        for k, first in enumerate(units):
            for j, second in enumerate(units):
                if first.ahead or second.ahead or j == k:
                    continue
                apart = 0 if k < j else 1  # the second one's round of the loop, counted from the first one's
                if (first.stage, first.order) < (second.stage + apart, second.order):
                    continue
                before = facts[k].of_another_round() if apart else facts[k]
                if why := commuting.between(before, facts[j]):
                    raise TileValueError(
                        f"order= and stage= put {_what(second.stmts[0])} in front of {_what(first.stmts[0])}"
                        f"{' of the round before' if apart else ''}: {why}",
                        loc=loc_of(second.stmts[0].span),
                        expected="what depends on one another in the order in which it is written, "
                        "also across rounds",
                        hint=_suggestion(units),
                    )

    def _check_rings(self, loop: Any, early: list[Unit]) -> None:
        """Every copy that is to run ahead can have a ring."""
        found = filled.pipeline_of(loop, self.uses, set(self.bases), True) if early else None
        for u in early:
            buffer = filled.filled_tile(u.stmts[0])
            if found is None or buffer not in found.fills:
                raise TileValueError(
                    f"stage= has {_what(u.stmts[0])} run ahead, and {buffer.name} is used elsewhere too",
                    loc=loc_of(u.stmts[0].span),
                    expected="a shared tile that this copy alone writes, read behind it in the loop and "
                    "nowhere else",
                    hint=f"the latest stage for it, or a tile of its own in place of {buffer.name}",
                )


def _units(loop: Any, lead: list[Any], rest: list[Any]) -> list[Unit]:
    """The scheduled statements with their entries. Entries for names as well are taken too: those are left
    out."""
    order, stage = ([int(x) for x in loop.annotations[key]] for key in ("ts.order", "ts.stage"))
    groups = [[int(x) for x in g] for g in loop.annotations["ts.group"]] or [[k] for k in range(len(rest))]
    if [x for g in groups for x in g] != list(range(len(rest))):
        raise TileValueError(
            f"group={groups} of a loop of {len(rest)} statements", loc=loc_of(loop.span),
            expected="each statement once, in the order in which they are written", hint=_listed(rest),
        )  # fmt: skip
    # allocations have no entries, nor has the loop's own variable, which a range with a beginning binds
    both = [
        s
        for s in flat(loop.body)
        if not isinstance(s, tirx.AllocBuffer) and loc_of(s.span) != loc_of(loop.span)
    ]
    if len(order) == len(both) > len(groups):
        kept = [any(s.same_as(r) for r in rest) for s in both]
        order, stage = ([x for x, k in zip(xs, kept, strict=True) if k] for xs in (order, stage))
    if len(order) != len(groups):
        raise TileValueError(
            f"order= and stage= have {len(order)} entries for {len(groups)} statements",
            loc=loc_of(loop.span),
            expected="an entry for each statement of the body, names of values aside",
            hint=_listed(rest),
        )
    return [Unit([rest[k] for k in g], o, s) for g, o, s in zip(groups, order, stage, strict=True)]


def _suggestion(units: list[Unit]) -> str:
    """Entries that can be carried out, in the order of the text."""
    return f"order={list(range(len(units)))}, stage={[0 if u.copy else 1 for u in units]}"


def _listed(stmts: list[Any]) -> str:
    return "; ".join(f"{k}: {_what(s)}" for k, s in enumerate(stmts))


def _what(s: Any) -> str:
    """A statement for people."""
    kinds = {
        tirx.For: "loop",
        tirx.IfThenElse: "if",
        tirx.BufferStore: "assignment",
        tirx.Bind: "name",
        tirx.AttrStmt: "T.Scale",
    }
    name, loc = name_of(s), loc_of(s.span)
    return (f"T.{name}" if name else f"the {kinds.get(type(s), 'statement')}") + (
        f" (line {loc.line})" if loc else ""
    )


def _staying(s: Any) -> Any:
    """A copy of the latest stage, which no ring takes."""
    if filled.filled_tile(s) is None:
        return s
    c = s.value
    return tirx.Evaluate(
        ir.Call(c.op.name, list(c.args), attrs={**dict(c.attrs), "pinned": True}, ret_ty=c.ty, span=c.span),
        s.span,
    )
