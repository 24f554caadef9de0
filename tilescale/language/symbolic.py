"""Symbolic extents that exist before TVM is loaded: ``T.dynamic("m")``, and arithmetic on them.

A kernel factory may compute with them (``T.ceildiv(M, 128)``) at no cost; the front end turns them into IR
when a kernel is traced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilescale.errors import TileTypeError, TileValueError


class SymExpr:
    """An integer expression over symbolic extents; immutable, hashable, structurally comparable by
    :meth:`same`."""

    __slots__ = ("args", "op")

    def __init__(self, op: str, *args: Any):
        self.op, self.args = op, args

    # -- arithmetic: stays symbolic among ints and symbols, becomes IR as soon as the other side is IR
    # ------------------
    def _bin(self, op: str, other: Any, swap: bool = False) -> Any:
        me = _settle(self)
        other = _settle(other)
        if isinstance(other, (int, SymExpr)):
            a, b = (other, me) if swap else (me, other)
            if isinstance(a, int) and isinstance(b, int):
                return FOLD[op](a, b)
            return SymExpr(op, a, b)
        if isinstance(other, float):
            raise TileTypeError(f"a symbolic extent {op} a float", expected="an integer")
        from tilescale.compiler.builder.values import binary

        return binary(op, other, me) if swap else binary(op, me, other)

    def __add__(self, o: Any) -> Any:
        return self._bin("+", o)

    def __radd__(self, o: Any) -> Any:
        return self._bin("+", o, True)

    def __sub__(self, o: Any) -> Any:
        return self._bin("-", o)

    def __rsub__(self, o: Any) -> Any:
        return self._bin("-", o, True)

    def __mul__(self, o: Any) -> Any:
        return self._bin("*", o)

    def __rmul__(self, o: Any) -> Any:
        return self._bin("*", o, True)

    def __floordiv__(self, o: Any) -> Any:
        return self._bin("//", o)

    def __rfloordiv__(self, o: Any) -> Any:
        return self._bin("//", o, True)

    def __mod__(self, o: Any) -> Any:
        return self._bin("%", o)

    def __rmod__(self, o: Any) -> Any:
        return self._bin("%", o, True)

    def __neg__(self) -> Any:
        return self._bin("-", 0, True)

    def _cmp(self, op: str, other: Any) -> Any:
        me = _settle(self)
        if isinstance(me, int) and isinstance(other, int):
            return COMPARE[op](me, other)
        from tilescale.compiler.builder.values import compare

        return compare(op, me, other)

    def __lt__(self, o: Any) -> Any:
        return self._cmp("<", o)

    def __le__(self, o: Any) -> Any:
        return self._cmp("<=", o)

    def __gt__(self, o: Any) -> Any:
        return self._cmp(">", o)

    def __ge__(self, o: Any) -> Any:
        return self._cmp(">=", o)

    def __eq__(self, o: object) -> Any:
        return self._cmp("==", o)

    def __ne__(self, o: object) -> Any:
        return self._cmp("!=", o)

    def __hash__(self) -> int:
        return hash((self.op, *map(str, self.args)))

    def __bool__(self) -> bool:
        settled = _settle(self)
        if isinstance(settled, int):
            return bool(settled)
        raise TileValueError(
            f"the value of {self} is not known when the kernel is traced", hint="compare it inside the kernel"
        )

    def __int__(self) -> int:
        settled = _settle(self)
        if isinstance(settled, int):
            return settled
        raise TileValueError(f"the value of {self} is not known when the kernel is traced")

    __index__ = __int__

    def __str__(self) -> str:
        if self.op == "sym":
            return str(self.args[0])
        return f"({self.args[0]} {self.op} {self.args[1]})"

    __repr__ = __str__

    def same(self, other: Any) -> bool:
        """Structural identity (``==`` is a device comparison)."""
        return isinstance(other, SymExpr) and str(self) == str(other)


class Sym(SymExpr):
    """A symbolic extent or stride by its name; two of one name are the same extent. ``dtype`` is int32 or
    int64. ``multiple_of``: what every call's value is promised to be a multiple of."""

    __slots__ = ("dtype", "multiple_of")

    def __init__(self, name: str, dtype: str = "int32", multiple_of: int = 1):
        super().__init__("sym", name)
        self.dtype, self.multiple_of = dtype, multiple_of

    @property
    def name(self) -> str:
        return self.args[0]


class Const(Sym):
    """``T.const("M")``: an extent that is read off the arguments and baked into the kernel; an int once
    ``value`` is known."""

    __slots__ = ("value",)

    def __init__(self, name: str):
        super().__init__(name)
        self.value: int | None = None


def shown(extent: Any) -> str:
    """An extent as people read it, without parentheses around the whole."""
    text = str(extent)
    return text[1:-1] if text.startswith("(") else text


def symbols_of(value: Any) -> list[Sym]:
    """The symbols in a symbolic expression, in order of appearance."""
    if isinstance(value, Sym):
        return [value]
    return [s for a in value.args for s in symbols_of(a)] if isinstance(value, SymExpr) else []


def linear(value: Any) -> tuple[Sym, int, int] | None:
    """``n``, 2 and 1 of ``n * 2 + 1``; None of what is no such expression of one symbol."""
    value = _settle(value)
    if isinstance(value, Sym):
        return value, 1, 0
    if not isinstance(value, SymExpr) or value.op not in ("+", "-", "*"):
        return None
    a, b = value.args
    number, other = (a, b) if isinstance(a, int) else (b, a)
    found = linear(other)
    if not isinstance(number, int) or found is None:
        return None
    symbol, factor, offset = found
    if value.op == "*":
        return symbol, factor * number, offset * number
    if value.op == "+":
        return symbol, factor, offset + number
    return (symbol, -factor, number - offset) if number is a else (symbol, factor, offset - number)


def replaced(value: Any, known: dict[str, Any]) -> Any:
    """An expression with other expressions in the place of some symbols."""
    value = _settle(value)
    if isinstance(value, Sym):
        return known.get(value.name, value)
    if not isinstance(value, SymExpr):
        return value
    a, b = (replaced(x, known) for x in value.args)
    return (
        SymExpr(value.op, a, b) if isinstance(a, SymExpr) or isinstance(b, SymExpr) else FOLD[value.op](a, b)
    )


def _settle(value: Any) -> Any:
    """``value`` with every known constant put in; an int where nothing symbolic remains."""
    if isinstance(value, Const):
        return value if value.value is None else value.value
    if isinstance(value, SymExpr) and value.op != "sym":
        a, b = map(_settle, value.args)
        if isinstance(a, int) and isinstance(b, int):
            return FOLD[value.op](a, b)
        if a is not value.args[0] or b is not value.args[1]:
            return SymExpr(value.op, a, b)
    return value


settle = _settle

FOLD: dict[str, Callable[[Any, Any], Any]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "min": min,
    "max": max,
}
COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
}


def _names(names: str) -> list[str]:
    return [n for n in names.replace(",", " ").split() if n]


def dynamic(name: str, dtype: str = "int32", *, multiple_of: int = 1) -> Any:
    """One or several symbolic extents: ``M = T.dynamic("m")``, ``M, N = T.dynamic("m, n")``. Read off the
    arguments at each call.

    Args:
        multiple_of: a promise about their values, which each call checks: with rows of a multiple of 16 bytes
            (``multiple_of=8`` of 16-bit elements) a GPU copies tiles by TMA and cp.async, and adds and moves
            neighbours in vectors.

    Raises:
        TileValueError: ``multiple_of`` is no positive int.
    """
    if not isinstance(multiple_of, int) or isinstance(multiple_of, bool) or multiple_of < 1:
        raise TileValueError(f"T.dynamic with multiple_of={multiple_of!r}", expected="a positive int")
    found = tuple(Sym(n, dtype, multiple_of) for n in _names(name))
    return found[0] if len(found) == 1 else found


def const(name: str) -> Any:
    """Extents of an eager kernel that are read off the arguments of a call and baked in: ``M, N, K =
    T.const("M, N, K")``."""
    found = tuple(Const(n) for n in _names(name))
    return found[0] if len(found) == 1 else found


class _Dyn:
    """``T.dyn["m"]``: the same as ``T.dynamic("m")``."""

    def __getitem__(self, name: str) -> Any:
        return dynamic(name)


dyn = _Dyn()


def align_up(a: Any, b: Any) -> Any:
    """The least multiple of ``b`` that is ``a`` or more, of ints, symbolic extents or device values.

    Raises:
        TileValueError: multiples of zero.
    """
    return ceildiv(a, b) * b


def index_to_coordinates(index: Any, shape: Any) -> list[Any]:
    """The indices along each axis of ``shape`` of its ``index``-th element in row-major order."""
    found: list[Any] = []
    for extent in reversed(tuple(shape)):
        found.insert(0, index % extent)
        index = index // extent
    return found


def ceildiv(a: Any, b: Any) -> Any:
    """The quotient rounded up, of ints, symbolic extents or device values.

    Raises:
        TileValueError: a divisor of zero.
    """
    a, b = _settle(a), _settle(b)
    if isinstance(b, int) and b == 0:
        raise TileValueError(f"T.ceildiv({a}, 0)", expected="a divisor other than zero")
    if isinstance(a, int) and isinstance(b, int):
        return -(-a // b)
    return (a + b - 1) // b if not (isinstance(b, int) and b == 1) else a
