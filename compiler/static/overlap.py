"""Remote writes of two blocks, of one rank or of two, into one owner's memory touch elements of their own,
unless something orders them.

Refuted only where nothing can: both stand in one phase (see collect.py), so that neither has acquired
anything since the last barrier of everyone, and the later cannot have learned of the earlier.
"""

from __future__ import annotations

from collections.abc import Iterator

from tilescale.compiler.static.collect import Access
from tilescale.compiler.static.judge import Judge, Verdict, inside
from tilescale.compiler.static.obligations import PROVEN, REFUTED, UNKNOWN, Obligation
from tilescale.compiler.static.parallel import element
from tilescale.compiler.static.prove import Equations
from tilescale.compiler.static.terms import EXECUTION, OF_A_RANK, ONE, Cond, Poly, equals


def overlaps(judge: Judge) -> Iterator[Obligation]:
    """One obligation for each pair of remote writes of one parameter, a statement with itself included."""
    remote = [
        a for a in judge.facts.accesses if a.owner is not None and a.mode != "read" and a.reach == "device"
    ]
    for k, a in enumerate(remote):
        for b in remote[k:]:
            if a.memory is b.memory and not a.mode == b.mode == "update":
                made = Obligation("overlap", a.at.what, a.at.loc)
                yield judge.guarded(made, lambda a=a, b=b, made=made: _pair(judge, a, b, made))  # type: ignore[misc]


def _pair(judge: Judge, a: Access, b: Access, made: Obligation) -> Obligation:
    # two ranks may be called with different numbers, two blocks of one rank are not
    verdicts = [
        _case(judge, a, b, among=among)
        for among in (("rank",) if judge.facts.ranks.const != 1 else ()) + ("block",)
    ]
    verdict = min(verdicts, key=lambda v: (REFUTED, UNKNOWN, PROVEN).index(v.status))
    if verdict.status != PROVEN and (a.at.phase is None or a.at.phase != b.at.phase):
        verdict = Verdict(UNKNOWN, None, "a wait or a barrier may order them")
    if verdict.status == PROVEN:
        made.status = PROVEN
        return made
    text = (
        f"two blocks write one region of {a.memory.name} in the memory of one rank, and nothing orders them"
    )
    made.hint = "a region for each rank and block, or a T.barrier() or a signal and its wait between the two"
    made.other = None if a is b and verdict.status != REFUTED else (b.at.what, b.at.loc)
    shown = judge.region(a, verdict.env)
    if verdict.env is not None:
        shown += f" of rank {judge.shown(a.owner, verdict.env)}"
    return judge.file(made, verdict, text, shown)


def _case(judge: Judge, a: Access, b: Access, among: str) -> Verdict:
    """Two ranks, or two blocks of one rank: do their writes meet?"""
    t = judge.terms
    assert a.owner is not None and b.owner is not None
    roles = (*EXECUTION, "unclear", *(OF_A_RANK if among == "rank" else ()))
    mine = [k for k, atom in enumerate(t.atoms[: judge.own]) if atom.kind == "opaque" or atom.role in roles]
    by = t.twins(k for k in mine if among == "rank" or t.atoms[k].role != "rank")
    executors = [(Poly({(k,): 1}), by[k]) for k in by if t.atoms[k].role == among]
    one, two = element(judge, a), element(judge, b)
    same = [equals(x, t.replace(y, by)) for x, y in zip(one, two, strict=True)]
    same.append(equals(a.owner, t.replace(b.owner, by)))
    conds = list(dict.fromkeys([*a.at.conds, *(t.replace_cond(c, by) for c in b.at.conds)]))
    conds.append(inside(one, [ONE] * len(one), a.memory.shape))
    goal = Cond("and", parts=tuple(equals(x, y) for x, y in executors))

    def proven() -> bool:
        known = Equations(t, conds, [c.term for c in same if c.term is not None], judge.budget)
        return known.impossible or all(known.same(x, y) for x, y in executors)

    named = (*a.at.scope, *t.leaves_of(a.owner), *(k for p, q in executors for k in (*p.atoms, *q.atoms)))
    return judge.decide((*conds, *same), goal, proven, named)
