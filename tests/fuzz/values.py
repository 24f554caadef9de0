"""What is known of a value before a program runs: its range, whether it is exact, and how far two targets may
be apart.

The bounds come from the rounding rules of docs/LANGUAGE.md. An operation of IEEE 754 on equal operands gives
equal results, so most values agree to the last bit. They may differ where

- a product is added to: ``a * b + c`` may be contracted, so the product's rounding (``fused``) may be there
  or not;
- a sum has many terms: the order is the target's, unless every partial sum is exact (``q``: all terms are
  multiples of 2**-q);
- a function is not correctly rounded: by the units in the last place that the CPU's own tests hold it to;
- an operand differed already: the difference goes through the operation's derivative, and each side rounds
  anew.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tilescale.compiler.cpu.vmath import MAX_ULP
from tilescale.compiler.sim import numerics

FLOATS = ("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")
INTS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
#: bits of the significand; the greatest magnitude that a program is let have; the exponent of the least
#: subnormal number
PRECISION = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 53, "float8_e4m3fn": 4, "float8_e5m2": 3}
_MOST = {
    "float16": 32768.0,
    "bfloat16": 2.0**66,
    "float32": 2.0**66,
    "float64": 2.0**66,
    "float8_e4m3fn": 448.0,
    "float8_e5m2": 32768.0,
}
_LEAST = {
    "float16": -24,
    "bfloat16": -133,
    "float32": -149,
    "float64": -1074,
    "float8_e4m3fn": -9,
    "float8_e5m2": -16,
}


@dataclass(frozen=True)
class Val:
    """A scalar, or every element of a tile.

    lo, hi: bounds of the finite values. q: all are multiples of 2**-q (None: no such q). err: what two
    targets may differ by. fused: the rounding of a product that an addition may leave out. special:
    infinities and NaN may be among them.
    """

    dtype: str
    lo: float
    hi: float
    q: int | None = 0
    err: float = 0.0
    fused: float = 0.0
    special: bool = False

    @property
    def is_float(self) -> bool:
        return self.dtype in FLOATS

    @property
    def most(self) -> float:
        return max(abs(self.lo), abs(self.hi))

    @property
    def same(self) -> bool:
        """Whether all targets have the same bits."""
        return self.err == 0


def whole(dtype: str) -> Val:
    """Any value of an integer dtype."""
    if dtype == "bool":
        return Val(dtype, 0, 1)
    low, high = numerics.limits(dtype)
    return Val(dtype, low, high)


def _unit(dtype: str) -> float:
    return 2.0 ** -PRECISION[dtype]


def compute(dtype: str) -> str:
    """Where arithmetic of a dtype is done."""
    return "float64" if dtype == "float64" else "float32"


def _rounded(
    dtype: str, lo: float, hi: float, q: int | None, err: float, *, at: str, special: bool, fused: float = 0.0
) -> Val | None:
    """A result that is rounded to the format ``at``; None where it might overflow."""
    lo, hi = lo - err, hi + err
    most = max(abs(lo), abs(hi))
    if not most <= _MOST[at]:
        return None
    exact = q is not None and most * 2.0**q <= 2.0 ** PRECISION[at] and -q >= _LEAST[at]
    if err:
        err += 2 * _unit(at) * most + 2.0 ** _LEAST[at]
    if not exact:
        slack = _unit(at) * most
        lo, hi = lo - slack, hi + slack
    return Val(dtype, lo, hi, q if exact else None, err, fused, special)


def stored(v: Val, dtype: str) -> Val | None:
    """A value converted to ``dtype``, as a store or a cast does; None where that has no bound."""
    if dtype == v.dtype and (not v.is_float or dtype in ("float32", "float64")):
        return v
    if dtype == "bool":
        return Val("bool", 0, 1) if v.same else None
    if dtype in FLOATS:
        if dtype not in ("float32", "float64") and not v.is_float:
            v = _through(v)
        made = _rounded(dtype, v.lo, v.hi, v.q, v.err, at=dtype, special=v.special, fused=0.0)
        if made is None:
            return None
        return replace(made, fused=v.fused) if PRECISION[dtype] >= 24 else made
    if v.is_float:
        if not v.same:
            return None
        low, high = numerics.limits(dtype)
        lo, hi = (min(max(math.trunc(x), low), high) for x in (v.lo, v.hi))
        return whole(dtype) if v.special else Val(dtype, lo, hi)
    return wrapped(dtype, int(v.lo), int(v.hi))


def _through(v: Val) -> Val:
    """Integers reach the small floats through float32."""
    made = _rounded("float32", v.lo, v.hi, 0, 0.0, at="float32", special=False)
    assert made is not None
    return made


def wrapped(dtype: str, lo: int, hi: int) -> Val:
    low, high = numerics.limits(dtype)
    return Val(dtype, lo, hi) if low <= lo and hi <= high else whole(dtype)


def integer(dtype: str, lo: int, hi: int) -> Val | None:
    """An integer result. Signed ones of 32 and 64 bits must not overflow, all others wrap."""
    low, high = numerics.limits(dtype)
    if low <= lo and hi <= high:
        return Val(dtype, lo, hi)
    return None if dtype in ("int32", "int64") else whole(dtype)


def join(a: Val | None, b: Val | None) -> Val | None:
    """Either of two values of one dtype."""
    if a is None or b is None:
        return None
    q = None if a.q is None or b.q is None else max(a.q, b.q)
    return Val(
        a.dtype,
        min(a.lo, b.lo),
        max(a.hi, b.hi),
        q,
        max(a.err, b.err),
        max(a.fused, b.fused),
        a.special or b.special,
    )


def arithmetic(op: str, a: Val, b: Val) -> Val | None:
    """``a op b`` for + - * / of floats of one dtype; None where the result has no bound."""
    at, special = compute(a.dtype), a.special or b.special
    q = None if a.q is None or b.q is None else max(a.q, b.q)
    if op in "+-":
        lo, hi = (a.lo + b.lo, a.hi + b.hi) if op == "+" else (a.lo - b.hi, a.hi - b.lo)
        return _rounded(a.dtype, lo, hi, q, a.err + b.err + a.fused + b.fused, at=at, special=special)
    if op == "*":
        corners = [x * y for x in (a.lo, a.hi) for y in (b.lo, b.hi)]
        q = None if q is None else a.q + b.q  # type: ignore[operator]
        err = a.err * (b.most + b.err) + b.err * a.most
        made = _rounded(a.dtype, min(corners), max(corners), q, err, at=at, special=special)
        return made if made is None or made.q is not None else replace(made, fused=2 * _unit(at) * made.most)
    least = 0.0 if b.lo <= 0 <= b.hi else min(abs(b.lo), abs(b.hi)) - b.err
    if least < 2.0**-12:
        return None
    corners = [x / y for x in (a.lo, a.hi) for y in (b.lo, b.hi)]
    err = a.err / least + (a.most + a.err) * b.err / least**2
    return _rounded(a.dtype, min(corners), max(corners), None, err, at=at, special=special)


def total(terms: Val, count: int, acc: str, before: Val | None = None) -> Val | None:
    """The sum of ``count`` such terms (and of what was there ``before``) in ``acc``'s arithmetic, in any
    order."""
    extra = 0.0 if before is None else before.most
    lo = count * min(terms.lo, 0) + (0 if before is None else before.lo)
    hi = count * max(terms.hi, 0) + (0 if before is None else before.hi)
    special = terms.special or (before is not None and before.special)
    most = count * terms.most + extra
    q = terms.q if before is None else None if before.q is None or terms.q is None else max(terms.q, before.q)
    err = count * (terms.err + terms.fused) + (0 if before is None else before.err + before.fused)
    if q is None or most * 2.0**q > 2.0 ** PRECISION[acc]:
        err += 2 * (count + 1) * _unit(acc) * most
    return _rounded(terms.dtype, lo, hi, q, err, at=acc, special=special)


def product(a: Val, b: Val, depth: int, dtype: str, before: Val | None) -> Val | None:
    """An element of a matrix product over ``depth``, in the accumulator's dtype."""
    wide = "float64" if dtype == "float64" else "float32"
    corners = [x * y for x in (a.lo, a.hi) for y in (b.lo, b.hi)]
    q = None if a.q is None or b.q is None else a.q + b.q
    err = a.err * (b.most + b.err) + b.err * a.most
    one = Val(wide, min(corners), max(corners), q, err, 0.0, a.special or b.special)
    made = total(one, depth, wide, None if before is None else replace(before, dtype=wide))
    return None if made is None else stored(made, dtype)


#: functions: the range that they take, and the greatest slope there
FUNCTIONS: dict[str, tuple[float, float, float]] = {
    "exp": (-9, 9, 8200),
    "exp2": (-12, 12, 3000),
    "exp10": (-4, 4, 24000),
    "sin": (-60, 60, 1),
    "cos": (-60, 60, 1),
    "tanh": (-30, 30, 1),
    "sigmoid": (-30, 30, 0.25),
    "erf": (-30, 30, 1.13),
    "log": (0.01, 1e4, 100),
    "log2": (0.01, 1e4, 150),
    "log10": (0.01, 1e4, 45),
    "log1p": (-0.9, 1e4, 10),
    "sqrt": (0, 1e5, math.inf),
    "rsqrt": (0.01, 1e5, 500),
    "floor": (-1e6, 1e6, math.inf),
    "ceil": (-1e6, 1e6, math.inf),
    "trunc": (-1e6, 1e6, math.inf),
    "round": (-1e6, 1e6, math.inf),
    "atan": (-1e3, 1e3, 1),
    "__exp": (-9, 9, 8200),
    "__exp2": (-12, 12, 3000),
    "__log": (0.2, 1e4, 5),
    "__sin": (-60, 60, 1),
    "ieee_sqrt": (0, 1e5, math.inf),
}
_VALUES = {
    "exp": math.exp,
    "exp2": lambda x: 2.0**x,
    "exp10": lambda x: 10.0**x,
    "tanh": math.tanh,
    "erf": math.erf,
    "log": math.log,
    "log2": math.log2,
    "log10": math.log10,
    "log1p": math.log1p,
    "sqrt": math.sqrt,
    "floor": math.floor,
    "ceil": math.ceil,
    "trunc": math.trunc,
    "round": round,
    "atan": math.atan,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "sin": None,
    "cos": None,
    "rsqrt": lambda x: -1 / math.sqrt(x),
}
_CORRECTLY_ROUNDED = ("sqrt", "floor", "ceil", "trunc", "round")


def function(name: str, a: Val) -> Val | None:
    """``T.<name>`` of a float; None outside the range where its slope is known."""
    low, high, slope = FUNCTIONS[name]
    if a.lo - a.err < low or a.hi + a.err > high or (a.err and slope == math.inf):
        return None
    plain, at = name.removeprefix("__").removeprefix("ieee_"), compute(a.dtype)
    value = _VALUES[plain]
    lo, hi = (-1.0, 1.0) if value is None else (value(a.lo), value(a.hi))
    lo, hi = (-lo, -hi)[::-1] if plain == "rsqrt" else (lo, hi)
    if plain in _CORRECTLY_ROUNDED:
        return _rounded(a.dtype, lo, hi, None if plain == "sqrt" else 0, 0.0, at=at, special=a.special)
    # both sides are off: the CPU by its table's units, the simulator (float64, rounded once) by less than one
    places = MAX_ULP.get(name, MAX_ULP.get(plain, (3.0, 3.0)))[at == "float64"] + 1.0
    err = (
        (slope * a.err if a.err else 0.0) + places * 2 * _unit(at) * max(abs(lo), abs(hi)) + 2.0 ** _LEAST[at]
    )
    if name.startswith("__log"):
        err += 8 * _unit(at)  # fast logarithms promise nothing relative near one
    return _rounded(a.dtype, lo, hi, None, err, at=at, special=a.special)
