"""Accesses inside their tiles, counters inside their T.Signal, ranks that are there."""

from __future__ import annotations

from collections.abc import Iterator

from tilescale.compiler.static.collect import Access, Peer
from tilescale.compiler.static.judge import Judge, inside
from tilescale.compiler.static.obligations import PROVEN, Obligation, Obligations
from tilescale.compiler.static.prove import OverBudget
from tilescale.compiler.static.terms import ONE, Cond, Poly, at_least


def bounds(judge: Judge, out: Obligations) -> Iterator[Obligation]:
    """One obligation for each access of a tile. Accesses of tensors are counted: inside, or guarded."""
    for a in judge.facts.accesses:
        if a.memory.scope.endswith("signal"):
            continue
        if a.memory.is_global:
            if _proven(judge, a):
                out.inside += 1
            else:
                out.guarded += 1
            continue
        made = Obligation("bounds", a.at.what, a.at.loc)
        yield judge.guarded(made, lambda a=a, made=made: _tile(judge, a, made))  # type: ignore[misc]


def _proven(judge: Judge, a: Access) -> bool:
    try:
        prover = judge.prover(a.at.conds)
        return prover.contradiction or prover.holds(inside(a.low, a.extent, a.memory.shape))
    except OverBudget:
        return False


def _tile(judge: Judge, a: Access, made: Obligation) -> Obligation:
    verdict = judge.decide(a.at.conds, inside(a.low, a.extent, a.memory.shape), scope=a.at.scope)
    if verdict.status == PROVEN:
        made.status = PROVEN
        return made
    text = f"an access lies outside {a.memory.name}, whose shape is {_shape(a.memory.shape)}"
    return judge.file(made, verdict, text, judge.region(a, verdict.env))


def _leaves(judge: Judge, *terms: Poly) -> set[int]:
    return {k for p in terms for k in judge.terms.leaves_of(p)}


def _shape(shape: list[Poly]) -> str:
    shown = [str(e.const) if e.const is not None else "…" for e in shape]
    return f"({', '.join(shown)}{',' if len(shown) == 1 else ''})"


def counters(judge: Judge) -> Iterator[Obligation]:
    """One obligation for each counter that a signal or a wait names."""
    named = [(s.memory, s.index, s.at, "T.signal") for s in judge.facts.signals]
    named += [(w.memory, w.index, w.at, "T.wait") for w in judge.facts.waits]
    for memory, index, at, what in named:
        made = Obligation("counter", what, at.loc)

        def work(memory=memory, index=index, at=at, made=made) -> Obligation:  # type: ignore[no-untyped-def]
            ones = [ONE] * len(index)
            verdict = judge.decide(at.conds, inside(index, ones, memory.shape), scope=at.scope)
            a = Access(memory, "update", index, ones, at)
            text = f"there is no such counter of {memory.name}, whose shape is {_shape(memory.shape)}"
            return judge.file(made, verdict, text, judge.region(a, verdict.env))

        yield judge.guarded(made, work)


def peers(judge: Judge) -> Iterator[Obligation]:
    """One obligation for each ``src=`` and ``dst=``, and for the lowest and the highest rank of a
    ``team=``."""
    for p in judge.facts.peers:
        made = Obligation("peer", p.at.what, p.at.loc)
        yield judge.guarded(made, lambda p=p, made=made: _peer(judge, p, made))  # type: ignore[misc]


def parts(judge: Judge) -> Iterator[Obligation]:
    """One obligation for each remote access whose index along some axis follows the own rank: the part of a
    rank that is there. On an open number of ranks there is nothing to ask: a kernel made for two is no fault
    of three."""
    if judge.facts.ranks.const is None:
        return
    for a in judge.facts.accesses:
        if a.owner is None or a.reach != "device" or not a.memory.is_global:
            continue
        low, extent, shape = (
            [p for p, n in zip(of, a.extent, strict=True) if n == ONE]
            for of in (a.low, a.extent, a.memory.shape)
        )
        along = [
            k
            for k, p in enumerate(low)
            if any(judge.terms.atoms[leaf].role == "rank" for leaf in judge.terms.leaves_of(p))
        ]
        if not along:
            continue
        made = Obligation("part", a.at.what, a.at.loc)

        def work(a=a, made=made, low=low, extent=extent, shape=shape, along=along) -> Obligation:  # type: ignore[no-untyped-def]
            there = inside(*([of[k] for k in along] for of in (low, extent, shape)))
            verdict = judge.decide(a.at.conds, there, scope=(*a.at.scope, *_leaves(judge, *low)))
            does = "gives zeros" if a.mode == "read" else "is dropped"
            made.hint = "an extent of as many parts as there are ranks"
            text = f"this {does}: {a.memory.name}, whose shape is {_shape(a.memory.shape)}, has no such part"
            return judge.file(made, verdict, text, judge.region(a, verdict.env))

        yield judge.guarded(made, work)


def _peer(judge: Judge, p: Peer, made: Obligation) -> Obligation:
    who = "rank" if p.reach == "device" else "block of the cluster"
    there = Cond("and", parts=(at_least(p.owner), at_least(p.count - p.owner - 1)))
    verdict = judge.decide(p.at.conds, there, scope=(*p.at.scope, *_leaves(judge, p.count, p.owner)))
    shown = ""
    if verdict.env is not None:
        shown = (
            f"{p.side if p.side != 'team' else 'rank'}={judge.shown(p.owner, verdict.env)} of "
            f"{judge.shown(p.count, verdict.env)}"
        )
    made.hint = (
        "0 ≤ rank < n, for example (rank + 1) % n"
        if p.reach == "device"
        else "an index below the cluster's size"
    )
    return judge.file(made, verdict, f"{p.side}= names a {who} that is not there", shown)
