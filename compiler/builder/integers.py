"""Numbers of a dtype, integers above all: which it holds, and what becomes of others."""

from __future__ import annotations

import operator
from typing import Any

from tilescale.compiler.ir import source
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.tvm_compat import hidden, ir, is_expr, sym, tirx
from tilescale.errors import TileValueError
from tilescale.language.dtypes import GREATEST

_INTEGERS = ("int", "uint")
_FOLDED = {"+": operator.add, "-": operator.sub, "*": operator.mul, "<<": operator.lshift}


def range_of(dt: str) -> tuple[int, int]:
    """The least and the greatest number of an integer dtype."""
    bits = int(dt.lstrip("uint"))
    return (0, (1 << bits) - 1) if dt.startswith("u") else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)


def fits(value: int, dt: str) -> bool:
    """Whether a number may be written for a dtype: −1 of an unsigned one is all ones, as it is for a device
    value."""
    least, most = range_of(dt)
    return (least or -(most + 1) // 2) <= value <= most


def in_int32(value: Any) -> Any:
    """``value``.

    Raises:
        TileValueError: a number that int32 does not hold.
    """
    if isinstance(value, int) and not fits(value, "int32"):
        least, most = range_of("int32")
        raise TileValueError(
            f"{value} is no value of int32",
            loc=source.current(),
            expected=f"{least} to {most}",
            hint=f"T.int64({value})",
        )
    return value


def require_64_bits(*values: Any) -> None:
    """
    Raises:
        TileValueError: an integer of Python's that no dtype holds.
    """
    for value in values:
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
            raise TileValueError(
                f"{value} is a number that 64 bits do not hold",
                loc=source.current(),
                expected=f"{-(1 << 63)} to {(1 << 64) - 1}",
                hint=f"float({value}) beside floats",
            )


def too_large(value: Any, dt: str) -> TileValueError:
    """What is wrong with a float that its dtype does not hold."""
    return TileValueError(
        f"{value} is no value of {dt}",
        loc=source.current(),
        expected=f"at most {GREATEST[dt]:.6g} in magnitude",
        hint=f'T.max_value("{dt}"), or T.infinity("{dt}") where the dtype has one',
    )


def index_constant(value: int) -> Any:
    """An index as a constant of 32 bits, or of 64 where it takes them.

    Raises:
        TileValueError: it takes more.
    """
    if not fits(value, "int64"):
        raise TileValueError(
            f"an index of {value}", loc=source.current(), expected="a number that int64 holds"
        )
    return tirx.const(value, "int32" if fits(value, "int32") else "int64")


def wrapped(value: int, dt: str) -> Any:
    """The constant of an integer dtype whose bits are the lower ones of ``value``."""
    least, most = range_of(dt)
    return tirx.const((value - least) % (most + 1 - least) + least, dt)


def folded(op: str, a: Any, b: Any) -> Any:
    """Constants without a sign wrap, and those that are shifted; TVM folds them too, and fails where the
    dtype does not hold the result. None for anything else."""
    dtypes = {str(x.ty) for x in (a, b) if is_expr(x)}
    if len(dtypes) != 1 or op not in _FOLDED or not min(dtypes).startswith(_INTEGERS):
        return None
    dt, (x, y) = min(dtypes), (constant(v) for v in (a, b))
    if not isinstance(x, int) or not isinstance(y, int):
        return None
    if 0 <= y < range_of(dt)[1].bit_length() + (dt[0] == "i") if op == "<<" else dt[0] == "u":
        return wrapped(_FOLDED[op](x, y), dt)
    return None


def converted(e: Any, dt: str) -> Any:
    """An expression of another dtype."""
    if isinstance(e, tirx.IntImm) and dt.startswith(_INTEGERS):  # TVM refuses one that wraps
        return wrapped(int(e.value), dt)
    made = tirx.Cast(ir.PrimType(dt), e)
    return hidden(made) if _wraps(e, dt) else made


def _wraps(e: Any, dt: str) -> bool:
    """Whether an integer becomes one of ``dt`` that need not hold it. TVM's analyses take the bounds of a
    Cast for those of its value, cut to the dtype's: ``T.cast(u, "int32") % 97`` of a uint32 would be C's
    remainder."""
    src = str(e.ty)
    if not (src.startswith(_INTEGERS) and dt.startswith(_INTEGERS)):
        return False
    (low, high), (least, most) = range_of(src), range_of(dt)
    if least <= low and high <= most:
        return False
    known, endless = sym.Analyzer().const_int_bound(e), (1 << 63) - 1
    if abs(int(known.min_value)) < endless:
        low = int(known.min_value)
    if int(known.max_value) < endless:
        high = int(known.max_value)
    return not (least <= low and high <= most)


_SMALL_INTS = {"int8", "uint8", "int16", "uint16"}


def promoted(op: str, a: Any, b: Any) -> tuple[Any, Any]:
    """The operands of a left shift of 8 or 16 bits, which is one of 32, as in C: so TileLang's programs move
    fields of a byte or two to where they belong in a word."""
    small = [is_expr(x) and str(x.ty) in _SMALL_INTS for x in (a, b)]
    if op != "<<" or not any(small) or not all(s or isinstance(x, int) for s, x in zip(small, (a, b))):
        return a, b
    to = "uint32" if small[0] and str(a.ty).startswith("u") else "int32"
    return tuple(tirx.Cast(to, x) if s else x for s, x in zip(small, (a, b)))
