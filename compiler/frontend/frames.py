"""``with`` statements that TVM's script has for Python's: ``T.While(c)``, and ``T.If(c)`` around ``T.Then()``
and ``T.Else()``. A kernel is rewritten so before its own control flow is (rewrite.py)."""

from __future__ import annotations

import ast
from collections.abc import Callable

from tilescale.errors import TileSyntaxError

Refuse = Callable[[ast.AST, str, str], TileSyntaxError]
_SIDES = "with T.Then(): and behind it, if at all, with T.Else():"


def word_of(s: ast.stmt) -> str:
    """``X`` of ``with T.X(…), …:``, else nothing."""
    return _word(s.items[0]) if isinstance(s, ast.With) else ""


def _word(item: ast.withitem) -> str:
    made = item.context_expr
    return made.func.attr if isinstance(made, ast.Call) and isinstance(made.func, ast.Attribute) else ""


def plain(s: ast.With, refuse: Refuse) -> ast.stmt:
    """What Python has for ``with T.While(c):`` or ``with T.If(c):``, any other statement as it is.

    Raises:
        TileSyntaxError: a word with more than its condition; no sides of an ``if``, or other statements among
            them.
    """
    at = next((k for k, item in enumerate(s.items) if _word(item) in ("While", "If")), None)
    if at is None:
        return s
    if at:
        inner = ast.copy_location(ast.With(s.items[at:], s.body), s)
        return ast.copy_location(ast.With(s.items[:at], [inner]), s)
    word = word_of(s)
    test = _condition(s, word, refuse)
    if word == "While":
        return ast.copy_location(ast.While(test, _inner(s), []), s)
    sides = _inner(s)
    for side, expected in zip(sides, ("Then", "Else"), strict=False):
        if word_of(side) != expected:
            raise refuse(side, f"T.If has no T.{expected} here", _SIDES)
    if len(sides) > 2:
        raise refuse(sides[2], "a statement of T.If behind its sides", _SIDES)
    bodies = [_side(side, refuse) for side in sides if isinstance(side, ast.With)]
    return ast.copy_location(ast.If(test, bodies[0], bodies[1] if len(bodies) > 1 else []), s)


def _condition(s: ast.With, word: str, refuse: Refuse) -> ast.expr:
    made = s.items[0].context_expr
    assert isinstance(made, ast.Call)
    if len(made.args) != 1 or made.keywords or s.items[0].optional_vars is not None:
        raise refuse(s, f"T.{word} with more than a condition", f"with T.{word}(condition):")
    return made.args[0]


def _side(s: ast.With, refuse: Refuse) -> list[ast.stmt]:
    made = s.items[0].context_expr
    assert isinstance(made, ast.Call)
    if made.args or made.keywords or s.items[0].optional_vars is not None:
        raise refuse(s, f"T.{word_of(s)} of something", _SIDES)
    return _inner(s)


def _inner(s: ast.With) -> list[ast.stmt]:
    """The body behind the first item: what stands beside it in one ``with`` is within it."""
    return [ast.copy_location(ast.With(s.items[1:], s.body), s)] if s.items[1:] else s.body
