"""Expressions of a trace as the symbolic extents that they were made of."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.builder import state as bld
from tilescale.compiler.tvm_compat import ir, is_expr, tirx
from tilescale.language.symbolic import Sym, SymExpr

_SYMBOLIC = {
    "Add": "+", "Sub": "-", "Mul": "*", "FloorDiv": "//", "FloorMod": "%", "Min": "min", "Max": "max"
}  # fmt: skip


def extent_of(e: Any) -> Any:
    """The symbolic extent that `symbol_expr` made an expression of, as ``A.shape[0] + 1``; any other value as
    it is."""
    if isinstance(e, tirx.IntImm):
        return int(e.value)
    if isinstance(e, ir.Var):
        b = bld.current()
        name = next((n for n, var in b.symbols.items() if var.same_as(e)), None)
        return e if name is None else Sym(name, str(e.ty), b.multiples.get(name, 1))
    op = _SYMBOLIC.get(type(e).__name__) if is_expr(e) else None
    if op is None:
        return e
    a, b_ = extent_of(e.a), extent_of(e.b)
    return e if is_expr(a) or is_expr(b_) else SymExpr(op, a, b_)
