"""Operators by the names of TVM's expressions: ``T.And(a, b)`` is ``a and b``."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.builder.constructs import is_device
from tilescale.compiler.builder.values import binary, compare, dtype_of, truth
from tilescale.compiler.ops.choices import chain
from tilescale.compiler.ops.math import fmod, max, min, truncdiv, truncmod
from tilescale.compiler.tvm_compat import tirx


def And(a: Any, b: Any) -> Any:
    """Whether both hold; ``b`` is not evaluated where ``a`` does not."""
    return chain((lambda: a, lambda: b), tirx.And, stop_on=False)


def Or(a: Any, b: Any) -> Any:
    """Whether one holds; ``b`` is not evaluated where ``a`` does."""
    return chain((lambda: a, lambda: b), tirx.Or, stop_on=True)


def Not(a: Any) -> Any:
    """Whether it does not hold."""
    return tirx.Not(truth(a)) if is_device(a) else not a


def Add(a: Any, b: Any) -> Any:
    """a + b."""
    return binary("+", a, b)


def Sub(a: Any, b: Any) -> Any:
    """a - b."""
    return binary("-", a, b)


def Mul(a: Any, b: Any) -> Any:
    """a * b."""
    return binary("*", a, b)


def Div(a: Any, b: Any) -> Any:
    """a / b, of integers rounded toward zero, as in C."""
    return binary("/", a, b) if _floats(a, b) else truncdiv(a, b)


def Mod(a: Any, b: Any) -> Any:
    """What :func:`Div` leaves, with the sign of a."""
    return fmod(a, b) if _floats(a, b) else truncmod(a, b)


def FloorDiv(a: Any, b: Any) -> Any:
    """a // b."""
    return binary("//", a, b)


def FloorMod(a: Any, b: Any) -> Any:
    """a % b."""
    return binary("%", a, b)


def Min(a: Any, b: Any) -> Any:
    """The least, as T.min."""
    return min(a, b)


def Max(a: Any, b: Any) -> Any:
    """The greatest, as T.max."""
    return max(a, b)


def EQ(a: Any, b: Any) -> Any:
    """a == b."""
    return compare("==", a, b)


def NE(a: Any, b: Any) -> Any:
    """a != b."""
    return compare("!=", a, b)


def LT(a: Any, b: Any) -> Any:
    """a < b."""
    return compare("<", a, b)


def LE(a: Any, b: Any) -> Any:
    """a <= b."""
    return compare("<=", a, b)


def GT(a: Any, b: Any) -> Any:
    """a > b."""
    return compare(">", a, b)


def GE(a: Any, b: Any) -> Any:
    """a >= b."""
    return compare(">=", a, b)


def _floats(a: Any, b: Any) -> bool:
    return any("float" in dtype_of(x) for x in (a, b))
