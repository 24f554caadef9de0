"""Waits that no program of any rank can satisfy: what is awaited against all that the statements that name
the counter can add."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tilescale.compiler.static.collect import Access, Signal, Wait
from tilescale.compiler.static.counting import count
from tilescale.compiler.static.enumerate import TooMany, each
from tilescale.compiler.static.judge import Judge, Verdict, executions
from tilescale.compiler.static.obligations import PROVEN, REFUTED, UNKNOWN, Obligation
from tilescale.compiler.static.refute import Question
from tilescale.compiler.static.terms import ONE, ZERO, Poly, at_least, equals, number

UNCOUNTED = "the signals that name the counter could not be counted"
KEPT = "the counter holds more than the signals of this launch add"
#: values of an open number of ranks at which a fault is counted out before it is told, and up to which a
#: bounded one is counted whole
CHECKED_RANKS = (1, 2, 3, 4)


def waits(judge: Judge) -> Iterator[Obligation]:
    """One obligation for each wait."""
    for w in judge.facts.waits:
        made = Obligation("wait", "T.wait", w.at.loc)
        yield judge.guarded(made, lambda w=w, made=made: _wait(judge, w, made))  # type: ignore[misc]


def _needed(judge: Judge, w: Wait) -> Poly | None:
    """The least sum that makes the wait end; None for comparisons that a zero may satisfy."""
    if w.cmp in ("ge", "eq"):
        return w.value
    if w.cmp == "gt":
        return w.value + 1
    return ONE if w.cmp == "ne" and judge.prover(w.at.conds).holds(equals(w.value, ZERO)) else None


def _wait(judge: Judge, w: Wait, made: Obligation) -> Obligation:
    needed = _needed(judge, w)
    if needed is None:
        zero = {"le": at_least(w.value), "lt": at_least(w.value - 1)}.get(w.cmp)
        made.status = PROVEN if zero is not None and judge.prover(w.at.conds).holds(zero) else UNKNOWN
        made.reason = "" if made.status == PROVEN else f"a wait that compares with {w.cmp}"
        return made
    signals = [s for s in judge.facts.signals if s.memory.root is w.memory.root]
    counts = [count(judge, s, w) for s in signals]
    low, high = ZERO, ZERO if all(c.high is not None for c in counts) else None
    for c in counts:
        low = low + c.low
        high = high + c.high if high is not None and c.high is not None else None
    if judge.prover(w.at.conds).nonneg(low - needed):
        made.status = PROVEN
        return made
    text = f"nothing that any rank does can bring {w.memory.name} to what is awaited here"
    made.hint = "a value that the signals add up to, and an index and a rank that one of them names"
    verdict = _exactly(judge, w, needed, signals)
    if verdict is None:
        verdict = Verdict(UNKNOWN, None, UNCOUNTED)
        if w.memory.root.keep:
            verdict = Verdict(UNKNOWN, None, KEPT)
        elif high is not None:
            verdict = judge.counterexample(
                Question(judge.terms, list(w.at.conds), at_least(high - needed), _named(judge, w, needed))
            )
            if verdict.status == PROVEN:  # no bound speaks against it, which is no proof that it ends
                verdict = Verdict(UNKNOWN, None, UNCOUNTED)
            elif verdict.status == REFUTED and not _confirmed(judge, w, needed, signals):
                verdict = Verdict(UNKNOWN, None, "not confirmed by counting")
    shown = ""
    if verdict.env is not None:
        region = judge.region(Access(w.memory, "read", w.index, [ONE] * len(w.index), w.at), verdict.env)
        shown = f"{region} {'=' if w.cmp == 'eq' else '≥'} {judge.shown(needed, verdict.env)}"
    return judge.file(made, verdict, text, shown)


def _named(judge: Judge, w: Wait, needed: Poly) -> tuple[int, ...]:
    return (*w.at.scope, *(k for p in (*w.index, needed) for k in judge.terms.leaves_of(p)))


# ---- counted one by one


def _open(judge: Judge, w: Wait, signals: list[Signal]) -> list[int]:
    """The arguments of the kernel that decide who signals what."""
    t = judge.terms
    found: set[int] = set()
    for at in (w.at, *(s.at for s in signals)):
        work = [*at.scope, *(k for c in at.conds for k in t.leaves_of_cond(c))]
        while work:
            k = work.pop()
            a = t.atoms[k]
            for bound in (a.low, a.high):
                work += [] if bound is None else [x for x in t.leaves_of(bound) if x not in found and x != k]
            if a.kind == "opaque" or a.kind == "var" and k not in executions(t, (k,)):
                found.add(k)
    for s in signals:
        found |= {
            k
            for p in (*s.index, s.amount, *([s.owner] if s.owner else []))
            for k in t.leaves_of(p)
            if _is_given(judge, k)
        }
    found |= {k for p in (*w.index, w.value) for k in t.leaves_of(p) if _is_given(judge, k)}
    return sorted(found)


def _is_given(judge: Judge, k: int) -> bool:
    a = judge.terms.atoms[k]
    return a.kind == "opaque" or a.kind == "var" and not executions(judge.terms, (k,))


def _exactly(judge: Judge, w: Wait, needed: Poly, signals: list[Signal]) -> Verdict | None:
    """The verdict where at most the number of ranks is open, and that has a bound: every number counted out.
    None elsewhere."""
    t = judge.terms
    given = _open(judge, w, signals)
    if (
        w.memory.root.keep
        or any(s.op != "add" or s.at.endless or s.reach == "cta_cluster" for s in signals)
        or w.reach == "cta_cluster"
    ):
        return None
    if any(t.atoms[k].role != "ranks" or t.atoms[k].high is None for k in given):
        return None
    most = 1 if not given else t.range(Poly({(given[0],): 1}))[1]
    assert most is not None
    worlds: list[dict[int, int]] = [{given[0]: n} for n in range(1, most + 1)] if given else [{}]
    failed = []
    try:
        for env in worlds:
            if (bad := _first_short(judge, w, needed, signals, env)) is not None:
                failed.append(bad)
    except TooMany:
        return None
    if not failed:
        return Verdict(PROVEN)
    if len(failed) == len(worlds):
        return Verdict(REFUTED, failed[0])
    return Verdict(
        UNKNOWN,
        failed[0],
        f"fails for n = {', '.join(str(e[given[0]]) for e in failed)} ranks, and not for others",
    )


def _confirmed(judge: Judge, w: Wait, needed: Poly, signals: list[Signal]) -> bool:
    """Whether counting at small values of all that the caller chooses finds the wait short as well."""
    t = judge.terms
    given = _open(judge, w, signals)
    if any(t.atoms[k].kind == "opaque" for k in given):
        return True  # the bound holds whatever is in memory
    for n in CHECKED_RANKS:
        env: dict[int, int] = {}
        for k in given:
            most = t.range(Poly({(k,): 1}))[1]
            value = n if t.atoms[k].role == "ranks" else 64 * n
            env[k] = value if most is None else min(value, most)
        try:
            if _first_short(judge, w, needed, signals, env) is None:
                return False
        except TooMany:
            continue
    return True


def _first_short(
    judge: Judge, w: Wait, needed: Poly, signals: list[Signal], env: dict[int, int]
) -> dict[int, int] | None:
    """The first execution of the wait whose counter gets less than it needs, and None where there is none."""
    t = judge.terms
    sums: Counter[tuple[int, ...]] = Counter()
    for s in signals:
        home = _home(judge, s.memory.scope, s.owner)

        def add(_: tuple[int, ...], out: tuple[int, ...]) -> None:
            sums[out[:-1]] += out[-1]

        each(t, s.at.scope, s.at.conds, [*home, *s.index, s.amount], env, judge.budget, add)
    found: list[dict[int, int]] = []
    scope = sorted(k for k in w.at.scope if k not in env)

    def look(values: tuple[int, ...], out: tuple[int, ...]) -> bool:
        if sums[out[:-1]] >= out[-1]:
            return False
        found.append({**env, **dict(zip(scope, values, strict=True))})
        return True

    each(
        t,
        w.at.scope,
        w.at.conds,
        [*_home(judge, w.memory.scope, None), *w.index, needed],
        env,
        judge.budget,
        look,
    )
    return found[0] if found else None


def _home(judge: Judge, scope: str, owner: Poly | None) -> list[Poly]:
    """Whose counter it is: a rank's, or a block's of a rank."""
    t = judge.terms
    rank = next((Poly({(k,): 1}) for k, a in enumerate(t.atoms[: judge.own]) if a.role == "rank"), number(0))
    if scope == "global.signal":
        return [owner if owner is not None else rank]
    return [rank, *(Poly({(k,): 1}) for k, a in enumerate(t.atoms[: judge.own]) if a.role == "block")]
