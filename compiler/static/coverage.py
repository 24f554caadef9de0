"""Tiles are written before they are read: what a loop leaves out and something reads later is named.

A read is refuted only at the first execution of its statement (all loops around it in their first round),
where nothing but statements that stand before it can have run, and only for an element outside the rectangle
around everything that each of them ever writes. It is proven where one statement before it, under no other
conditions, writes all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tilescale.compiler.static.collect import Access, Place
from tilescale.compiler.static.judge import Judge, Verdict
from tilescale.compiler.static.obligations import PROVEN, UNKNOWN, Obligation
from tilescale.compiler.static.refute import Question
from tilescale.compiler.static.terms import FALSE, Cond, Poly, at_least


@dataclass
class Box:
    """A rectangle that a statement is known to write, as often as it runs."""

    low: list[Poly]
    extent: list[Poly]


def coverage(judge: Judge) -> Iterator[Obligation]:
    """One obligation for each read of a tile."""
    written: dict[int, list[Access]] = {}
    for a in judge.facts.accesses:
        if a.mode != "read" and not a.memory.is_global:
            written.setdefault(id(a.memory.root), []).append(a)
    for r in judge.facts.accesses:
        if (
            r.mode == "write"
            or r.memory.is_global
            or r.memory.scope.endswith(("signal", "barrier"))  # which begin by themselves
            or r.memory.scope == "local.var"
        ):
            continue
        writers = written.get(id(r.memory.root), [])
        made = Obligation("coverage", r.at.what, r.at.loc)
        yield judge.guarded(made, lambda r=r, writers=writers, made=made: _read(judge, r, writers, made))  # type: ignore[misc]


def _read(judge: Judge, r: Access, writers: list[Access], made: Obligation) -> Obligation:
    if r.owner is not None:
        made.reason = "a tile of another block"
        return made
    boxes = [box for w in writers if (box := _box(judge, w, r)) is not None]
    prover = judge.prover(r.at.conds)
    if prover.contradiction or any(_inside(judge, r, box) for box in _joined(boxes)):
        made.status = PROVEN
        return made
    before = writers if judge.facts.concurrent else [w for w in writers if w.at.order < r.at.order]
    if any(w.memory.base is not None or w.at.endless for w in before) or (
        before and r.memory.base is not None
    ):
        made.reason = "written through a view or in a loop without a known end"
        return made
    verdict = _unwritten(judge, r, before)
    text = f"{r.memory.name} is read where nothing has written it"
    if before:
        made.other = (before[-1].at.what, before[-1].at.loc)
    made.hint = f"write all of {r.memory.name} first, for example T.clear({r.memory.name})"
    if verdict.status == UNKNOWN and verdict.env is None:
        made.reason = verdict.reason
        return made
    return judge.file(made, verdict, text, f"{r.memory.name}[{_index(judge, verdict)}]")


def _index(judge: Judge, verdict: Verdict) -> str:
    assert verdict.env is not None
    elements = [verdict.env.pop(k) for k in list(verdict.env) if judge.terms.atoms[k].name == "element"]
    return ", ".join(map(str, elements))


# ---- what is certainly written


def _box(judge: Judge, w: Access, r: Access) -> Box | None:
    """What ``w`` has written whenever ``r`` runs; None where that is not known."""
    t = judge.terms
    if (
        w.mode != "write"
        or w.owner is not None
        or w.memory.root is not r.memory.root
        or w.at.order >= r.at.order
        or w.at.endless
    ):
        return None
    own = [k for k in w.at.scope if k not in r.at.scope]
    if any(c not in r.at.conds and not _always(judge, c, r.at) for c in w.at.conds):
        return None
    low, extent = list(w.low), list(w.extent)
    for k in own:
        a = t.atoms[k]
        assert a.low is not None and a.high is not None
        if not judge.prover(r.at.conds).nonneg(a.high - a.low):
            return None  # the loop may not run at all
        axes = [axis for axis, x in enumerate(low) if k in t.leaves_of(x)]
        if not axes:
            continue
        if len(axes) > 1 or any(k in t.leaves_of(e) for e in extent):
            return None
        axis = axes[0]
        pair = low[axis].split(k)
        if pair is None or (step := pair[0].const) is None or step <= 0 or k in t.leaves_of(pair[1]):
            return None
        wide = extent[axis].const
        if wide is None or wide < step:
            return None  # gaps between the rounds
        low[axis] = pair[1] + a.low * step
        extent[axis] = (a.high - a.low) * step + wide
    if any(k in own for x in (*low, *extent) for k in t.leaves_of(x)):
        return None
    if w.memory is r.memory:
        return Box(low, extent)
    # under another name: what is written whole is whole under all of its names
    prover = judge.prover(r.at.conds)
    if not all(
        prover.nonneg(-x) and prover.nonneg(x + e - n)
        for x, e, n in zip(low, extent, w.memory.shape, strict=True)
    ):
        return None
    return Box([x - x for x in r.low], list(r.memory.shape))


def _always(judge: Judge, c: Cond, at: Place) -> bool:
    return judge.prover(at.conds).holds(c)


def _joined(boxes: list[Box]) -> list[Box]:
    """The boxes, and those that two make which lie end to end along one axis."""
    out = list(boxes)
    for box in boxes:
        for other in boxes:
            axes = [
                k
                for k in range(len(box.low))
                if (box.low[k], box.extent[k]) != (other.low[k], other.extent[k])
            ]
            if len(axes) == 1 and box.low[axes[0]] + box.extent[axes[0]] == other.low[axes[0]]:
                extent = list(box.extent)
                extent[axes[0]] = box.extent[axes[0]] + other.extent[axes[0]]
                out.append(Box(box.low, extent))
    return out


def _inside(judge: Judge, r: Access, box: Box) -> bool:
    prover = judge.prover(r.at.conds)
    return all(
        prover.nonneg(x - low) and prover.nonneg(low + wide - x - e)
        for x, e, low, wide in zip(r.low, r.extent, box.low, box.extent)
    )


# ---- what certainly nothing has written


def _unwritten(judge: Judge, r: Access, before: list[Access]) -> Verdict:
    """An element that ``r`` reads in its first execution and that no rectangle around a writer's elements
    holds."""
    t = judge.terms
    first = {k: low for k in r.at.loops if (low := t.atoms[k].low) is not None}
    conds = [t.replace_cond(c, first) for c in r.at.conds]
    conds += [at_least(t.replace(high, first)) for k in r.at.loops if (high := t.atoms[k].high) is not None]
    elements = []
    for low, extent, n in zip(r.low, r.extent, r.memory.shape, strict=True):
        low, extent = t.replace(low, first), t.replace(extent, first)
        e = t.var("element", "loop", 0, n - 1)  # what lies outside the tile is another fault
        conds += [at_least(e - low), at_least(low + extent - 1 - e)]
        elements.append(e)
    for w in before:
        outside = [c for axis, e in enumerate(elements) for c in _beyond(judge, w, axis, e)]
        if not outside:
            return Verdict(UNKNOWN, None, "no statement before it is known to write all of it")
        conds.append(Cond("or", parts=tuple(outside)))
    verdict = judge.counterexample(Question(t, conds, FALSE, r.at.scope))
    if verdict.status == PROVEN or verdict.env is None:
        return Verdict(UNKNOWN, None, "no statement before it is known to write all of it")
    return verdict


def _beyond(judge: Judge, w: Access, axis: int, e: Poly) -> list[Cond]:
    """Conditions under which ``e`` is no index that ``w`` ever writes on an axis."""
    low, _ = judge.terms.range(w.low[axis])
    _, high = judge.terms.range(w.low[axis] + w.extent[axis])
    out = []
    if low is not None and low > 0:
        out.append(at_least(-e + (low - 1)))
    if high is not None:
        out.append(at_least(e - high))
    return out
