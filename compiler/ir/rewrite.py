"""Rebuilding a program's statements one by one, with the control flow around them as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilescale.compiler.frontend.builder import sequence
from tilescale.compiler.frontend.launch import SCALES
from tilescale.compiler.ir.nests import is_nest
from tilescale.compiler.layout.infer import Executor
from tilescale.compiler.tvm_compat import tirx

Leaf = Callable[[Any, Executor], "list[Any] | None"]


def rebuild(s: Any, ex: Executor, leaf: Leaf) -> Any:
    """``leaf(statement, executor)`` for every nest, operation, binding, store, and for every loop and If in front of its parts: what it
    gives takes the statement's place (for a loop or an If: stands in front of it); None leaves it alone."""
    if isinstance(s, tirx.SeqStmt):
        return sequence([t for x in s.seq for t in _flat(rebuild(x, ex, leaf))])
    if isinstance(s, tirx.AttrStmt):
        inner = ex.within(SCALES[int(s.value.value)]) if s.attr_key == "ts.scale" else ex
        return tirx.AttrStmt(s.node, s.attr_key, s.value, rebuild(s.body, inner, leaf), s.span)
    if isinstance(s, tirx.For) and not is_nest(s):
        before = leaf(s, ex) or []
        notes = dict(s.annotations) if s.annotations else {}
        made = tirx.For(s.loop_var, s.min, s.extent, s.kind, rebuild(s.body, ex, leaf), annotations=notes, span=s.span)
        return sequence([*before, made])
    if isinstance(s, tirx.While):
        return sequence([*(leaf(s, ex) or []), tirx.While(s.condition, rebuild(s.body, ex, leaf), s.span)])
    if isinstance(s, tirx.IfThenElse):
        before = leaf(s, ex) or []
        other = None if s.else_case is None else rebuild(s.else_case, ex, leaf)
        return sequence([*before, tirx.IfThenElse(s.condition, rebuild(s.then_case, ex, leaf), other, s.span)])
    made = leaf(s, ex)
    return s if made is None else sequence(made)


def _flat(s: Any) -> list[Any]:
    return list(s.seq) if isinstance(s, tirx.SeqStmt) else [s]
