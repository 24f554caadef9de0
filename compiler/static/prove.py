"""Proofs without a solver: bounds by elimination of variables, and equations by mixed-radix splitting.

``Prover.nonneg`` replaces the youngest atom of a term by a bound of it (its own, or one that a condition of
the path gives), which is made of older atoms, until a number is left: Fourier and Motzkin's elimination along
one path, where an atom's factor may itself be symbolic. ``Equations`` draws conclusions from equal indices:
from 64·(i − i') + (j − j') = 0 and |j − j'| < 64 follow j = j' and i = i', and from equal remainders by n of
terms less than n apart that the terms are equal. Everything that is concluded holds; nothing that is not
concluded is thereby wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd

from tilescale.compiler.static.terms import ZERO, Cond, Poly, Terms, conjuncts, negation, number

#: an upper (factor > 0: factor·atom ≤ term) or a lower bound
Bound = tuple[int, Poly]


#: what one statement, or one question that is asked of a proof, costs beside the proof itself
STEP = 10


class OverBudget(Exception):
    """The budget is spent."""


class Budget:
    """What a check may spend, in steps: about the work of one term of one bound in a proof, some seven
    microseconds. Steps are counted and no clock is read, so that what a check finds depends on the program
    alone: neither on the machine nor on what else the process does (a collection of Python's garbage takes a
    hundred milliseconds where many objects live)."""

    def __init__(self, steps: int):
        self.steps = self.left = steps

    @property
    def spent(self) -> int:
        return self.steps - self.left

    def spend(self, steps: int) -> None:
        """Raises OverBudget where nothing is left."""
        self.left -= steps
        if self.left < 0:
            raise OverBudget


class Prover:
    """Proofs under the conditions of one path."""

    def __init__(self, terms: Terms, facts: Iterable[Cond], budget: Budget, fuel: int = 600):
        self.terms, self.budget, self.fuel_of_a_proof = terms, budget, fuel
        self.facts: list[Poly] = []
        self.equal: list[Poly] = []
        self.lows: dict[int, list[Bound]] = {}
        self.highs: dict[int, list[Bound]] = {}
        self.fuel = fuel
        self.contradiction = False
        late = []
        for c in facts:
            for part in conjuncts(c):
                if part.kind == "ge" and part.term is not None:
                    self.add(part.term)
                elif part.kind == "eq" and part.term is not None:
                    self.equal.append(part.term)
                    self.add(part.term)
                    self.add(-part.term)
                elif part.kind in ("not", "or"):
                    late.append(part)
        for part in late:
            self._add_other(part)

    def add(self, fact: Poly) -> None:
        """A term that is at least zero; it bounds its youngest atom."""
        known = fact.const
        if known is not None:
            self.contradiction = self.contradiction or known < 0
            return
        self.facts.append(fact)
        youngest = max(fact.atoms)
        pair = fact.split(youngest)
        if pair is None or (factor := pair[0].const) is None:
            return
        if factor > 0:
            self.lows.setdefault(youngest, []).append((factor, -pair[1]))
        else:
            self.highs.setdefault(youngest, []).append((-factor, pair[1]))

    def _add_other(self, c: Cond) -> None:
        """x ≠ 0 where x is known to be at least (at most) zero; a choice of conditions of which all but one
        cannot be."""
        if c.kind == "not":
            inner = c.parts[0]
            if inner.kind == "true":
                self.contradiction = True
            elif inner.kind == "eq" and inner.term is not None:
                if self.nonneg(inner.term):
                    self.add(inner.term - 1)
                elif self.nonneg(-inner.term):
                    self.add(-inner.term - 1)
            return
        left = [p for p in c.parts if not self.refutes(p)]
        if not left:
            self.contradiction = True
        elif len(left) == 1:
            for part in conjuncts(left[0]):
                if part.kind == "ge" and part.term is not None:
                    self.add(part.term)
                elif part.kind == "eq" and part.term is not None:
                    self.add(part.term)
                    self.add(-part.term)

    # -- questions
    # ------------------------------------------------------------------------------------------------
    def nonneg(self, p: Poly) -> bool:
        """Whether a term is proven to be at least zero."""
        if p.const is not None:
            return p.const >= 0
        p = self.terms.tidy(p)
        low, _ = self.terms.range(p)
        if low is not None and low >= 0:
            return True
        self.fuel = self.fuel_of_a_proof
        if self._nonneg(p, 0):
            return True
        mine = self.terms.leaves_of(p)
        return any(self._nonneg(p - f, 0) for f in self.facts if mine & f.atoms)

    def holds(self, c: Cond) -> bool:
        """Whether a condition is proven."""
        if c.kind == "ge" and c.term is not None:
            return self.nonneg(c.term)
        if c.kind == "eq" and c.term is not None:
            return self.nonneg(c.term) and self.nonneg(-c.term)
        if c.kind == "and":
            return all(self.holds(p) for p in c.parts)
        if c.kind == "or":
            return any(self.holds(p) for p in c.parts)
        if c.kind == "not":
            inner = c.parts[0]
            if inner.kind == "eq" and inner.term is not None:
                return self.nonneg(inner.term - 1) or self.nonneg(-inner.term - 1)
            return inner.kind in ("and", "or") and self.holds(negation(inner))
        return c.kind == "true"

    def refutes(self, c: Cond) -> bool:
        """Whether a condition is proven not to hold."""
        if c.kind == "true":
            return False
        if c.kind == "not":
            return self.holds(c.parts[0])
        return self.holds(negation(c))

    # -- elimination
    # ----------------------------------------------------------------------------------------------
    def _nonneg(self, p: Poly, depth: int) -> bool:
        if p.const is not None:
            return p.const >= 0
        low, high = self.terms.range(p)
        if low is not None and low >= 0:
            return True
        if high is not None and high < 0 and not self.facts or depth > 24:
            return False
        self.fuel -= 1
        if self.fuel < 0:
            return False
        self.budget.spend(len(p.terms))
        youngest = max(p.atoms)
        pair = p.split(youngest)
        if pair is None:
            return False
        factor, rest = pair
        a = self.terms.atoms[youngest]
        if a.kind in ("min", "max"):
            x, y = a.args if a.kind == "min" else a.args[::-1]  # the atom is x where y ≥ x
            return all(
                self._given(cond, factor * one + rest, depth)
                for cond, one in ((y - x, a.args[0]), (x - y, a.args[1]))
            )
        if a.kind == "ite":
            cases = ((a.args[0], a.args[1]), (negation(a.args[0]), a.args[2]))
            return all(
                self._given(c.term if c.kind == "ge" else None, factor * one + rest, depth)
                for c, one in cases
            )
        sign = self._sign(factor, depth)
        if sign == 0:
            return False
        for by, term in self._bounds(youngest, sign):
            if self._nonneg(factor * term + rest * by, depth + 1):
                return True
        return False

    def _given(self, fact: Poly | None, goal: Poly, depth: int) -> bool:
        """The goal where ``fact`` is at least zero."""
        if self._nonneg(goal, depth + 1):
            return True
        return fact is not None and (
            self._nonneg(-fact - 1, depth + 1) or self._nonneg(goal - fact, depth + 1)
        )

    def _sign(self, factor: Poly, depth: int) -> int:
        known = factor.const
        if known is not None:
            return 1 if known > 0 else -1
        if self._nonneg(factor, depth + 1):
            return 1
        return -1 if self._nonneg(-factor, depth + 1) else 0

    def _bounds(self, k: int, sign: int) -> list[Bound]:
        """Lower (sign 1) or upper bounds of an atom, by older atoms."""
        a = self.terms.atoms[k]
        out: list[Bound] = []
        given = (self.lows if sign > 0 else self.highs).get(k, ())
        out += given
        if a.kind == "var":
            own = a.low if sign > 0 else a.high
            if own is not None:
                out.append((1, own))
        elif a.kind == "div":
            x, d = a.args
            known = d.const
            if known is not None:
                out.append((known, x - (known - 1)) if sign > 0 else (known, x))
            elif sign < 0:
                out.append((1, x))  # rounds down, where x ≥ 0 and d ≥ 1
                if not self._nonneg(x, 20):
                    out.pop()
            elif self._nonneg(x, 20):
                out.append((1, ZERO))
        elif a.kind == "mod":
            out.append((1, ZERO) if sign > 0 else (1, a.args[1] - 1))
            if sign < 0 and self._nonneg(a.args[0], 20):
                out.append((1, a.args[0]))
        elif a.kind == "fun":
            low, high = self.terms.range(Poly({(k,): 1}))
            edge = low if sign > 0 else high
            if edge is not None:
                out.append((1, number(edge)))
        return out


class Equations:
    """Equations that hold at once, and what follows from them.

    ``solved``: atom → what it equals. ``impossible``: they cannot hold.
    """

    def __init__(self, terms: Terms, facts: list[Cond], equal: Iterable[Poly], budget: Budget):
        self.terms, self.budget = terms, budget
        self.prover = Prover(terms, facts, budget, fuel=200)
        self.solved: dict[int, Poly] = {}
        self.impossible = self.prover.contradiction
        self.open: list[Poly] = []
        work = [*equal, *self.prover.equal]
        inside = {k for e in (*work, *self.prover.facts) for k in terms.leaves_of(e)}
        self.remainders = [
            a for k in sorted(inside) if (a := terms.atoms[k]).kind == "mod" and a.args[1].const is not None
        ]
        rounds = 0
        while work and not self.impossible and rounds < 200:
            rounds += 1
            work = self._step(work.pop(0), work)
            if not work and not self.impossible:
                work = self._closure()

    def same(self, a: Poly, b: Poly) -> bool:
        """Whether two terms are equal wherever the equations hold."""
        left = self.reduced(a - b)
        return self.impossible or not left.terms or (self.prover.nonneg(left) and self.prover.nonneg(-left))

    def reduced(self, p: Poly) -> Poly:
        return self.terms.replace(p, self.solved)

    def _step(self, e: Poly, work: list[Poly]) -> list[Poly]:
        e = self.reduced(e)
        self.budget.spend(len(e.terms))
        common = 0
        for m, c in e.terms.items():
            if m:
                common = gcd(common, c)
        if common == 0:
            self.impossible = bool(e.terms)
            return work
        if e.terms.get((), 0) % common:
            self.impossible = True  # multiples of common and a number that is none
            return work
        e = Poly({m: c // common for m, c in e.terms.items()})
        if self.prover.nonneg(e - 1) or self.prover.nonneg(-e - 1):
            self.impossible = True
            return work
        parts = self._radix(e) or self._remainders(e)
        if parts is not None:
            return [*parts, *work]
        solved = self._solve(e)
        if solved is None:
            if e not in self.open:
                self.open.append(e)
            return work
        atom, value = solved
        self.solved = {k: self.terms.replace(v, {atom: value}) for k, v in self.solved.items()} | {
            atom: value
        }
        again, self.open = self.open, []
        return [*work, *again]

    def _closure(self) -> list[Poly]:
        """Terms with equal quotients and equal remainders are equal."""
        for k, a in enumerate(self.remainders):
            for b in self.remainders[:k]:
                if a.args[1] != b.args[1] or not self.reduced(a.args[0] - b.args[0]).terms:
                    continue
                x, y = (self.terms.mod(self.reduced(o.args[0]), o.args[1]) for o in (a, b))
                p, q = (self.terms.div(self.reduced(o.args[0]), o.args[1]) for o in (a, b))
                if not self.reduced(x - y).terms and not self.reduced(p - q).terms:
                    return [a.args[0] - b.args[0]]
        return []

    def _small(self, r: Poly, g: Poly) -> bool:
        """|r| < g."""
        return self.prover.nonneg(g - r - 1) and self.prover.nonneg(g + r - 1)

    def _radix(self, e: Poly) -> list[Poly] | None:
        """``e = g·Q + R`` with |R| < g: then both are zero."""
        if len(e.terms) < 3:
            return None
        for g in sorted({abs(c) for m, c in e.terms.items() if m and abs(c) > 1}):
            q, r = e.divided(g)
            if r.terms.get((), 0) > g // 2:
                q, r = q + 1, r - g
            if q.terms and r.terms and self._small(r, number(g)):
                return [r, q]
        for atom in sorted(e.atoms, reverse=True):
            pair = e.split(atom)
            if pair is None or not any(m for m in pair[0].terms) or not pair[1].terms:
                continue
            one = Poly({(atom,): 1})
            if self.prover.nonneg(one - 1) and self._small(pair[1], one):
                return [pair[1], pair[0]]
        return None

    def _remainders(self, e: Poly) -> list[Poly] | None:
        """x mod n = y mod n with |x − y| < n: then x = y."""
        if len(e.terms) != 2 or sorted(e.terms.values()) != [-1, 1] or any(len(m) != 1 for m in e.terms):
            return None
        a, b = (self.terms.atoms[m[0]] for m in e.terms)
        if a.kind != "mod" or b.kind != "mod" or a.args[1] != b.args[1]:
            return None
        difference = a.args[0] - b.args[0]
        return [difference] if self._small(difference, a.args[1]) else None

    def _solve(self, e: Poly) -> tuple[int, Poly] | None:
        """An atom of factor ±1 and what it equals: the youngest whose value does not hang on it."""
        for m in sorted((m for m in e.terms if len(m) == 1), reverse=True):
            atom, c = m[0], e.terms[m]
            if abs(c) != 1:
                continue
            value = Poly({k: -v * c for k, v in e.terms.items() if k != m})
            if atom not in self.terms.leaves_of(value) and not (
                self.terms.atoms[atom].kind != "var" and self._is_inside(atom, value)
            ):
                return atom, value
        return None

    def _is_inside(self, atom: int, value: Poly) -> bool:
        return bool((self.terms.leaves(atom) - {atom}) & self.terms.leaves_of(value))
