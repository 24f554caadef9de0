"""How often a statement signals one counter: bounds by solving for the executions that name it.

The executions are the points of a box (rank, blocks, executors, loops). That a signal names the counter
awaited is a set of equations; each determines one variable, and those that are left free count by their
extents. Exact where every step is, else a lower and an upper bound.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tilescale.compiler.static.collect import Signal, Wait
from tilescale.compiler.static.judge import Judge, executions
from tilescale.compiler.static.prove import Prover
from tilescale.compiler.static.terms import OF_A_RANK, ONE, ZERO, Cond, Poly, Terms, conjuncts


@dataclass
class Count:
    """``low`` ≤ the sum of what is added ≤ ``high`` (None: nobody knows)."""

    low: Poly = ZERO
    high: Poly | None = ZERO


@dataclass
class Solution:
    """Executions under equations: values of determined variables, bounds of the free ones. ``exact``: no
    lower bound without it."""

    terms: Terms
    prover: Prover
    free: dict[int, tuple[Poly, Poly]]
    by: dict[int, Poly] = field(default_factory=dict)
    exact: bool = True
    empty: bool = False
    missing: int = 0

    def reduce(self, p: Poly) -> Poly:
        return self.terms.replace(p, self.by)

    def _open(self, p: Poly) -> set[int]:
        return self.terms.leaves_of(p) & self.free.keys()

    def equation(self, e: Poly) -> bool:
        """Uses an equation; False where it should be tried again later."""
        e = self.reduce(e)
        if not self._open(e):
            if self.prover.nonneg(e - 1) or self.prover.nonneg(-e - 1):
                self.empty = True
            elif not (self.prover.nonneg(e) and self.prover.nonneg(-e)):
                self.exact = False
            return True
        for v in sorted(self._open(e), reverse=True):
            value = self._alone(e, v)
            if value is not None:
                self._determine(v, value)
                return True
        return self._rotation(e)

    def _alone(self, e: Poly, v: int) -> Poly | None:
        pair = e.split(v)
        if pair is None or v in self.terms.leaves_of(pair[1]):
            return None
        factor = pair[0].const
        return None if factor is None or abs(factor) != 1 else pair[1] * -factor

    def _determine(self, v: int, value: Poly, *, sure: bool = False) -> None:
        low, high = (self.reduce(b) for b in self.free.pop(v))
        if not sure and not (self.prover.nonneg(value - low) and self.prover.nonneg(high - value)):
            self.exact = False
            if self.prover.nonneg(low - value - 1) or self.prover.nonneg(value - high - 1):
                self.empty = True
        self.by = {k: self.terms.replace(x, {v: value}) for k, x in self.by.items()} | {v: value}

    def _rotation(self, e: Poly) -> bool:
        """x mod n = c where a free variable takes each value 0 … n-1 once and turns x: exactly one of its
        values."""
        for m, c in e.terms.items():
            if len(m) != 1 or abs(c) != 1 or (a := self.terms.atoms[m[0]]).kind != "mod":
                continue
            x, n = a.args
            target = (e - Poly({m: c})) * -c
            if self._open(target) or not (self.prover.nonneg(target) and self.prover.nonneg(n - target - 1)):
                continue
            for v in sorted(self._open(x)):
                pair = x.split(v)
                low, high = (self.reduce(b) for b in self.free[v])
                if pair is None or v in self.terms.leaves_of(pair[1]) or low.terms or high != n - 1:
                    continue
                factor = pair[0].const
                if factor is not None and abs(factor) == 1:
                    self._determine(v, self.terms.mod((target - pair[1]) * factor, n), sure=True)
                    return True
        return False

    def test(self, c: Cond) -> None:
        """Uses another condition: holds anyway, never, or cuts a free variable's range."""
        c = self.terms.replace_cond(c, self.by)
        if self.prover.holds(c):
            return
        if self.prover.refutes(c):
            self.empty = True
            return
        if c.kind == "not" and c.parts[0].kind == "eq" and c.parts[0].term is not None:
            e = c.parts[0].term
            if any(self._alone(e, v) is not None for v in self._open(e)):
                self.missing += 1
                return
        if c.kind == "ge" and c.term is not None:
            for v in self._open(c.term):
                pair = c.term.split(v)
                if pair is None or self._open(pair[1]) or v in self.terms.leaves_of(pair[1]):
                    continue
                factor = pair[0].const
                if factor is not None and abs(factor) == 1:
                    self._cut(v, pair[1] * -factor, factor > 0)
                    return
        self.exact = False

    def _cut(self, v: int, edge: Poly, below: bool) -> None:
        low, high = (self.reduce(b) for b in self.free[v])
        inner = edge - low if below else high - edge
        if self.prover.nonneg(inner):
            self.free[v] = (edge, high) if below else (low, edge)
        elif not self.prover.nonneg(-inner):
            self.exact = False

    def total(self, amount: Poly) -> Count:
        if self.empty:
            return Count()
        amount = self.reduce(amount)
        if self._open(amount) or not self.prover.nonneg(amount):
            return Count(ZERO, ZERO if not self._open(amount) and self.prover.nonneg(-amount) else None)
        many = ONE
        for v in self.free:
            low, high = (self.reduce(b) for b in self.free[v])
            extent = high - low + 1
            if self._open(extent) or not self.prover.nonneg(extent):
                return Count(ZERO, None)
            many = many * extent
        return Count((many - self.missing) * amount if self.exact else ZERO, many * amount)


def _unknown(judge: Judge, s: Signal) -> set[int]:
    """What another executor finds to be something else: values in memory, on another rank also what its
    caller passed."""
    t = judge.terms
    named = {k for p in (*s.index, s.amount, *([] if s.owner is None else [s.owner])) for k in t.leaves_of(p)}
    named |= {k for c in s.at.conds for k in t.leaves_of_cond(c)}
    own = OF_A_RANK if s.owner is not None else ()
    return {
        k
        for k in t.with_bounds([*named, *s.at.scope])
        if t.atoms[k].kind == "opaque" or t.atoms[k].role in ("unclear", *own)
    }


def count(judge: Judge, s: Signal, w: Wait) -> Count:
    """What all executions of ``s`` on all ranks add to the counter that ``w`` awaits."""
    t = judge.terms
    if s.at.endless or s.memory.scope == "shared.signal" and s.reach != "block" or s.op != "add":
        return Count(ZERO, None)
    mine = executions(t, s.at.scope)
    unknown = _unknown(judge, s)
    by = t.twins([*mine, *unknown])
    theirs = [next(iter(by[k].atoms)) for k in mine]
    free = {
        k: (low, high)
        for k in theirs
        if (low := t.atoms[k].low) is not None and (high := t.atoms[k].high) is not None
    }
    made = Solution(t, judge.prover(w.at.conds), free, exact=True)
    equal = [t.replace(x, by) - y for x, y in zip(s.index, w.index, strict=True)]
    tests: list[Cond] = []
    for c in (part for cond in s.at.conds for part in conjuncts(t.replace_cond(cond, by))):
        if c.kind == "eq" and c.term is not None:
            equal.append(c.term)
        else:
            tests.append(c)
    for k in mine:
        role = t.atoms[k].role
        if role == "rank":
            equal.append((t.replace(s.owner, by) if s.owner is not None else by[k]) - Poly({(k,): 1}))
        elif role == "block" and s.memory.scope == "shared.signal":
            equal.append(by[k] - Poly({(k,): 1}))
    if s.owner is not None and not any(t.atoms[k].role == "rank" for k in mine):
        equal.append(t.replace(s.owner, by))  # one rank, number 0
    again = True
    while equal and again and not made.empty:
        left = [e for e in equal if not made.equation(e)]
        again = len(left) < len(equal)
        equal = left
    made.exact = made.exact and not equal
    for c in tests:
        if not made.empty:
            made.test(c)
    return made.total(t.replace(s.amount, by))
