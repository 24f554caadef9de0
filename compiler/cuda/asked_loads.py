"""What a launch that begins early asks into the L2 cache before the launches in front have ended (``T.Kernel(…, pdl=True)``).

The first loads of a block would find an idle memory: nothing is read between the last load of the launch in front and the moment when its
end is known. So everything that a block's threads load first is asked for in front of the wait, by a copy of the loads' own loops in which
each load is a prefetch (PTX ISA 9.0, "prefetch").

A prefetch brings nothing into the program, and the L2 cache is where all multiprocessors' accesses meet: what the launch in front still
writes is written there, so the load behind the wait sees it. Only addresses that follow from the numbers of thread and block, and from
scalar arguments, are known so early; what hangs on loaded numbers is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tilescale.compiler.cuda.rings import call
from tilescale.compiler.frontend.builder import sequence
from tilescale.compiler.layout.loops import bits_of
from tilescale.compiler.passes.roles import renewed
from tilescale.compiler.tvm_compat import EXTERN_CALLS, IF_THEN_ELSE, ir, structural_walk, tirx

#: bytes that a block asks for: what memory brings a multiprocessor while a launch ends and the next one hears of it (about 2 µs)
BUDGET = 64 << 10


def asked_early(body: Any, tensors: set[Any], block: list[Any], threads: int) -> list[Any]:
    """Statements that ask for what ``threads`` threads that run ``body`` load first of ``tensors``. ``block``: the block's numbers."""
    made = _Asking(tensors, set(block), BUDGET // threads).statement(body)
    return [] if made is None else [renewed(made, {})]


def asked_ahead(body: Any, tensors: set[Any], block: list[Any], rounds: int) -> Any:
    """The body with loops that ask, in every round, for what they load so many rounds later."""
    asking = _Asking(tensors, set(block), 1 << 60)
    out: list[Any] = []
    for s in body.seq if isinstance(body, tirx.SeqStmt) else [body]:
        made = asking.statement(s)
        if made is None or not isinstance(s, tirx.For) or s.kind != tirx.ForKind.SERIAL or int(s.extent) <= rounds:
            out.append(s)
            continue
        dt = str(s.loop_var.ty)
        out += [renewed(made.body, {s.loop_var: s.min + tirx.IntImm(dt, k)}) for k in range(rounds)]
        later = s.loop_var + tirx.IntImm(dt, rounds)
        asks = tirx.IfThenElse(later < s.extent, renewed(made.body, {s.loop_var: later}), None)
        notes = dict(s.annotations) if s.annotations else {}
        out.append(tirx.For(s.loop_var, s.min, s.extent, s.kind, sequence([asks, s.body]), annotations=notes, span=s.span))
    return sequence(out)


def admitted_late(body: Any, tensors: set[Any]) -> Any:
    """The body with the launch behind admitted where the threads have loaded everything from ``tensors``, what they compute and store from
    it left to do."""
    stmts = list(body.seq) if isinstance(body, tirx.SeqStmt) else [body]
    last = 0
    for k, s in enumerate(stmts):
        found: list[Any] = []
        structural_walk(s, (ir.TensorLoad, lambda e, found=found: found.append(e) if e.source in tensors else None))
        last = k if found else last
    return sequence([*stmts[: last + 1], call("admit_launches"), *stmts[last + 1 :]])


@dataclass
class _Asking:
    """``left``: bytes that each thread may still ask for."""

    tensors: set[Any]
    #: the block's numbers and what follows from them
    own: set[Any]
    left: int
    #: names whose values are not known so early
    late: set[Any] = field(default_factory=set)
    #: how often the statement at hand runs
    times: int = 1

    def known(self, e: Any) -> bool:
        """Whether an expression loads nothing, calls nothing, and depends on no such thing."""
        found: list[Any] = []
        structural_walk(e, (ir.TensorLoad, found.append))
        structural_walk(e, (ir.Call, lambda c: found.append(c) if c.op.name in EXTERN_CALLS else None))
        structural_walk(e, (ir.Var, lambda v: found.append(v) if v in self.late else None))
        return not found

    def depends(self, e: Any) -> bool:
        """Whether blocks have different values."""
        found: list[Any] = []
        structural_walk(e, (ir.Var, lambda v: found.append(v) if v in self.own else None))
        return bool(found)

    def statement(self, s: Any) -> Any | None:
        """The statement's prefetches, with the control flow around them; None where there are none."""
        if self.left <= 0:
            return None
        if isinstance(s, tirx.SeqStmt):
            made = [m for x in s.seq if (m := self.statement(x)) is not None]
            return sequence(made) if any(not isinstance(m, tirx.Bind) for m in made) else None
        if isinstance(s, tirx.Bind):
            if self.known(s.value):
                if self.depends(s.value):
                    self.own.add(s.var)
                return s
            self.late.add(s.var)
        elif isinstance(s, tirx.For):
            return self.loop(s)
        elif isinstance(s, tirx.IfThenElse) and self.known(s.condition):
            then, other = self.statement(s.then_case), None if s.else_case is None else self.statement(s.else_case)
            if then is not None or other is not None:
                return tirx.IfThenElse(s.condition, sequence([]) if then is None else then, other, s.span)
        elif isinstance(s, tirx.BufferStore):
            return self.loads(s.value)
        return None

    def loop(self, s: Any) -> Any | None:
        """As many rounds of a loop as there are bytes left for."""
        if not isinstance(s.extent, tirx.IntImm) or not self.known(s.min) or not int(s.extent):
            return None
        before, rounds = self.left, int(s.extent)
        self.times *= rounds if s.kind == tirx.ForKind.UNROLLED else 1
        body = self.statement(s.body)
        self.times //= rounds if s.kind == tirx.ForKind.UNROLLED else 1
        if body is None:
            return None
        if s.kind != tirx.ForKind.UNROLLED:
            each, whole = before - self.left, rounds
            rounds = min(rounds, before // each)
            self.left = before - rounds * each if rounds == whole else 0  # what stands behind the loop is loaded later
        notes = dict(s.annotations) if s.annotations else {}
        return tirx.For(s.loop_var, s.min, tirx.IntImm("int32", rounds), s.kind, body, annotations=notes, span=s.span) if rounds else None

    def loads(self, value: Any) -> Any | None:
        """Prefetches of what a value is loaded from; of values that hang on conditions inside them those of the form ``c ? x : y``."""
        if isinstance(value, ir.Call) and value.op.name == IF_THEN_ELSE:
            then = self.loads(value.args[1]) if self.known(value.args[0]) else None
            return None if then is None else tirx.IfThenElse(value.args[0], then, None)
        found: list[Any] = []
        guarded: list[Any] = []
        structural_walk(value, (ir.TensorLoad, lambda e: found.append(e) if e.source in self.tensors else None))
        structural_walk(value, (ir.Call, lambda c: guarded.append(c) if c.op.name == IF_THEN_ELSE else None))
        found = [e for e in found if self.known(e.indices[0]) and self.depends(e.indices[0])]
        if not found or guarded:
            return None
        self.left -= sum(bits_of(e.source) // 8 * _lanes(e.indices[0]) for e in found) * self.times
        first = [i.base if isinstance(i, tirx.Ramp) else i for i in (e.indices[0] for e in found)]
        return sequence([call("ask", tirx.address_of(tirx.BufferLoad(e.source, [i]))) for e, i in zip(found, first, strict=True)])


def _lanes(index: Any) -> int:
    return int(index.lanes) if isinstance(index, tirx.Ramp) else 1
