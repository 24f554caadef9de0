"""From a question to a verdict: cheap proofs first, then corners, then the solver where there is time for
it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tilescale.compiler.static.collect import Access, Facts
from tilescale.compiler.static.obligations import PROVEN, REFUTED, UNKNOWN, Counterexample, Obligation
from tilescale.compiler.static.prove import STEP, Budget, OverBudget, Prover
from tilescale.compiler.static.refute import Question, certain, in_names, search
from tilescale.compiler.static.terms import EXECUTION, Cond, Poly, Terms, Unevaluable, at_least

IN_MEMORY = "depends on values in memory"


@dataclass
class Verdict:
    """``env``: the counterexample, also beside ``unknown`` where other arguments avoid it."""

    status: str
    env: dict[int, int] | None = None
    reason: str = ""


@dataclass
class Judge:
    """The checks' common ground. ``solve``: (sat, env) of a question by the solver, None where there is no
    time for one."""

    terms: Terms
    facts: Facts
    budget: Budget
    #: how many corners are tried for a counterexample
    leaves: int = 400
    solve: Callable[[Question], tuple[str, dict[int, int] | None]] | None = None
    always: Callable[[Question], bool] | None = None
    #: atoms below this number are the program's, the others the checks'
    own: int = 0
    #: what the cheap routes left open, with the work that asks again
    open: list[tuple[Obligation, Callable[[], Obligation]]] = field(default_factory=list)
    _provers: dict[tuple[Cond, ...], Prover] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.own = len(self.terms.atoms)

    def prover(self, conds: tuple[Cond, ...]) -> Prover:
        """Proofs under the conditions of a path."""
        if conds not in self._provers:
            self._provers[conds] = Prover(self.terms, conds, self.budget)
        return self._provers[conds]

    def decide(
        self,
        conds: tuple[Cond, ...],
        goal: Cond,
        proven: Callable[[], bool] | None = None,
        scope: tuple[int, ...] = (),
    ) -> Verdict:
        """Whether ``goal`` holds wherever ``conds`` do. ``proven``: a proof of its own, tried instead of the
        prover's. ``scope``: what a counterexample names besides what decides."""
        self.budget.spend(STEP)
        if proven is None:
            prover = self.prover(conds)
            if prover.contradiction or prover.holds(goal):
                return Verdict(PROVEN)
        elif proven():
            return Verdict(PROVEN)
        return self.counterexample(Question(self.terms, list(conds), goal, scope))

    def counterexample(self, q: Question) -> Verdict:
        """What can be said of a question that has no cheap proof."""
        env = search(q, self.budget, self.leaves)
        if env is None and self.solve is not None:
            answer, env = self.solve(q)
            if answer == "unsat":
                return Verdict(PROVEN)
        if env is None:
            known = all(self.terms.atoms[k].kind != "opaque" for k in q.relevant)
            return Verdict(UNKNOWN, None, "neither a proof nor a counterexample" if known else IN_MEMORY)
        whole = q.completed(env)
        if certain(q, env, self.budget) or (self.always is not None and self.always(q)):
            return Verdict(REFUTED, whole)
        names = in_names(self.terms, {k: env[k] for k in q.given() if k in env})
        told = ", ".join(f"{name} = {value}" for name, value in names.items())
        return Verdict(UNKNOWN, whole, f"fails for {told}, and not for all arguments")

    # -- telling
    # --------------------------------------------------------------------------------------------------
    def told(self, verdict: Verdict, index: str = "") -> Counterexample | None:
        """A counterexample in the author's names."""
        return None if verdict.env is None else Counterexample(in_names(self.terms, verdict.env), index)

    def shown(self, p: Poly | None, env: dict[int, int]) -> str:
        """A term's value under a counterexample, which may leave open what does not decide."""
        try:
            return "…" if p is None else str(self.terms.value(p, env))
        except Unevaluable:
            return "…"

    def region(self, a: Access, env: dict[int, int] | None) -> str:
        """``tile[3:7, 2]`` under a counterexample; empty without one."""
        if env is None:
            return ""
        parts = []
        for low, extent in zip(a.low, a.extent, strict=True):
            x, n = self.shown(low, env), self.shown(extent, env)
            parts.append(x if n == "1" else f"{x}:{int(x) + int(n)}" if "…" not in (x, n) else "…")
        return f"{a.memory.name}[{', '.join(parts)}]"

    def file(self, made: Obligation, verdict: Verdict, text: str, index: str = "") -> Obligation:
        """Puts a verdict into an obligation."""
        made.status, made.reason = verdict.status, verdict.reason
        if verdict.status != PROVEN:
            made.text = text
            made.counterexample = self.told(verdict, index)
        return made

    def guarded(self, made: Obligation, work: Callable[[], Obligation]) -> Obligation:
        """``work()``, which fills ``made``; unknown where the budget ends in the middle of it."""
        try:
            work()
        except OverBudget:
            made.status, made.reason = UNKNOWN, "the budget was spent"
        if made.status == UNKNOWN:
            self.open.append((made, work))
        return made

    def again(self) -> None:
        """Asks once more what was left open, by then with the solver; one hard question must not keep others
        from an easy answer."""
        work, self.open, self.leaves = self.open, [], 4000
        for made, ask in work:
            made.text, made.reason, made.counterexample, made.other = "", "", None, None
            self.guarded(made, ask)


def inside(low: list[Poly], extent: list[Poly], shape: list[Poly]) -> Cond:
    """A region lies inside a shape."""
    parts = [
        c for x, e, n in zip(low, extent, shape, strict=True) for c in (at_least(x), at_least(n - x - e))
    ]
    return Cond("and", parts=tuple(parts))


def executions(terms: Terms, atoms: tuple[int, ...]) -> list[int]:
    """Those of ``atoms`` that number executions."""
    return [k for k in atoms if terms.atoms[k].role in EXECUTION]
