"""All executions of a statement, counted one by one where every extent is a number: generated loops, exact
and quick."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tilescale.compiler.static.prove import Budget, OverBudget
from tilescale.compiler.static.terms import Cond, Poly, Terms

#: executions after which counting is given up; as many as one step of the budget is for
LIMIT, A_STEP = 300_000, 8


class TooMany(Exception):
    """Counting would take longer than it is worth."""


class _Source:
    """Terms as Python text; variables are named by their atoms."""

    def __init__(self, terms: Terms, env: dict[int, int]):
        self.terms, self.env = terms, env

    def term(self, p: Poly) -> str:
        parts = ["*".join([str(c), *(self.atom(a) for a in m)]) for m, c in p.terms.items()]
        return "(" + (" + ".join(parts) or "0") + ")"

    def atom(self, k: int) -> str:
        if k in self.env:
            return f"({self.env[k]})"
        a = self.terms.atoms[k]
        if a.kind == "var":
            return f"v{k}"
        if a.kind in ("div", "mod"):
            return f"({self.term(a.args[0])} {'//' if a.kind == 'div' else '%'} {self.term(a.args[1])})"
        if a.kind in ("min", "max"):
            return f"{a.kind}({self.term(a.args[0])}, {self.term(a.args[1])})"
        if a.kind == "ite":
            return f"({self.term(a.args[1])} if {self.cond(a.args[0])} else {self.term(a.args[2])})"
        if a.kind == "fun":
            return f"({self.term(a.args[1])} {a.args[0]} {self.term(a.args[2])})"
        raise TooMany

    def cond(self, c: Cond) -> str:
        if c.kind in ("ge", "eq") and c.term is not None:
            return f"({self.term(c.term)} {'>=' if c.kind == 'ge' else '=='} 0)"
        if c.kind in ("and", "or"):
            return "(" + f" {c.kind} ".join(map(self.cond, c.parts)) + ")"
        if c.kind == "not":
            return f"(not {self.cond(c.parts[0])})"
        if c.kind == "true":
            return "True"
        raise TooMany


def each(
    terms: Terms,
    scope: Sequence[int],
    conds: Sequence[Cond],
    outputs: Sequence[Poly],
    env: dict[int, int],
    budget: Budget,
    take: Callable[..., Any],
    limit: int = LIMIT,
) -> bool:
    """Calls ``take(values of scope, values of outputs)`` for each execution in which all ``conds`` hold; ends
    early where it gives True.

    env: values of the variables that do not vary. Gives whether ``take`` ended it.

    Raises:
        TooMany: more than ``limit`` executions, or a term that has no value. OverBudget.
    """
    order = sorted(k for k in scope if k not in env)
    source = _Source(terms, env)
    lines, indent = ["def run(take, tick):"], "    "
    placed: set[int] = set(env)
    waiting = list(conds)

    def test() -> None:
        nonlocal waiting
        ready = [
            c
            for c in waiting
            if {k for k in terms.leaves_of_cond(c) if terms.atoms[k].kind == "var"} <= placed
        ]
        waiting = [c for c in waiting if c not in ready]
        if ready:
            jump = "return False" if indent == "    " else "continue"
            lines.append(f"{indent}if not ({' and '.join(map(source.cond, ready))}): {jump}")

    test()
    for k in order:
        a = terms.atoms[k]
        if a.low is None or a.high is None:
            raise TooMany
        lines.append(f"{indent}for v{k} in range({source.term(a.low)}, {source.term(a.high)} + 1):")
        indent += "    "
        lines.append(f"{indent}tick()")
        placed.add(k)
        test()
    if waiting:
        raise TooMany
    values = ", ".join(f"v{k}" for k in order)
    shown = ", ".join(source.term(p) for p in outputs)
    lines.append(
        f"{indent}if take(({values}{',' if order else ''}), ({shown}{',' if outputs else ''})): return True"
    )
    lines.append("    return False")
    left = [limit]

    def tick() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise TooMany
        if left[0] % 512 == 0:
            budget.spend(512 // A_STEP)

    space: dict[str, Any] = {}
    try:
        exec("\n".join(lines), {"__builtins__": {"range": range, "min": min, "max": max}}, space)
        return bool(space["run"](take, tick))
    except ZeroDivisionError:
        raise TooMany from None


__all__ = ["LIMIT", "OverBudget", "TooMany", "each"]
