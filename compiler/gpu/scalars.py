"""Scalar expressions of tile IR as thread IR: variables replaced, loads guarded. What arithmetic means is the
printer's (small floats are computed in float32)."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.gpu.state import State
from tilescale.compiler.ir.lowerings import lowering
from tilescale.compiler.ir.operations import find
from tilescale.compiler.ops import team
from tilescale.compiler.tvm_compat import BINARY, IF_THEN_ELSE, ir, tirx
from tilescale.errors import InternalError

_LEAVES = ("IntImm", "FloatImm", "StringImm")


class Scalars(State):
    """Mixed into the lowering: ``scalar(e)``."""

    def scalar(self, e: Any) -> Any:
        """An expression of tile IR as one of thread IR."""
        kind = type(e).__name__
        if isinstance(e, ir.Var):
            return self.variables.get(e, e)
        if isinstance(e, ir.TensorLoad):
            return self.load(e)
        if kind in _LEAVES:
            return e
        if kind in BINARY:
            a, b = self.scalar(e.a), self.scalar(e.b)
            if self.is_stage(e) and int(e.b) & (int(e.b) - 1):
                # A ring's rounds are counted from zero, which the printer does not know.
                return tirx.truncmod(a, b)
            return type(e)(a, b)
        if kind == "Cast":
            return tirx.Cast(str(e.ty), self.scalar(e.value))
        if kind in ("Not", "BitwiseNot"):
            return type(e)(self.scalar(e.a))
        if kind == "Select":
            return self._chosen(e.condition, e.true_value, e.false_value)
        if kind == "Let":
            value = self.scalar(e.value)
            self.variables[e.var] = value
            return self.scalar(e.body)
        if isinstance(e, ir.Call):
            return self._call(e)
        raise InternalError(f"no lowering for the expression {kind}: {e}")

    def is_stage(self, e: Any) -> bool:
        """Whether an expression is the stage of a ring, of which its tiles have each."""
        return isinstance(e, tirx.FloorMod) and isinstance(e.a, ir.TensorLoad) and e.a.source in self.rounds

    def _chosen(self, condition: Any, yes: Any, no: Any) -> Any:
        """Only the chosen side is evaluated, so what the condition says holds in it."""
        test = self.scalar(condition)
        with self.analyzer.constraint_scope(test):
            a = self.scalar(yes)
        with self.analyzer.constraint_scope(tirx.Not(test)):
            b = self.scalar(no)
        return tirx.if_then_else(test, a, b)

    def _call(self, e: Any) -> Any:
        name = e.op.name
        if name in ("ts.scale_index", "ts.scale_count"):
            return self.scale_value(str(e.args[0].value), int(name == "ts.scale_count"))
        if name == IF_THEN_ELSE:
            return self._chosen(*e.args)
        if name == "ts.scale_rank":
            return team.checked_rank(self, e)
        if find(e) is not None:
            return lowering(e, self.program.target).lower(e, self)
        return ir.Call(e.op, [self.scalar(a) for a in e.args], attrs=e.attrs, ret_ty=e.ty, span=e.span)
