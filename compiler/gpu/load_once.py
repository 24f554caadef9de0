"""Loads that an expression has several times, made once. A load that may lie outside is ``inside ? x[i] :
0``; C's compiler makes a branch of each, and loads again in each branch what a macro's argument, say, names
three times (``T.if_then_else(x < 0, ~bits(x), bits(x))``). Loads without a condition it merges by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.tvm_compat import (
    IF_THEN_ELSE,
    ir,
    same_expression,
    structural_map,
    structural_walk,
    tirx,
)


def load_once(body: Any) -> Any:
    """Thread IR in which a statement's expression has each guarded load once, if it makes it in any case."""

    def store(s: Any) -> Any:
        made, (value, *at) = _named([s.value, *s.indices])
        return sequence([*made, tirx.BufferStore(s.buffer, value, at, s.span)]) if made else s

    def bind(s: Any) -> Any:
        made, (value,) = _named([s.value])
        return sequence([*made, tirx.Bind(s.var, value, s.span)]) if made else s

    def branch(s: Any) -> Any:
        made, (test,) = _named([s.condition])
        return sequence([*made, tirx.IfThenElse(test, s.then_case, s.else_case, s.span)]) if made else s

    def evaluate(s: Any) -> Any:
        made, (value,) = _named([s.value]) if isinstance(s.value, ir.Call) else ([], (None,))
        return sequence([*made, tirx.Evaluate(value, s.span)]) if made else s

    guarded: list[Any] = []
    structural_walk(body, (ir.Call, lambda c: guarded.append(c) if _is_guarded(c) else None))
    if len(guarded) < 2:
        return body
    changes = [
        (tirx.BufferStore, store), (tirx.Bind, bind), (tirx.IfThenElse, branch), (tirx.Evaluate, evaluate),
    ]  # fmt: skip
    return structural_map(body, changes)


def _named(expressions: list[Any]) -> tuple[list[Any], list[Any]]:
    """Bindings of the loads that expressions have several times, and the expressions with the names."""
    made: list[Any] = []
    while True:
        found = [x for e in expressions for x in _loads(e, True)]
        again = next(
            (
                a
                for k, (a, always) in enumerate(found)
                if always and any(same_expression(a, b) for b, _ in [*found[:k], *found[k + 1 :]])
            ),
            None,
        )
        if again is None:
            return made, expressions
        name = tirx.Var(again.args[1].source.name + "_at", again.ty)
        inner, (value,) = _named([again])  # what says where it lies may be a load that is named twice
        made += [*inner, tirx.Bind(name, value)]

        def put(c: Any, again: Any = again, name: Any = name) -> Any:
            return name if _is_guarded(c) and same_expression(c, again) else c

        expressions = [structural_map(e, (ir.Call, put)) for e in expressions]


def _is_guarded(e: Any) -> bool:
    return (
        isinstance(e, ir.Call)
        and e.op.name == IF_THEN_ELSE
        and isinstance(e.args[1], ir.TensorLoad)
        and not e.args[1].source.ty.storage_scope.startswith("local")
    )


def _loads(e: Any, always: bool) -> Iterator[tuple[Any, bool]]:
    """The guarded loads of an expression, the outermost first, each with whether it is always made."""
    if isinstance(e, tirx.Select):
        first, others = [e.condition], [e.true_value, e.false_value]
    elif isinstance(e, ir.Call) and e.op.name == IF_THEN_ELSE:
        if _is_guarded(e):
            yield e, always
        first, others = [e.args[0]], list(e.args[1:])
    elif isinstance(e, (tirx.And, tirx.Or)):
        first, others = [e.a], [e.b]
    elif isinstance(e, ir.Call):
        first, others = list(e.args), []
    elif isinstance(e, ir.TensorLoad):
        first, others = list(e.indices), []
    elif isinstance(e, tirx.Cast):
        first, others = [e.value], []
    elif hasattr(e, "a"):
        first, others = [e.a, *([e.b] if hasattr(e, "b") else [])], []
    else:
        return
    for part in first:
        yield from _loads(part, always)
    for part in others:
        yield from _loads(part, False)
