"""Loops over Python's own range that may be loops of the device, which they are in TileLang.

Such a loop is traced once instead of once a round, so it must mean the same: nothing of Python's may change
from round to round, and nobody of Python's may look at the round's number. That is certain of a body that is
nothing but T's operations and stores of elements, whose operands are tiles, tensors and integers that small
numbers are added to or multiplied with: no other calls, no names that are assigned to, no elements of lists.
Floats are there only where the round's number does nothing but index and compare: a device's float32 is not
Python's float. All other loops are laid out.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from typing import Any

#: rounds up to which all loops are laid out
LAID_OUT = 64
#: whole numbers in a body are this large at most, so that none that is made of them leaves 32 bits
SMALL = 1 << 16

_OPERATORS = (
    ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.BitAnd, ast.BitOr, ast.BitXor, ast.USub, ast.Not,
    ast.And, ast.Or, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Load,
)  # fmt: skip
_PLAIN = (
    ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Slice, ast.Tuple, ast.keyword, *_OPERATORS
)  # fmt: skip


class _Body:
    """What a body names: modules' and tensors' names in front of a dot, and all others. ``real``: it has
    floats; ``counts``: numbers of rounds are operands outside of indices and comparisons."""

    def __init__(self, target: str) -> None:
        self.names: set[str] = set()
        self.bound = {target}
        self.real = self.counts = False
        self.whole = 0  # how many indices and comparisons are around

    def statements(self, body: list[ast.stmt]) -> bool:
        return all(map(self.statement, body))

    def statement(self, s: ast.stmt) -> bool:
        if isinstance(s, ast.Pass):
            return True
        if isinstance(s, ast.Expr):
            return isinstance(s.value, ast.Call) and self.expression(s.value)
        if isinstance(s, (ast.Assign, ast.AugAssign)):
            targets = s.targets if isinstance(s, ast.Assign) else [s.target]
            fits = all(isinstance(t, ast.Subscript) for t in targets) and len(targets) == 1
            return fits and self.expression(targets[0]) and self.expression(s.value)
        if isinstance(s, ast.If):
            return self.expression(s.test) and self.statements(s.body) and self.statements(s.orelse)
        if isinstance(s, ast.With):
            fits = all(isinstance(i.context_expr, ast.Call) and i.optional_vars is None for i in s.items)
            return fits and all(self.expression(i.context_expr) for i in s.items) and self.statements(s.body)
        if isinstance(s, ast.For) and isinstance(s.target, ast.Name) and not s.orelse:
            self.bound.add(s.target.id)
            over = s.iter
            if isinstance(over, ast.Call) and isinstance(over.func, ast.Name) and over.func.id == "range":
                return not over.keywords and all(map(self.expression, over.args)) and self.statements(s.body)
            return isinstance(over, ast.Call) and self.expression(over) and self.statements(s.body)
        return False

    def expression(self, e: ast.AST) -> bool:
        if isinstance(e, ast.Name):
            self.names.add(e.id)
            self.counts |= e.id in self.bound and not self.whole
            return isinstance(e.ctx, ast.Load)
        if isinstance(e, (ast.Div, ast.Pow)) or isinstance(e, ast.Constant) and isinstance(e.value, float):
            self.real = True
            return not self.whole
        if isinstance(e, ast.Constant):
            small = isinstance(e.value, int) and abs(e.value) <= SMALL
            return small or e.value is None or isinstance(e.value, str)
        if isinstance(e, ast.Call):
            return isinstance(e.func, ast.Attribute) and all(map(self.expression, ast.iter_child_nodes(e)))
        if isinstance(e, ast.Attribute):
            return isinstance(e.value, ast.Name) and self.expression(e.value)
        if isinstance(e, ast.Subscript):
            named = isinstance(e.value, (ast.Name, ast.Attribute))
            return named and self.expression(e.value) and self.integers(e.slice)
        if isinstance(e, ast.Compare):
            return self.integers(e.left, *e.comparators) and all(map(self.expression, e.ops))
        return isinstance(e, _PLAIN) and all(map(self.expression, ast.iter_child_nodes(e)))

    def integers(self, *parts: ast.AST) -> bool:
        """Of an index, and of what is compared, which have no floats."""
        self.whole += 1
        fits = all(map(self.expression, parts))
        self.whole -= 1
        return fits


def operands(loop: ast.For) -> tuple[tuple[str, ...], bool] | None:
    """The names that a loop's body reads, where it is nothing but T's operations, and whether floats may be
    among their values; None of any other."""
    if not isinstance(loop.target, ast.Name):
        return None
    body = _Body(loop.target.id)
    if not body.statements(loop.body) or body.real and body.counts:
        return None
    return tuple(sorted(body.names - body.bound)), not body.counts


def is_loop(rounds: range, read: Iterable[Any], real: bool, ours: Callable[[Any], bool]) -> bool:
    """Whether ``rounds`` of a body, which reads those values, are a loop of the device. ``real``: whether
    they may be floats; ``ours``: whether a value is a device's, a tile or T itself."""
    if len(rounds) <= LAID_OUT or rounds.step < 1:
        return False
    kinds = (int, str, float) if real else (int, str)
    return all(v is None or isinstance(v, kinds) or ours(v) for v in read)
