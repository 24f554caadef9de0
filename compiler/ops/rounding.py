"""Floats as their bits: results rounded toward zero, up or down, ``T.nextafter``, ``T.ldexp``. No operations
of the IR, so that every target has the same bits.

A result of float32 that is rounded in a direction is computed in float64, where it is exact but for an error
whose sign is known (Knuth's sum of two; the remainder of a quotient or a root by one FMA). The nearest
float32 is then right, or the one beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tilescale.compiler.builder.held import named
from tilescale.compiler.builder.values import as_expr, const, convert, same_dtype, to_expr
from tilescale.compiler.ir import source
from tilescale.compiler.ops import math as own
from tilescale.compiler.tvm_compat import ir, is_expr, tirx
from tilescale.errors import TileTypeError, TileValueError
from tilescale.language.dtypes import canonical

DIRECTIONS = ("rz", "ru", "rd")
MODES = ("rn", *DIRECTIONS)
_FLOATS = ("float16", "bfloat16", "float32", "float64")


def check(mode: Any, word: str) -> None:
    """Whether there is such a rounding.

    Raises:
        TileValueError: there is not.
    """
    if mode not in MODES:
        raise TileValueError(
            f"T.{word} with rounding {mode!r}",
            loc=source.current(),
            expected='"rn" (to nearest, ties to even), "rz" (toward zero), "ru" (up) or "rd" (down)',
        )


def directed(word: str, mode: str, *given: Any) -> Any:
    """``word`` of float32 with its result rounded toward zero, up or down.

    Raises:
        TileTypeError: another dtype.
    """
    values = [as_expr(v, "float32", f"an argument of T.{word}") for v in given]
    for v in values:
        if str(v.ty) != "float32":
            raise TileTypeError(
                f"T.{word} of {v.ty} with rounding {mode!r}",
                loc=source.current(),
                expected='float32, which has all roundings; other dtypes have "rn"',
                hint=f'T.{word}(T.cast(…, "float32"), …, {mode!r})',
            )
    near, above, below, value, wide = _nearest(word, values)
    if mode == "ru":
        return tirx.if_then_else(above, _beside(near, "float32", up=True), near)
    if mode == "rd":
        made = named(tirx.if_then_else(below, _beside(near, "float32", up=False), near), "down")
        return _negative_zero(word, made, value, wide) if word in _SUMS else made
    down = tirx.And(near > const(0.0, "float32"), below)
    up = tirx.And(near < const(0.0, "float32"), above)
    shorter = tirx.if_then_else(up, _beside(near, "float32", up=True), near)
    return tirx.if_then_else(down, _beside(near, "float32", up=False), shorter)


def _nearest(word: str, values: list[Any]) -> tuple[Any, Any, Any, Any, list[Any]]:
    """The nearest float32, whether the exact result lies above or below it, and that in float64, with the
    arguments."""
    wide = [named(tirx.Cast("float64", v), "wide") for v in values]
    value, error = (named(e, "exact") for e in _EXACT[word](*wide))
    near = named(tirx.Cast("float32", value), "near")
    off = named(value - tirx.Cast("float64", near), "off")
    zero = const(0.0, "float64")
    even = tirx.EQ(off, zero)
    above = tirx.Or(off > zero, tirx.And(even, error > zero))
    below = tirx.Or(off < zero, tirx.And(even, error < zero))
    return near, above, below, value, wide


def fused(a: Any, b: Any, c: Any) -> Any:
    """a * b + c of one floating dtype, rounded once. One of 16 bits by way of float32, rounded to odd: behind
    that the second rounding is as good as the only one (Boldo and Melquiond, "Emulation of FMA and correctly
    rounded sums: proved algorithms using rounding to odd", 2008)."""
    dt = str(a.ty)
    if dt in ("float32", "float64"):
        return own.ieee_fmaf(a, b, c)
    values = [convert(v, "float32") for v in (a, b, c)]
    near, above, below, _, _ = _nearest("ieee_fmaf", values)
    bits = named(tirx.reinterpret("int32", near), "bits")
    even = tirx.EQ(bits & const(1, "int32"), const(0, "int32"))  # then the number beyond is the odd one
    made = tirx.if_then_else(tirx.And(even, below), _beside(near, "float32", up=False), near)
    made = tirx.if_then_else(tirx.And(even, above), _beside(near, "float32", up=True), made)
    return convert(made, dt)


def _sum(a: Any, b: Any) -> tuple[Any, Any]:
    """a + b, and what its rounding left out (Knuth, "The Art of Computer Programming" 2, 4.2.2)."""
    total = named(own.ieee_add(a, b), "total")
    part = named(own.ieee_sub(total, a), "part")
    rest = named(own.ieee_sub(a, own.ieee_sub(total, part)), "rest")
    return total, own.ieee_add(rest, own.ieee_sub(b, part))


def _quotient(a: Any, b: Any) -> tuple[Any, Any]:
    value = named(a / b, "quotient")
    rest = named(own.ieee_fmaf(-value, b, a), "rest")
    return value, tirx.if_then_else(b < const(0.0, "float64"), -rest, rest)


def _root(a: Any) -> tuple[Any, Any]:
    value = named(own.sqrt(a), "root")
    return value, own.ieee_fmaf(-value, value, a)


_EXACT: dict[str, Callable[..., tuple[Any, Any]]] = {
    "ieee_add": _sum,
    "ieee_sub": lambda a, b: _sum(a, -b),
    "ieee_mul": lambda a, b: (own.ieee_mul(a, b), const(0.0, "float64")),
    "ieee_fmaf": lambda a, b, c: _sum(named(own.ieee_mul(a, b), "product"), c),
    "ieee_fdiv": _quotient,
    "ieee_frcp": lambda a: _quotient(const(1.0, "float64"), a),
    "ieee_fsqrt": _root,
}
#: the two terms of a sum, of which a zero rounded down is -0 if either is negative (IEEE 754, 6.3)
_SUMS: dict[str, Callable[..., tuple[Any, Any]]] = {
    "ieee_add": lambda a, b: (a, b),
    "ieee_sub": lambda a, b: (a, -b),
    "ieee_fmaf": lambda a, b, c: (own.ieee_mul(a, b), c),
}


def _negative_zero(word: str, made: Any, value: Any, wide: list[Any]) -> Any:
    """A sum of exactly zero; one of float64 is zero only so."""
    a, b = (tirx.reinterpret("int64", e) for e in _SUMS[word](*wide))
    signed = tirx.And(tirx.EQ(value, const(0.0, "float64")), (a | b) < const(0, "int64"))
    return tirx.if_then_else(signed, const(-0.0, "float32"), made)


def _beside(x: Any, dt: str, up: bool) -> Any:
    """The next number above or below one that is no NaN, and not infinite in that direction."""
    own_bits = f"int{canonical(dt).bits}"
    bits = "int64" if dt == "float64" else "int32"
    whole = named(convert(tirx.reinterpret(own_bits, x), bits), "bits")
    one, zero = const(1, bits), const(0, bits)
    least = const(1 if up else 1 - (1 << (canonical(dt).bits - 1)), bits)  # from either zero
    grows = (whole >= zero) if up else (whole < zero)
    moved = tirx.if_then_else(grows, whole + one, whole - one)
    nothing = tirx.EQ(x, const(0.0, dt))
    return tirx.reinterpret(dt, convert(tirx.if_then_else(nothing, least, moved), own_bits))


def nextafter(a: Any, b: Any) -> Any:
    """The next number of the dtype from ``a`` toward ``b``; ``b`` where they are equal, NaN where one is."""
    if not any(is_expr(to_expr(v)) for v in (a, b)):
        return math.nextafter(a, b)
    x, y, dt = same_dtype(a, b, "an argument of T.nextafter")
    if dt not in _FLOATS:
        raise TileTypeError(
            f"T.nextafter of {dt}", loc=source.current(), expected="one of " + ", ".join(_FLOATS)
        )
    x, y = named(x, "x"), named(y, "y")
    moved = tirx.if_then_else(x < y, _beside(x, dt, up=True), _beside(x, dt, up=False))
    nan = tirx.Or(own.isnan(x), own.isnan(y))
    return tirx.if_then_else(nan, convert(math.nan, dt), tirx.if_then_else(tirx.EQ(x, y), y, moved))


def ldexp(x: Any, n: Any) -> Any:
    """x times two to the power n, rounded once.

    Raises:
        TileTypeError: an exponent that is no integer.
    """
    e, k = to_expr(x, "x of T.ldexp"), to_expr(n, "n of T.ldexp")
    if isinstance(k, (bool, float)) or is_expr(k) and "int" not in str(k.ty):
        raise TileTypeError(f"n of T.ldexp is {n}", loc=source.current(), expected="an integer")
    if not is_expr(e) and not is_expr(k):
        return math.ldexp(e, k)
    e = as_expr(e, "float32")
    dt = str(e.ty) if "float" in str(e.ty) else "float32"
    made, left = (
        tirx.Cast("float64", e) if dt != "float64" else e,
        named(own.clamp(as_expr(k), -2200, 2200), "n"),
    )
    # a factor of 2^-1022 would round twice where the result is subnormal: the last one is the only to round
    for _ in range(2):
        high, low = left > const(1023, str(left.ty)), left < const(-1022, str(left.ty))
        step = tirx.if_then_else(high, const(1023, str(left.ty)), const(0, str(left.ty)))
        step = named(tirx.if_then_else(low, const(-969, str(left.ty)), step), "step")
        made, left = named(made * _power(step), "scaled"), named(left - step, "left")
    made = made * _power(own.clamp(left, -1022, 1023))
    return made if dt == "float64" else tirx.Cast(ir.PrimType(dt), made)


def _power(n: Any) -> Any:
    """Two to the power of an int from -1022 to 1023, in float64."""
    biased = convert(n, "int64") + const(1023, "int64")
    return tirx.reinterpret("float64", biased << const(52, "int64"))
