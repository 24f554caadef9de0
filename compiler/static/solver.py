"""What is left over, asked of Z3 (integers, products and quotients included), with a limit a question: of
Z3's own count of its work, so that its answers do not depend on the machine.

Importing Z3 and its first question take longer than a whole compilation may spend on its checks, so that only
`tilescale check` and whoever gives a budget of about a second come here.
"""

from __future__ import annotations

from typing import Any

import z3

from tilescale.compiler.static.judge import Judge
from tilescale.compiler.static.prove import STEP, Budget
from tilescale.compiler.static.refute import Question
from tilescale.compiler.static.terms import Cond, Poly, Terms

#: steps for one question, about 0.4 s; what Z3 counts meanwhile in one step; milliseconds after which it is
#: stopped all the same, since some of what it does it does not count
LIMIT, COUNTED, LATEST = 80_000, 25, 20_000
#: the greatest value of an argument that a counterexample may need
GREATEST = 4096


class _Formula:
    """A question in Z3's terms. ``defs``: bounds of the variables, and what says what a quotient by a
    symbolic divisor is."""

    def __init__(self, q: Question):
        self.terms: Terms = q.terms
        self.known: dict[int, Any] = {}
        self.defs: list[Any] = []
        self.given: list[Any] = []
        self.fresh: list[Any] = []
        for k in q.relevant:
            self.known[k] = z3.Int(f"{self.terms.atoms[k].name}.{k}")
        for k in q.relevant:
            a, v = self.terms.atoms[k], self.known[k]
            low = [] if a.low is None else [v >= self.term(a.low)]
            high = [] if a.high is None else [v <= self.term(a.high)]
            (self.given if k in q.given() else self.defs).extend(low + high)
        self.conds = [self.cond(c) for c in q.conds]
        self.goal = self.cond(q.goal)

    def term(self, p: Poly) -> Any:
        out: Any = z3.IntVal(0)
        for m, c in p.terms.items():
            part: Any = z3.IntVal(c)
            for k in m:
                part = part * self.atom(k)
            out = out + part
        return out

    def atom(self, k: int) -> Any:
        if k not in self.known:
            self.known[k] = self._atom(k)
        return self.known[k]

    def _atom(self, k: int) -> Any:
        a = self.terms.atoms[k]
        if a.kind in ("div", "mod"):
            x, d = self.term(a.args[0]), self.term(a.args[1])
            if a.args[1].const is not None:
                return x / d if a.kind == "div" else x % d  # Z3's round down where the divisor is positive
            q, r = z3.Int(f"q.{k}"), z3.Int(f"r.{k}")
            self.fresh += [q, r]
            self.defs += [x == d * q + r, r >= 0, r < d]
            return q if a.kind == "div" else r
        if a.kind in ("min", "max"):
            x, y = self.term(a.args[0]), self.term(a.args[1])
            return z3.If(x <= y, x, y) if a.kind == "min" else z3.If(x >= y, x, y)
        if a.kind == "ite":
            return z3.If(self.cond(a.args[0]), self.term(a.args[1]), self.term(a.args[2]))
        v = z3.Int(f"u.{k}")
        self.fresh.append(v)
        low, high = self.terms.range(Poly({(k,): 1}))
        self.defs += ([] if low is None else [v >= low]) + ([] if high is None else [v <= high])
        return v

    def cond(self, c: Cond) -> Any:
        if c.kind == "ge" and c.term is not None:
            return self.term(c.term) >= 0
        if c.kind == "eq" and c.term is not None:
            return self.term(c.term) == 0
        if c.kind in ("and", "or"):
            return (z3.And if c.kind == "and" else z3.Or)([self.cond(p) for p in c.parts])
        if c.kind == "not":
            return z3.Not(self.cond(c.parts[0]))
        return z3.BoolVal(True)


def _counted(s: Any) -> int:
    """What Z3 has counted so far of all its work."""
    found = s.statistics()
    return int(found.get_key_value("rlimit count")) if "rlimit count" in found.keys() else 0


def _ask(s: Any, budget: Budget) -> Any:
    budget.spend(STEP)
    s.set("rlimit", max(1, min(LIMIT, budget.left)) * COUNTED)
    s.set("timeout", LATEST)
    before = _counted(s)
    answer = s.check()
    # What is over the budget is no reason to throw an answer away: the next question raises OverBudget.
    budget.left -= (_counted(s) - before) // COUNTED
    return answer


def solve(q: Question, budget: Budget) -> tuple[str, dict[int, int] | None]:
    """``("unsat", None)``: proven. ``("sat", env)``: a counterexample, evaluated. Else ``("unknown",
    None)``."""
    f = _Formula(q)
    s = z3.Solver()
    s.add(*f.defs, *f.given, *f.conds, z3.Not(f.goal))
    answer = _ask(s, budget)
    if answer == z3.unsat:
        return "unsat", None
    if answer != z3.sat:
        return "unknown", None
    small = [z3.And(f.known[k] <= GREATEST, f.known[k] >= -GREATEST) for k in q.given()]
    s = z3.Solver()
    s.add(*f.defs, *f.given, *f.conds, z3.Not(f.goal), *small)
    if _ask(s, budget) != z3.sat:
        return "unknown", None
    model = s.model()
    env = {
        k: model.eval(f.known[k], model_completion=True).as_long()
        for k in q.relevant
        if q.terms.atoms[k].kind == "var"
    }
    return ("sat", env) if q.fails(env) else ("unknown", None)


def always(q: Question, budget: Budget) -> bool:
    """Whether for all arguments some execution is a counterexample: no arguments are left for which every
    execution is right."""
    atoms = q.terms.atoms
    given = q.given()
    if any(atoms[k].kind == "opaque" or atoms[k].role == "unclear" for k in given):
        return False
    f = _Formula(q)
    bound = [f.known[k] for k in q.relevant if k not in given] + f.fresh
    right = z3.Not(z3.And(*f.defs, *f.conds, z3.Not(f.goal)))
    s = z3.Solver()
    s.add(*f.given)
    s.add(z3.ForAll(bound, right) if bound else right)
    return bool(_ask(s, budget) == z3.unsat)


def attach(judge: Judge) -> None:
    """Lets a judge ask the solver."""
    judge.solve = lambda q: solve(q, judge.budget)
    judge.always = lambda q: always(q, judge.budget)
