"""Which statements may change places: by what they read and write, the names they use and bind, and whether
they order more than that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tilescale.compiler.ir.operations import REGISTRY
from tilescale.compiler.passes.products import touched
from tilescale.compiler.passes.roles import calls, root_in
from tilescale.compiler.tvm_compat import ir, structural_walk, tirx


@dataclass(frozen=True)
class Facts:
    """What statements read and write, views as what they are views of; whether they signal others or wait for
    them; the names that they use, and those that they bind."""

    read: frozenset[Any]
    written: frozenset[Any]
    ordered: bool
    used: frozenset[Any]
    bound: frozenset[Any]

    def without(self, buffers: set[Any]) -> Facts:
        return replace(self, read=self.read - buffers, written=self.written - buffers)

    def of_another_round(self) -> Facts:
        """The same of another round of a loop: names are bound anew in each."""
        return replace(self, bound=frozenset())


def facts(stmts: Iterable[Any], bases: Mapping[Any, Any]) -> Facts:
    """``bases``: what each view is a view of (`roles.views`)."""
    stmts = list(stmts)
    read: set[Any] = set()
    written: set[Any] = set()
    used: set[Any] = set()
    for s in stmts:
        reads, writes = touched(s)
        read |= {root_in(bases, b) for b in reads}
        written |= {root_in(bases, b) for b in writes}
        used |= names_in(s)
    ordered = not all(REGISTRY[c.op.name].plain for s in stmts for c in calls(s))
    bound = {s.var for s in stmts if isinstance(s, tirx.Bind)}
    return Facts(frozenset(read), frozenset(written), ordered, frozenset(used), frozenset(bound))


def names_in(s: Any) -> set[Any]:
    found: set[Any] = set()
    structural_walk(s, (ir.Var, found.add))
    return found


def between(first: Facts, second: Facts) -> str:
    """Why the second must stay behind the first; "" where it need not."""
    shared = (first.written & second.read) | (first.written & second.written) | (first.read & second.written)
    for b in sorted(shared, key=lambda b: b.name):
        which = (
            ("written", "read")
            if b in first.written and b in second.read
            else ("written", "written")
            if b in first.written
            else ("read", "written")
        )
        return f"{b.name} is {which[0]} there and {which[1]} here"
    if names := first.bound & second.used:
        return f"{next(iter(names)).name} is named there and used here"
    waits = first.ordered or second.ordered
    return "one of them signals other threads or blocks, or waits for them" if waits else ""
