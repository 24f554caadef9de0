"""T.Parallel and T.vectorized: two iterations never touch one element, one of them writing it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from tilescale.compiler.static.collect import Access, Memory, Nest
from tilescale.compiler.static.judge import Judge, Verdict, inside
from tilescale.compiler.static.obligations import PROVEN, REFUTED, UNKNOWN, Obligation
from tilescale.compiler.static.prove import Equations
from tilescale.compiler.static.terms import ONE, Cond, Poly, equals

HINT = "T.serial, an atomic update, or one of T.reduce_*"


def collisions(judge: Judge) -> Iterator[Obligation]:
    """One obligation for each nest and each buffer that it writes."""
    touched: dict[int, list[Access]] = {}
    for a in judge.facts.accesses:
        if a.at.nest and a.memory.nest != a.at.nest and not a.memory.scope.endswith("signal"):
            touched.setdefault(a.at.nest, []).append(a)
    for number, accesses in touched.items():
        nest = judge.facts.nests[number]
        roots: dict[int, list[Access]] = {}
        for a in accesses:
            roots.setdefault(id(a.memory.root), []).append(a)
        for group in roots.values():
            writer = next((a for a in group if a.mode != "read"), None)
            if writer is not None:
                made = Obligation("collision", writer.at.what, writer.at.loc)
                yield judge.guarded(made, partial(_buffer, judge, nest, group, made))


def _buffer(judge: Judge, nest: Nest, group: list[Access], made: Obligation) -> Obligation:
    made.hint = HINT
    made.status = PROVEN
    seen: set[tuple[object, ...]] = set()
    for k, a in enumerate(group):
        for b in group[k:]:
            if not _conflict(a.mode, b.mode):
                continue
            first, second = (a, b) if a.mode != "read" else (b, a)
            key = tuple(
                (x.mode, tuple(x.low), tuple(x.extent), x.at.conds, id(x.memory)) for x in (first, second)
            )
            if key in seen:
                continue
            seen.add(key)
            verdict = _pair(judge, nest, first, second)
            if verdict.status == PROVEN or (
                made.status == UNKNOWN and verdict.status == UNKNOWN and made.counterexample
            ):
                continue
            other = "writes" if second.mode != "read" else "reads"
            text = (
                f"two iterations of this {nest.at.what} loop touch one element of {first.memory.name}: "
                f"one writes it, another {other} it"
            )
            judge.file(made, verdict, text, judge.region(first, verdict.env))
            made.what, made.loc = first.at.what, first.at.loc
            made.other = None if second is first else (second.at.what, second.at.loc)
            if verdict.status == REFUTED:
                return made
    return made


def _conflict(a: str, b: str) -> bool:
    return "write" in (a, b) or sorted((a, b)) == ["read", "update"]


def _pair(judge: Judge, nest: Nest, a: Access, b: Access) -> Verdict:
    """``a`` by one iteration, ``b`` by another."""
    t = judge.terms
    if a.owner is not None or b.owner is not None or not _same_view(a.memory, b.memory):
        return Verdict(
            UNKNOWN,
            None,
            "seen through two shapes" if a.owner is None and b.owner is None else "in the memory of others",
        )
    inner = [
        *nest.lanes,
        *(k for k in range(nest.first_atom, nest.last_atom) if t.atoms[k].kind in ("var", "opaque")),
    ]
    by = t.twins(dict.fromkeys(inner))
    lanes = [(Poly({(k,): 1}), by[k]) for k in nest.lanes]
    goal = Cond("and", parts=tuple(equals(x, y) for x, y in lanes))
    one, two = element(judge, a), element(judge, b)
    same = [equals(x, t.replace(y, by)) for x, y in zip(one, two, strict=True)]
    conds = list(dict.fromkeys([*a.at.conds, *(t.replace_cond(c, by) for c in b.at.conds)]))
    # Outside, a tensor's elements are dropped, and a tile's are another fault.
    conds.append(inside(one, [ONE] * len(one), a.memory.shape))

    def proven() -> bool:
        known = Equations(t, conds, [c.term for c in same if c.term is not None], judge.budget)
        return known.impossible or all(known.same(x, y) for x, y in lanes)

    verdict = judge.decide(
        (*conds, *same), goal, proven, (*a.at.scope, *(k for p in by.values() for k in p.atoms))
    )
    if verdict.status == REFUTED and not nest.single and a.memory.scope.startswith("local"):
        # iterations that go different ways run one after another, and memory of one thread may be meant for
        # each of them
        return Verdict(UNKNOWN, verdict.env, "private memory in iterations that go different ways")
    return verdict


def element(judge: Judge, a: Access) -> list[Poly]:
    """The indices of any one element of a region."""
    out = []
    for low, extent in zip(a.low, a.extent, strict=True):
        out.append(low if extent.const == 1 else low + judge.terms.var("element", "lane", 0, extent - 1))
    return out


def _same_view(a: Memory, b: Memory) -> bool:
    return a is b or a.shape == b.shape
