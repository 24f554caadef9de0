"""Counterexamples: found by trying the corners of every variable's bounds, certified for all arguments,
evaluated before they are told.

A fault is *certain* when, whatever the caller passes (extents, numbers) and however many ranks there are,
some rank, block and iteration meets it. A fault that some arguments avoid is told and stops nothing: a kernel
made for two ranks is no fault of three.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from tilescale.compiler.static.prove import STEP, Budget, OverBudget, Prover
from tilescale.compiler.static.terms import EXECUTION, Cond, Poly, Terms, Unevaluable, at_least, number

#: values that are tried for what the caller chooses and nothing bounds
TRIED = (1, 2, 3, 4, 5, 8, 17, 64, 65, 130, 1000, 0, -1)
LEAVES = 4000


@dataclass
class Question:
    """Can all ``conds`` hold and ``goal`` fail?"""

    terms: Terms
    conds: list[Cond]
    goal: Cond

    #: variables that the counterexample names besides those that decide
    scope: tuple[int, ...] = ()

    @property
    def relevant(self) -> list[int]:
        """The variables that decide it."""
        t = self.terms
        return t.with_bounds(t.leaves_of_cond(self.goal).union(*(t.leaves_of_cond(c) for c in self.conds)))

    def completed(self, env: dict[int, int]) -> dict[int, int]:
        """A counterexample with values for the variables of ``scope`` that do not matter."""
        out = dict(env)
        for k in self.terms.with_bounds(self.scope):
            if k not in out and self.terms.atoms[k].kind == "var":
                out[k] = next(iter(_candidates(self.terms, k, out)), 0)
        return out

    def fails(self, env: dict[int, int]) -> bool:
        """Whether ``env`` is a counterexample: all variables within their bounds, all conditions hold, the
        goal does not."""
        t = self.terms
        try:
            for k in self.relevant:
                a = t.atoms[k]
                if a.kind == "opaque" or k not in env:
                    return False
                if (a.low is not None and env[k] < t.value(a.low, env)) or (
                    a.high is not None and env[k] > t.value(a.high, env)
                ):
                    return False
            return all(t.holds(c, env) for c in self.conds) and not t.holds(self.goal, env)
        except Unevaluable:
            return False

    def given(self) -> list[int]:
        """The relevant variables that the caller chooses."""
        return [k for k in self.relevant if self.terms.atoms[k].role not in EXECUTION]


def search(q: Question, budget: Budget, leaves: int = LEAVES) -> dict[int, int] | None:
    """A counterexample among the corners; None where none was met."""
    t, order = q.terms, q.relevant
    if any(t.atoms[k].kind == "opaque" or t.atoms[k].role == "unclear" for k in order):
        return None
    place = {k: n for n, k in enumerate(order)}
    due: dict[int, list[Cond]] = {}
    for c in (*q.conds, at_least(number(0))):
        last = max((place[k] for k in t.leaves_of_cond(c) if k in place), default=-1)
        due.setdefault(last, []).append(c)
    left = [leaves]
    env: dict[int, int] = {}

    def descend(depth: int) -> bool:
        left[0] -= 1
        if left[0] < 0:
            return False
        budget.spend(1)
        try:
            if not all(t.holds(c, env) for c in due.get(depth - 1, ())):
                return False
            if depth == len(order):
                return not t.holds(q.goal, env)
            for value in _candidates(t, order[depth], env):
                env[order[depth]] = value
                if descend(depth + 1):
                    return True
        except Unevaluable:
            pass
        env.pop(order[depth], None) if depth < len(order) else None
        return False

    if not descend(0):
        return None
    return dict(env) if q.fails(env) else None


def _candidates(t: Terms, k: int, env: dict[int, int]) -> list[int]:
    a = t.atoms[k]
    low = None if a.low is None else t.value(a.low, env)
    high = None if a.high is None else t.value(a.high, env)
    if low is None or high is None:
        tried = [v for v in TRIED if (low is None or v >= low) and (high is None or v <= high)]
        return [2, 3, 1, 4, 8] if a.role == "ranks" else tried
    if a.role == "ranks":
        return [v for v in (2, 3, 1, 4, 8) if low <= v <= high]
    return [
        v
        for v in dict.fromkeys((low, high, low + 1, high - 1, (low + high) // 2, low + 2, low + 3))
        if low <= v <= high
    ]


def certain(q: Question, env: dict[int, int], budget: Budget) -> bool:
    """Whether the fault that ``env`` shows is there for all arguments of the kernel: proven for one choice of
    rank, block and iteration as a function of the arguments."""
    t = q.terms
    given = q.given()
    if not given:
        return True
    if any(t.atoms[k].kind == "opaque" or t.atoms[k].role == "unclear" for k in given):
        return False
    execution = [k for k in q.relevant if k not in given]
    for choice in _choices(t, execution, env):
        budget.spend(STEP)
        by: dict[int, Poly] = {}
        prover = Prover(t, (), budget, fuel=200)
        inside = True
        for k, pick in zip(execution, choice, strict=True):
            a = t.atoms[k]
            low, high = (None if b is None else t.replace(b, by) for b in (a.low, a.high))
            made = low if pick == "low" else high if pick == "high" else number(env[k])
            if made is None:
                inside = False
                break
            by[k] = made
            inside = (
                inside
                and (low is None or prover.nonneg(made - low))
                and (high is None or prover.nonneg(high - made))
            )
        if (
            inside
            and all(prover.holds(t.replace_cond(c, by)) for c in q.conds)
            and prover.refutes(t.replace_cond(q.goal, by))
        ):
            return True
    return False


def _choices(t: Terms, execution: list[int], env: dict[int, int]) -> Iterator[tuple[str, ...]]:
    """Corners as functions of the arguments, the ones nearest to ``env`` first."""
    options: list[tuple[str, ...]] = []
    for k in execution:
        a = t.atoms[k]
        try:
            low = None if a.low is None else t.value(a.low, env)
            high = None if a.high is None else t.value(a.high, env)
        except Unevaluable:
            low = high = None
        if env[k] == high and env[k] != low:
            options.append(("high", "same"))
        elif env[k] == low and env[k] == high:
            options.append(("low", "high"))
        else:
            options.append(("same",) if env[k] != low else ("low",))
    yield from itertools.islice(itertools.product(*options), 64)


def in_names(t: Terms, env: dict[int, int]) -> dict[str, int]:
    """The values of variables by the author's names, what the caller chooses first."""
    out: dict[str, int] = {}
    for k in sorted(
        (k for k in env if not t.atoms[k].name.startswith("element")),
        key=lambda k: (t.atoms[k].role in EXECUTION, k),
    ):
        a = t.atoms[k]
        name, value = a.name, env[k]
        if a.shown is not None:
            try:
                name, value = a.shown[0], t.value(a.shown[1], env)
            except Unevaluable:
                pass
        if name in out and out[name] != value:
            name += f" ({sum(n.startswith(name) for n in out) + 1})"
        out[name] = value
    return out


__all__ = ["OverBudget", "Question", "certain", "in_names", "search"]
