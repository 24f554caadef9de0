"""Rebuilding a program's statements one by one, with the control flow around them as it was."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from tilescale.compiler.ir.nests import is_nest
from tilescale.compiler.ir.scales import SCALES, Executor
from tilescale.compiler.ir.statements import sequence, statements
from tilescale.compiler.tvm_compat import tirx

Leaf = Callable[[Any, Executor], "list[Any] | None"]
Header = Callable[[Any, Any, Executor], "tuple[list[Any], Any]"]


def _alone(e: Any, node: Any, ex: Executor) -> tuple[list[Any], Any]:
    return [], e


def around(loop: Any, body: Any, notes: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """A loop around another body, with these annotations besides its own."""
    own = dict(loop.annotations or {}) | dict(notes)
    return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, body, annotations=own, span=loop.span)


def rebuild(s: Any, ex: Executor, leaf: Leaf, header: Header = _alone) -> Any:
    """``leaf(statement, executor)`` for every nest, operation, binding, store: what it gives takes the
    statement's place; None leaves it alone. ``header(expression, statement, executor)`` for a loop's extent
    and an If's condition: statements in front, and what it becomes.
    """
    if isinstance(s, tirx.SeqStmt):
        return sequence([t for x in s.seq for t in statements(rebuild(x, ex, leaf, header))])
    if isinstance(s, tirx.AttrStmt):
        inner = ex.within(SCALES[int(s.value.value)]) if s.attr_key == "ts.scale" else ex
        return tirx.AttrStmt(s.node, s.attr_key, s.value, rebuild(s.body, inner, leaf, header), s.span)
    if isinstance(s, tirx.For) and not is_nest(s):
        before, extent = header(s.extent, s, ex)
        notes = dict(s.annotations) if s.annotations else {}
        body = rebuild(s.body, ex, leaf, header)
        return sequence(
            [*before, tirx.For(s.loop_var, s.min, extent, s.kind, body, annotations=notes, span=s.span)]
        )
    if isinstance(s, tirx.While):
        return tirx.While(s.condition, rebuild(s.body, ex, leaf, header), s.span)
    if isinstance(s, tirx.IfThenElse):
        before, test = header(s.condition, s, ex)
        other = None if s.else_case is None else rebuild(s.else_case, ex, leaf, header)
        return sequence(
            [*before, tirx.IfThenElse(test, rebuild(s.then_case, ex, leaf, header), other, s.span)]
        )
    made = leaf(s, ex)
    return s if made is None else sequence(made)
