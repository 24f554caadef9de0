"""What arithmetic means: conversions, rounding and the scalar functions, over NumPy arrays and over scalars
alike.

A scalar is a Python int or bool, or a NumPy float; a vector over the lanes of a T.Parallel nest is an array.
Values of the small floats (16 and 8 bits) are float32 that their dtype can hold; integers wrap at their
width.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from tilescale.errors import InternalError

FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_SMALL = {"float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"}


@functools.cache
def storage(dtype: str) -> Any:
    """The NumPy dtype that holds elements of ``dtype``."""
    return np.dtype(getattr(ml_dtypes, dtype) if dtype in _SMALL - {"float16"} else dtype)


@functools.cache
def compute(dtype: str) -> Any:
    """The NumPy dtype that expressions over ``dtype`` are computed in."""
    return np.dtype("float32") if dtype in _SMALL else np.dtype(dtype)


@functools.cache
def limits(dtype: str) -> tuple[int, int]:
    """The least and the greatest value of an integer dtype."""
    info = np.iinfo(dtype)
    return int(info.min), int(info.max)


def scalar(value: Any, dtype: str) -> Any:
    """A number as a scalar of ``dtype``: int and bool as Python's, floats as NumPy's, rounded to what the
    dtype can hold."""
    if dtype == "bool":
        return bool(value)
    if dtype in FLOATS:
        return decode(encode(np.float64(value), dtype), dtype)
    return wrap(int(value), dtype)


def wrap(value: int, dtype: str) -> int:
    """An integer modulo the width of its dtype."""
    low, high = limits(dtype)
    return value if low <= value <= high else (value - low) % (high - low + 1) + low


def _added(a: Any, b: Any, r: Any) -> Any:
    """Where a sum of signed integers (wrapped: ``r``) left their range; None where nowhere."""
    bad = ((a ^ r) & (b ^ r)) < 0
    return bad if bad.any() else None


def _subtracted(a: Any, b: Any, r: Any) -> Any:
    bad = ((a ^ b) & (a ^ r)) < 0
    return bad if bad.any() else None


def _multiplied(a: Any, b: Any, r: Any) -> Any:
    most = np.abs(a, dtype=np.float64).max() * np.abs(b, dtype=np.float64).max() if r.size else 0.0
    if most < float(np.iinfo(r.dtype).max):
        return None
    bad = np.asarray(a, object) * np.asarray(b, object) != r  # rarely: exact, and slow
    return bad.astype(bool)


#: for the signed operations that must not leave their dtype's range: where they did, given the operands and
#: the wrapped result
EXACT: dict[str, Callable[[Any, Any, Any], Any]] = {"Add": _added, "Sub": _subtracted, "Mul": _multiplied}


def decode(stored: Any, dtype: str) -> Any:
    """An element or an array as it lies in memory → a value to compute with, exact."""
    if isinstance(stored, np.ndarray) and stored.ndim:
        return stored.astype(np.float32) if dtype in _SMALL else stored
    if dtype in FLOATS:
        return compute(dtype).type(stored)
    return bool(stored) if dtype == "bool" else int(stored)


def encode(value: Any, dtype: str) -> Any:
    """A value → as it lies in memory, rounded to nearest, ties to even."""
    array = np.asarray(value)
    if dtype in _SMALL - {"float16"} and array.dtype == np.float64:
        array = _round_to_odd(array)
    return array.astype(storage(dtype))


def _round_to_odd(wide: Any) -> Any:
    """float64 → float32, truncated with a sticky last bit, so that rounding once more to a narrower format
    rounds the float64 itself (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", IEEE Trans.
    Computers 57(4), 2008)."""
    near = np.atleast_1d(wide.astype(np.float32))
    back, bits = near.astype(np.float64), near.view(np.uint32)
    exact = (back == wide) | np.isnan(near)
    odd = np.where(np.abs(back) > np.abs(wide), bits - np.uint32(1), bits) | np.uint32(1)
    return np.where(exact, bits, odd.astype(np.uint32)).astype(np.uint32).view(np.float32).reshape(wide.shape)


def cast(value: Any, src: str, dst: str) -> Any:
    """A value of ``src`` as one of ``dst``. Float to integer truncates, saturates, and takes NaN to zero."""
    if src == dst:
        return value
    array = np.asarray(value, dtype=compute(src))
    if dst == "bool":
        made = array != 0
    elif dst in FLOATS:
        if dst in _SMALL and src not in FLOATS:
            array = array.astype(np.float32)
        made = encode(array, dst)
    elif src in FLOATS:
        made = _float_to_int(array, dst)
    else:
        made = array.astype(dst)
    return decode(made, dst)


def _float_to_int(array: Any, dst: str) -> Any:
    low, high = limits(dst)
    whole = np.trunc(array)
    inside = (whole >= low) & (whole < float(high) + 1.0)
    made = np.where(inside, whole, 0).astype(dst)
    made = np.where(whole >= float(high) + 1.0, np.array(high, dst), made)
    return np.where(whole < low, np.array(low, dst), made)


def reinterpret(value: Any, src: str, dst: str) -> Any:
    """The bits of a value as another dtype of the same width."""
    stored = encode(np.asarray(value, dtype=compute(src)), src)
    return decode(np.atleast_1d(stored).view(storage(dst)).reshape(stored.shape), dst)


def is_vector(value: Any) -> bool:
    return isinstance(value, np.ndarray)


def maximum(a: Any, b: Any) -> Any:
    """``a if a >= b or isnan(a) else b``."""
    if not is_vector(a) and not is_vector(b):
        return a if a >= b or a != a else b
    return np.where((a >= b) | (np.asarray(a) != a), a, b)


def minimum(a: Any, b: Any) -> Any:
    """``a if a <= b or isnan(a) else b``."""
    if not is_vector(a) and not is_vector(b):
        return a if a <= b or a != a else b
    return np.where((a <= b) | (np.asarray(a) != a), a, b)


def truncated_division(a: Any, b: Any) -> Any:
    """The quotient of integers, toward zero."""
    if not is_vector(a) and not is_vector(b):
        return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    q = np.floor_divide(a, b)
    return q + ((q < 0) & (q * b != a)).astype(q.dtype)


def truncated_remainder(a: Any, b: Any) -> Any:
    """The remainder of integers with the sign of ``a``."""
    return a - truncated_division(a, b) * b


def _sigmoid(x: Any) -> Any:
    """``e^x / (1 + e^x)`` where x is negative: ``1 / (1 + e^-x)`` overflows there and gives 0 where a
    denormal number is right."""
    e = np.exp(-np.abs(x))
    return np.where(x < 0, e, 1.0) / (1.0 + e)


# Computed in float64 and rounded once: what a function of float32 is, to the last bit in all but a few cases.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "exp": np.exp,
    "exp2": np.exp2,
    "exp10": lambda x: np.power(10.0, x),
    "log": np.log,
    "log2": np.log2,
    "log10": np.log10,
    "log1p": np.log1p,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "tanh": np.tanh,
    "sinh": np.sinh,
    "cosh": np.cosh,
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "asinh": np.arcsinh,
    "acosh": np.arccosh,
    "atanh": np.arctanh,
    "rcp": lambda x: 1.0 / x,
    "sigmoid": _sigmoid,
    "erf": lambda x: np.vectorize(math.erf, otypes=[np.float64])(x),
    "floor": np.floor,
    "ceil": np.ceil,
    "trunc": np.trunc,
    "round": np.rint,
    "nearbyint": np.rint,
    "pow": np.power,
    "fmod": np.fmod,
    "atan2": np.arctan2,
    "copysign": np.copysign,
    "hypot": np.hypot,
    "fmax": np.fmax,
    "fmin": np.fmin,
    "ieee_add": np.add,
    "ieee_sub": np.subtract,
    "ieee_mul": np.multiply,
}
_CLASSES: dict[str, Callable[[Any], Any]] = {"isnan": np.isnan, "isinf": np.isinf, "isfinite": np.isfinite}


def function(name: str, values: list[Any], dtype: str) -> Any:
    """``ts.math.<name>`` of values of ``dtype``."""
    name = name.removeprefix("__")
    if name in _CLASSES:
        made = _CLASSES[name](values[0])
        return made if is_vector(made) else bool(made)
    if name == "dp4a":
        wide = [np.asarray(v, dtype=np.int64) for v in values]
        total = wide[8] + sum(a * b for a, b in zip(wide[:4], wide[4:8], strict=True))
        return total.astype(np.int32)[()]  # it wraps
    if name == "fma" and dtype == "float64":
        return np.vectorize(_fma, otypes=[np.float64])(*values)[()]
    wide = [np.asarray(v, dtype=np.float64) for v in values]
    # a product of two float32 is exact in float64: the sum rounds there first, to odd, so that the last
    # rounding is the only one
    made = _fma_narrow(*wide) if name == "fma" else _FUNCTIONS[name](*wide)
    # functions of the small floats are those of float32, rounded to the small one only where they are stored
    # or cast
    return np.asarray(made).astype(compute(dtype))[()]


def _fma(a: float, b: float, c: float) -> float:
    from fractions import Fraction

    if not (math.isfinite(a) and math.isfinite(b) and math.isfinite(c)):
        return a * b + c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    return float(exact) if exact else a * b + c  # the sign of a zero is that of the rounded sum


def _fma_narrow(a: Any, b: Any, c: Any) -> Any:
    product = a * b
    total = product + c
    shifted = total - product  # Knuth's two-sum: total + error is the exact sum
    error = (product - (total - shifted)) + (c - shifted)
    bits = np.atleast_1d(np.asarray(total)).view(np.int64)
    even = (bits & 1) == 0
    inexact = (error != 0) & np.isfinite(total) & even.reshape(np.shape(total))
    toward = np.where(error > 0, np.inf, -np.inf)
    return np.where(inexact, np.nextafter(total, toward), total)


_INTRINSICS: dict[str, Callable[..., Any]] = {
    "fabs": np.abs,
    "abs": np.abs,
    "floor": np.floor,
    "ceil": np.ceil,
    "trunc": np.trunc,
    "round": np.rint,
    "nearbyint": np.rint,
    "bitwise_and": lambda a, b: a & b,
    "bitwise_or": lambda a, b: a | b,
    "bitwise_xor": lambda a, b: a ^ b,
    "bitwise_not": lambda a: ~a,
}


def intrinsic(name: str, values: list[Any], dtype: str, source: str) -> Any:
    """An operation that TVM's own front end makes (``tirx.fabs`` …). ``source``: the operands' dtype.

    Raises:
        InternalError: one that no kernel of ours can hold.
    """
    short = name.split(".")[-1]
    if short == "popcount":
        bits = np.iinfo(dtype).bits
        count = np.vectorize(lambda v: bin(int(v) & ((1 << bits) - 1)).count("1"), otypes=[np.dtype(dtype)])(
            values[0]
        )
        return count if is_vector(values[0]) else int(count)
    if short == "clz":
        bits = np.iinfo(source).bits
        zeros = np.vectorize(lambda v: bits - (int(v) & ((1 << bits) - 1)).bit_length(), otypes=[np.int32])(
            values[0]
        )
        return zeros if is_vector(values[0]) else int(zeros)
    if short not in _INTRINSICS:
        raise InternalError(f"the simulator does not know the intrinsic {name}")
    made = _INTRINSICS[short](*values)
    if is_vector(made):
        return made.astype(compute(dtype), copy=False)
    return compute(dtype).type(made) if dtype in FLOATS else wrap(int(made), dtype)
