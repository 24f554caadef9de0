"""What a launch's constants decide: which of two numbers is the smaller one, how many rounds a loop has, and
conditions that always or never hold. A program for rows of any number says

    for k in T.serial(T.ceildiv(T.min(bx * 128 + 128, rows) - bx * 128, 64)):

and compiled for a number of rows that 128 divides, it has two rounds, whose masks mask nothing.

An analyzer knows between what blocks and rounds lie, and what names stand for that are bound to numbers
without memory in them. It computes without end, so it decides about signed integers of 32 and 64 bits alone,
of which the language has it that results are what they can hold. Minima alone are left as they are: they cost
little outside of rounds and conditions.
"""

from __future__ import annotations

from typing import Any

from tilescale.compiler.ir import numeric
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.statements import sequence, statements
from tilescale.compiler.tvm_compat import ir, structural_map, structural_walk, sym, tirx


def decided(program: TileProgram) -> TileProgram:
    """The program without what is known."""
    known = _Known()
    for var, extent in zip(program.launch.block_vars, program.launch.grid, strict=False):
        if constant(extent) is not None:
            known.between(var, tirx.IntImm(str(var.ty), 0), tirx.IntImm(str(var.ty), constant(extent)))
    body = known.statement(program.func.body)
    return program.with_body(body) if known.found else program


class _Known:
    def __init__(self) -> None:
        self.analyzer = sym.Analyzer()
        #: whether rounds or a condition were decided
        self.found = False

    def between(self, var: Any, low: Any, extent: Any) -> None:
        self.analyzer.bind(var, ir.Range.from_min_extent(low, extent))

    def statement(self, s: Any) -> Any:
        """A statement with what is known put in its place; itself where that is nothing."""
        if isinstance(s, tirx.SeqStmt):
            stmts = [self.statement(x) for x in s.seq]
            same = all(x.same_as(y) for x, y in zip(stmts, s.seq, strict=True))
            return s if same else sequence(stmts)
        if isinstance(s, tirx.AttrStmt):
            body = self.statement(s.body)
            return s if body.same_as(s.body) else tirx.AttrStmt(s.node, s.attr_key, s.value, body, s.span)
        if isinstance(s, tirx.For):
            return self.loop(s)
        if isinstance(s, tirx.While):
            body = self.statement(s.body)
            return s if body.same_as(s.body) else tirx.While(s.condition, body, s.span)
        if isinstance(s, tirx.IfThenElse):
            return self.condition(s)
        s = structural_map(s, ((tirx.Min, tirx.Max), self.number))
        if isinstance(s, tirx.Bind) and str(s.value.ty) != "bool" and _plain(s.value):
            self.analyzer.bind(s.var, s.value)
        return s

    def number(self, e: Any) -> Any:
        """Of a minimum or maximum of integers the one that it always is."""
        if not _plain(e):
            return e
        for this, that in ((e.a, e.b), (e.b, e.a)):
            if self.analyzer.can_prove(this <= that if isinstance(e, tirx.Min) else this >= that):
                return this
        return e

    def loop(self, s: Any) -> Any:
        extent = s.extent
        if constant(extent) is None and _plain(extent):
            rounds = constant(self.analyzer.simplify(extent))
            if rounds is not None and rounds >= 0:
                extent, self.found = tirx.IntImm(str(extent.ty), rounds), True
        if constant(s.min) is not None and (constant(extent) or 0) > 0:
            self.between(s.loop_var, s.min, extent)
        body = self.statement(s.body)
        if extent.same_as(s.extent) and body.same_as(s.body):
            return s
        if _nothing(body) and None not in numeric.variables(extent):
            return body
        notes = dict(s.annotations) if s.annotations else {}
        return tirx.For(s.loop_var, s.min, extent, s.kind, body, annotations=notes, span=s.span)

    def condition(self, s: Any) -> Any:
        if _plain(s.condition):
            for holds, case in ((s.condition, s.then_case), (tirx.Not(s.condition), s.else_case)):
                if self.analyzer.can_prove(holds):
                    self.found = True
                    return sequence([]) if case is None else self.statement(case)
        then = self.statement(s.then_case)
        other = None if s.else_case is None else self.statement(s.else_case)
        if then.same_as(s.then_case) and (other is None or other.same_as(s.else_case)):
            return s
        return tirx.IfThenElse(s.condition, then, other, s.span)


def _plain(e: Any) -> bool:
    """Whether an expression is of such integers, or a condition on them, and the same whenever it is
    computed: it reads no memory and asks nobody."""
    kinds: set[str] = {str(e.ty)}
    structural_walk(e, (ir.Var, lambda v: kinds.add(str(v.ty))))
    structural_walk(
        e, (tirx.Cast, lambda c: kinds.update((str(c.ty), "cut" if str(c.ty) == "int32" else "")))
    )
    return kinds <= {"int32", "int64", "bool", ""} and None not in numeric.variables(e)


def _nothing(s: Any) -> bool:
    return all(isinstance(x, tirx.Evaluate) and isinstance(x.value, tirx.IntImm) for x in statements(s))
