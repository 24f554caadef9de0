"""Elementwise functions as expressions of arithmetic, comparisons and bit casts, which vectorise with the
loop around them.

Written once over the format's constants: float32 and float64 differ in numbers alone. The largest errors
measured by tests/unit/cpu/test_vmath.py (units in the last place, all special values included) stand in
`MAX_ULP`.

Rules that keep the expressions exact: products that must not round are FMAs written out; integer arithmetic
never overflows on a value that is used (TVM tells LLVM that it does not); a NaN is carried by the float side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, nan

from tilescale.compiler.cpu import coefficients as co
from tilescale.compiler.cpu import convert
from tilescale.compiler.cpu.expr import (
    bits,
    dtype_of,
    fma,
    intrin,
    is_nan,
    lit,
    native_cast,
    not_equal,
    select,
)
from tilescale.compiler.cpu.tile import Expr
from tilescale.compiler.tvm_compat import tirx
from tilescale.errors import TileTypeError


@dataclass(frozen=True)
class Format:
    """The numbers of a binary floating-point format."""

    dtype: str
    int_dtype: str
    uint_dtype: str
    mantissa: int
    bias: int
    exp_low: float
    """e^x is zero below."""
    exp_high: float
    """e^x is infinite above."""
    tiny: float
    """The smallest normal number."""

    @property
    def magic(self) -> float:
        """Adding it to a small number leaves that number, rounded to an integer, in the low bits of the
        sum."""
        return 1.5 * 2.0**self.mantissa

    def k(self, value: float) -> Expr:
        return lit(value, self.dtype)


FORMATS = {
    "float32": Format("float32", "int32", "uint32", 23, 127, -104.0, 89.0, 2.0**-126),
    "float64": Format("float64", "int64", "uint64", 52, 1023, -746.0, 710.0, 2.0**-1022),
}


class Lets:
    """Collects temporaries; ``done`` wraps the result in them. Each is evaluated once."""

    def __init__(self) -> None:
        self.bound: list[tuple[Expr, Expr]] = []

    def __call__(self, value: Expr, named: bool = False) -> Expr:
        if not named and isinstance(value, (tirx.Var, tirx.FloatImm, tirx.IntImm)):
            return value
        var = tirx.Var("t", dtype_of(value))
        self.bound.append((var, value))
        return var

    def done(self, value: Expr) -> Expr:
        for var, bound in reversed(self.bound):
            value = tirx.Let(var, bound, value)
        return value


def _poly(x: Expr, coefficients: tuple[float, ...], f: Format) -> Expr:
    """Horner's scheme in FMAs."""
    value = f.k(coefficients[-1])
    for c in reversed(coefficients[:-1]):
        value = fma(value, x, f.k(c))
    return value


def _abs(x: Expr, f: Format) -> Expr:
    mask = (1 << (f.mantissa + len(bin(f.bias)) - 1)) - 1
    return bits(bits(x, f.uint_dtype) & lit(mask, f.uint_dtype), f.dtype)


def _with_sign(magnitude: Expr, x: Expr, f: Format) -> Expr:
    return intrin("llvm.copysign", f.dtype, magnitude, x)


def _clamp(x: Expr, low: float, high: float, f: Format) -> Expr:
    """NaN passes: both comparisons are false for it."""
    x = select(tirx.LT(x, f.k(low)), f.k(low), x)
    return select(tirx.GT(x, f.k(high)), f.k(high), x)


def _power_of_two(biased_sum: Expr, f: Format) -> Expr:
    """2^n from magic + bias + n: the shift leaves n + bias in the exponent's place and drops the rest."""
    return bits(bits(biased_sum, f.uint_dtype) << lit(f.mantissa, f.uint_dtype), f.dtype)


def _scaled(t: Lets, value: Expr, n: Expr, f: Format) -> Expr:
    """value · 2^n for |n| up to twice the exponent's range, by two powers: only the second product can round
    or overflow."""
    magic = f.k(f.magic + f.bias)
    half = t(fma(n, f.k(0.5), magic))
    rest = (n - (half - magic)) + magic
    return value * _power_of_two(half, f) * _power_of_two(t(rest), f)


def _expm1_reduced(t: Lets, r: Expr, f: Format) -> Expr:
    """e^r - 1 for |r| ≤ ln2/2."""
    r = t(r)
    return fma(t(r * r), _poly(r, co.EXP[f.dtype], f), r)


def _split_exp(t: Lets, x: Expr, f: Format) -> tuple[Expr, Expr]:
    """(n, r): x = n·ln2 + r, n an integer held in a float, |r| ≤ ln2/2 (Cody and Waite)."""
    n = t(t(fma(x, f.k(co.LOG2_E[f.dtype][0]), f.k(f.magic))) - f.k(f.magic))
    high, low = co.LN2[f.dtype]
    return n, t(fma(n, f.k(-low), fma(n, f.k(-high), x)))


def _exp(t: Lets, x: Expr, f: Format) -> Expr:
    n, r = _split_exp(t, t(_clamp(x, f.exp_low, f.exp_high, f)), f)
    return _scaled(t, t(_expm1_reduced(t, r, f) + f.k(1.0)), n, f)


def _exp2(t: Lets, x: Expr, f: Format) -> Expr:
    scale = 1 / co.LN2[f.dtype][0]
    x = t(_clamp(x, f.exp_low * scale - 1, f.exp_high * scale + 1, f))
    n = t(t(x + f.k(f.magic)) - f.k(f.magic))
    return _scaled(t, t(_expm1_reduced(t, (x - n) * f.k(co.LN2[f.dtype][0]), f) + f.k(1.0)), n, f)


def _exp10(t: Lets, x: Expr, f: Format) -> Expr:
    x = t(_clamp(x, f.exp_low / 2.302 - 1, f.exp_high / 2.302 + 1, f))
    n = t(t(fma(x, f.k(co.LOG2_10), f.k(f.magic))) - f.k(f.magic))
    high, low = co.LOG10_2[f.dtype]
    r = fma(n, f.k(-low), fma(n, f.k(-high), x)) * f.k(co.LN10[f.dtype])
    return _scaled(t, t(_expm1_reduced(t, r, f) + f.k(1.0)), n, f)


def _expm1(t: Lets, x: Expr, f: Format) -> Expr:
    """The same for any x; for a large one the -1 is lost in the rounding, as it must be."""
    near = t(_clamp(x, -40.0 if f.dtype == "float64" else -20.0, f.exp_high, f))
    n, r = _split_exp(t, near, f)
    half = t(_power_of_two(t(n - f.k(1.0) + f.k(f.magic + f.bias)), f))
    # In units of 2: half·(e^r - 1) + (half - 1/2), doubled, so that n = 1024 does not overflow before its
    # time.
    value = fma(_expm1_reduced(t, r, f), half, half - f.k(0.5)) * f.k(2.0)
    return select(tirx.EQ(x, f.k(0.0)), x, value)


def _split_log(t: Lets, x: Expr, f: Format) -> tuple[Expr, Expr, Expr, Expr]:
    """(e, m, s·(h + R), h) with x = 2^e·(1 + m), m in [√½ - 1, √2 - 1]; ln(1 + m) = m - (h - s·(h + R)), h =
    m²/2, s = m/(2 + m).

    The decomposition of fdlibm's logarithm (Sun Microsystems, 1993), whose series in s has no even terms.
    """
    subnormal = tirx.LT(x, f.k(f.tiny))
    u = t(bits(select(subnormal, x * f.k(2.0**f.mantissa), x), f.int_dtype))
    shift = lit(f.mantissa, f.int_dtype)
    root_half = {"float32": 0x3F3504F3, "float64": 0x3FE6A09E667F3BCD}[f.dtype]
    e = t((u - lit(root_half, f.int_dtype)) >> shift)
    m = t(bits(u - (e << shift), f.dtype) - f.k(1.0))
    s = t(m / (m + f.k(2.0)))
    z = t(s * s)
    h = t(m * m * f.k(0.5))
    tail = t(s * fma(z, _poly(z, co.LOG[f.dtype], f), h))
    power = t(native_cast(e, f.dtype) - select(subnormal, f.k(f.mantissa), f.k(0.0)))
    return power, m, tail, h


def _log_specials(x: Expr, value: Expr, f: Format) -> Expr:
    """Zero gives -∞, negative and NaN give NaN, ∞ stays."""
    value = select(tirx.EQ(x, f.k(inf)), f.k(inf), value)
    return select(tirx.GT(x, f.k(0.0)), value, select(tirx.EQ(x, f.k(0.0)), f.k(-inf), f.k(nan)))


def _log(t: Lets, x: Expr, f: Format) -> Expr:
    e, m, tail, h = _split_log(t, x, f)
    high, low = co.LN2[f.dtype]
    # e·ln2 - ((h - (tail + e·low)) - m); the high product rounds once, with the sum.
    small = t(m - (h - fma(e, f.k(low), tail)))
    return _log_specials(x, fma(e, f.k(high), small), f)


def _log_base(t: Lets, x: Expr, base: tuple[float, float], power: tuple[float, float], f: Format) -> Expr:
    """ln(1 + m) as a sum of two, times 1/ln(base) as a sum of two, plus e·log_base(2)."""
    e, m, tail, h = _split_log(t, x, f)
    # The leading part keeps half of the bits, so that its product with the constant's is nearly exact.
    mask = lit(
        ~((1 << (f.mantissa // 2 + 1)) - 1) & ((1 << (32 if f.mantissa == 23 else 64)) - 1), f.uint_dtype
    )
    head = t(bits(bits(m - h, f.uint_dtype) & mask, f.dtype))
    rest = t((m - head) - h + tail)
    low = t(fma(head, f.k(base[1]), rest * f.k(base[0])))
    low = t(fma(e, f.k(power[1]), low))
    product = t(head * f.k(base[0]))
    low = t(low + fma(head, f.k(base[0]), product * f.k(-1.0)))
    whole = t(e * f.k(power[0])) if power[1] == 0.0 else None
    if whole is not None:  # base 2: e is exact; the larger term first
        total = t(whole + product)
        lost = (whole - total) + product
        value = total + (low + lost)
    else:
        value = fma(e, f.k(power[0]), product + low)
    return _log_specials(x, value, f)


def _log2(t: Lets, x: Expr, f: Format) -> Expr:
    return _log_base(t, x, co.LOG2_E[f.dtype], (1.0, 0.0), f)


def _log10(t: Lets, x: Expr, f: Format) -> Expr:
    return _log_base(t, x, co.LOG10_E[f.dtype], co.LOG10_2[f.dtype], f)


def _log1p(t: Lets, x: Expr, f: Format) -> Expr:
    """ln(u)·x/(u - 1) with u = 1 + x rounded: the quotient makes up for what u lost (Kahan)."""
    u = t(x + f.k(1.0))
    d = t(u - f.k(1.0))
    value = _log(t, u, f) * (x / d)
    value = select(tirx.EQ(u, f.k(inf)), u, value)
    return select(tirx.EQ(d, f.k(0.0)), x, value)


def _tanh(t: Lets, x: Expr, f: Format) -> Expr:
    """With E = e^(-2|x|): -(E - 1)/(E + 1) up to 0.55, where tanh is 1/2 and E - 1 does not cancel; 1 - 2E/(1
    + E) beyond."""
    a = t(_abs(x, f))
    low = -40.0 if f.dtype == "float64" else -20.0
    y = t(a * f.k(-2.0))
    n, r = _split_exp(t, t(select(tirx.LT(y, f.k(low)), f.k(low), y)), f)
    s = t(_power_of_two(t(n + f.k(f.magic + f.bias)), f))
    p = t(_expm1_reduced(t, r, f))
    m, e = t(fma(p, s, s - f.k(1.0))), t(fma(p, s, s))
    small = tirx.LT(a, f.k(0.55))
    q = t(select(small, m * f.k(-1.0), e * f.k(2.0)) / select(small, m + f.k(2.0), e + f.k(1.0)))
    return _with_sign(select(small, q, f.k(1.0) - q), x, f)


def _sigmoid(t: Lets, x: Expr, f: Format) -> Expr:
    """By e^-|x|, which cannot overflow."""
    e = t(_exp(t, t(_abs(x, f) * f.k(-1.0)), f))
    return select(tirx.LT(x, f.k(0.0)), e, f.k(1.0)) / (e + f.k(1.0))


def _sqrt(t: Lets, x: Expr, f: Format) -> Expr:
    return intrin("llvm.sqrt", f.dtype, x)


def _rsqrt(t: Lets, x: Expr, f: Format) -> Expr:
    return f.k(1.0) / intrin("llvm.sqrt", f.dtype, x)


def _trig(t: Lets, x: Expr, f: Format, quarter: int) -> Expr:
    """sin(x + quarter·π/2). Reduced in float64 with π/2 in three parts: exact to the last place up to |x| =
    2^50, NaN beyond."""
    d = FORMATS["float64"]
    wide = t(native_cast(x, "float64"))
    shifted = t(fma(wide, d.k(2.0 / co.HALF_PI[0] / 2.0), d.k(d.magic)))
    n = t(shifted - d.k(d.magic))
    r = wide
    for part in co.HALF_PI:
        r = fma(n, d.k(-part), r)
    r = t(native_cast(r, f.dtype))
    z = t(r * r)
    sine = fma(t(z * r), _poly(z, co.SIN[f.dtype], f), r)
    if quarter == 0:
        sine = select(tirx.EQ(r, f.k(0.0)), r, sine)  # keeps the sign of zero
    cosine = fma(t(z * z), _poly(z, co.COS[f.dtype], f), fma(z, f.k(-0.5), f.k(1.0)))
    q = t((bits(shifted, "uint64") & lit(3, "uint64")) + lit(quarter, "uint64"))
    value = select(tirx.EQ(q & lit(1, "uint64"), lit(0, "uint64")), sine, cosine)
    sign = native_cast(q & lit(2, "uint64"), f.uint_dtype) << lit(
        f.mantissa + len(bin(f.bias)) - 2, f.uint_dtype
    )
    value = bits(bits(value, f.uint_dtype) ^ sign, f.dtype)
    return select(tirx.LT(_abs(x, f), f.k(2.0**50)), value, f.k(nan))


def _erf(t: Lets, x: Expr, f: Format) -> Expr:
    """x + x·P(x²) up to 1; beyond, 1 - e^(-a²)·G/(a + 2) with G a polynomial in 1/(a + 2)."""
    a = t(_abs(x, f))
    a = t(select(tirx.GT(a, f.k(co.ERFC_LIMIT[f.dtype])), f.k(co.ERFC_LIMIT[f.dtype]), a))
    z = t(a * a)
    near = fma(a, _poly(z, co.ERF_SMALL[f.dtype], f), a)
    u = t(f.k(1.0) / (a + f.k(2.0)))
    w = t(fma(u, f.k(co.ERFC_SCALE[f.dtype]), f.k(-co.ERFC_SHIFT[f.dtype])))
    far = fma(t(_exp(t, t(z * f.k(-1.0)), f) * u), _poly(w, co.ERFC_LARGE[f.dtype], f) * f.k(-1.0), f.k(1.0))
    return _with_sign(select(tirx.GT(a, f.k(1.0)), far, near), x, f)


def _exp_fast(
    scale: float, exact: Callable[[Lets, Expr, Format], Expr]
) -> Callable[[Lets, Expr, Format], Expr]:
    """2^(x·scale) with a single power of two, for float32: relative error 2^-22 + |x|·2^-25; results below
    2^-125 are 0.

    The power is 2^(n-1) and the polynomial 2^(r+1), so that the largest finite results come out.
    """

    def lowered(t: Lets, x: Expr, f: Format) -> Expr:
        if f.dtype == "float64":
            return exact(t, x, f)
        offset = f.k(f.magic + f.bias - 1)
        x = t(_clamp(x, -126.2 / scale, 128.9 / scale, f))
        shifted = t(fma(x, f.k(scale), offset))
        r = t(fma(x, f.k(scale), offset - shifted))
        return _poly(r, tuple(2 * c for c in co.EXP2_FAST[f.dtype]), f) * _power_of_two(shifted, f)

    return lowered


def _log_fast(scale: float) -> Callable[[Lets, Expr, Format], Expr]:
    """log to a base: subnormal numbers count as the smallest normal one; a few ulp; infinities and zero as
    they should be."""

    def lowered(t: Lets, x: Expr, f: Format) -> Expr:
        shift = lit(f.mantissa, f.int_dtype)
        root_half = {"float32": 0x3F3504F3, "float64": 0x3FE6A09E667F3BCD}[f.dtype]
        u = t(bits(x, f.int_dtype))
        e = t((u - lit(root_half, f.int_dtype)) >> shift)
        m = t(bits(u - (e << shift), f.dtype) - f.k(1.0))
        s = t(m / (m + f.k(2.0)))
        z = t(s * s)
        ln = fma(s, z * _poly(z, co.LOG[f.dtype], f), s * f.k(2.0))
        value = fma(native_cast(e, f.dtype), f.k(co.LN2[f.dtype][0] * scale), ln * f.k(scale))
        return _log_specials(x, value, f)

    return lowered


def _pow(t: Lets, x: Expr, y: Expr, f: Format) -> Expr:
    """float32 by way of float64: 2^(y·log2|x|) there is right to 2^-45, more than float32 can show."""
    d = FORMATS["float64"]
    wide, power = t(native_cast(x, "float64")), t(native_cast(y, "float64"))
    a = t(_abs(wide, d))
    value = t(_exp2(t, t(_log2(t, a, d) * power), d))
    value = t(select(tirx.EQ(power, d.k(0.0)) | tirx.EQ(a, d.k(1.0)), d.k(1.0), value))
    whole = tirx.EQ(intrin("llvm.trunc", "float64", power), power)
    half = t(power * d.k(0.5))
    odd = whole & tirx.NE(intrin("llvm.trunc", "float64", half), half)
    negative = tirx.NE(bits(wide, "uint64") >> lit(63, "uint64"), lit(0, "uint64"))
    value = t(select(odd & negative, value * d.k(-1.0), value))
    undefined = tirx.LT(wide, d.k(0.0)) & tirx.GT(wide, d.k(-inf)) & tirx.Not(whole)
    value = t(select(undefined, d.k(nan), value))
    missing = (is_nan(wide) & not_equal(power, d.k(0.0))) | (is_nan(power) & not_equal(wide, d.k(1.0)))
    return native_cast(select(missing, d.k(nan), value), f.dtype)


def _fence(x: Expr, f: Format) -> Expr:
    """x, which LLVM may not take into an operation beside it (a product into a sum)."""
    return intrin("llvm.arithmetic.fence", f.dtype, x)


def _llvm(name: str) -> Callable[..., Expr]:
    return lambda t, *args: intrin(f"llvm.{name}", args[-1].dtype, *args[:-1])


def _libm(name: str) -> Callable[..., Expr]:
    """A scalar call: the loop around it is not vectorised."""

    def lowered(t: Lets, *args: Expr) -> Expr:
        f = args[-1]
        return tirx.call_pure_extern(f.dtype, name + ("f" if f.dtype == "float32" else ""), *args[:-1])

    return lowered


_FUNCTIONS: dict[str, tuple[int, Callable[..., Expr]]] = {
    "exp": (1, _exp),
    "exp2": (1, _exp2),
    "exp10": (1, _exp10),
    "expm1": (1, _expm1),
    "log": (1, _log),
    "log2": (1, _log2),
    "log10": (1, _log10),
    "log1p": (1, _log1p),
    "tanh": (1, _tanh),
    "sigmoid": (1, _sigmoid),
    "sqrt": (1, _sqrt),
    "rsqrt": (1, _rsqrt),
    "sin": (1, lambda t, x, f: _trig(t, x, f, 0)),
    "cos": (1, lambda t, x, f: _trig(t, x, f, 1)),
    "tan": (1, lambda t, x, f: t(_trig(t, x, f, 0)) / t(_trig(t, x, f, 1))),
    "erf": (1, _erf),
    "abs": (1, lambda t, x, f: _abs(x, f)),
    "fabs": (1, lambda t, x, f: _abs(x, f)),
    "floor": (1, _llvm("floor")),
    "ceil": (1, _llvm("ceil")),
    "trunc": (1, _llvm("trunc")),
    "round": (1, _llvm("roundeven")),
    "nearbyint": (1, _llvm("roundeven")),
    "rint": (1, _llvm("roundeven")),
    "pow": (2, _pow),
    "copysign": (2, _llvm("copysign")),
    "fma": (3, _llvm("fma")),
    "ieee_add": (2, lambda t, x, y, f: _fence(x, f) + _fence(y, f)),
    "ieee_sub": (2, lambda t, x, y, f: _fence(x, f) - _fence(y, f)),
    "ieee_mul": (2, lambda t, x, y, f: _fence(x * y, f)),
    "__exp": (1, _exp_fast(co.LOG2_E["float32"][0], _exp)),
    "__exp2": (1, _exp_fast(1.0, _exp2)),
    "__exp10": (1, _exp_fast(co.LOG2_10, _exp10)),
    "__log": (1, _log_fast(1.0)),
    "__log2": (1, _log_fast(co.LOG2_E["float64"][0])),
    "__log10": (1, _log_fast(co.LOG10_E["float64"][0])),
    "__tanh": (1, _tanh),
    "__rcp": (1, lambda t, x, f: f.k(1.0) / x),
    "__sin": (1, lambda t, x, f: _trig(t, x, f, 0)),
    "__cos": (1, lambda t, x, f: _trig(t, x, f, 1)),
    "__tan": (1, lambda t, x, f: t(_trig(t, x, f, 0)) / t(_trig(t, x, f, 1))),
    **{
        name: (1, _libm(name))
        for name in ("asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "lgamma", "tgamma")
    },
    **{name: (2, _libm(name)) for name in ("atan2", "fmod", "remainder", "hypot", "nextafter")},
}

SCALAR = frozenset(
    {"asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "lgamma", "tgamma"}
) | frozenset({"atan2", "fmod", "remainder", "hypot", "nextafter"})
"""Functions that call libm one element at a time (and float64 ``pow``)."""

MAX_ULP: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("abs", "fabs", "floor", "ceil", "trunc", "round", "nearbyint", "rint"), (0.0, 0.0)),
    "sqrt": (0.5, 0.5),
    "rsqrt": (1.5, 1.5),
    "exp": (1.0, 1.0),
    "exp2": (1.0, 1.0),
    "exp10": (1.2, 1.2),
    "expm1": (1.5, 1.7),
    "log": (0.8, 0.8),
    "log2": (0.8, 0.8),
    "log10": (0.8, 0.8),
    "log1p": (2.0, 2.0),
    "tanh": (2.2, 2.0),
    "sigmoid": (2.0, 2.0),
    "erf": (1.1, 1.1),
    "sin": (1.5, 1.5),
    "cos": (1.5, 1.5),
    "tan": (3.0, 3.0),
    "__exp": (32.0, 1.0),
    "__exp2": (4.0, 1.0),
    "__exp10": (32.0, 1.2),
    "__log": (3.0, 3.0),
    "__log2": (3.0, 3.0),
    "__log10": (3.0, 3.0),
    "__tanh": (2.2, 2.0),
    "__rcp": (0.5, 0.5),
    "__sin": (1.5, 1.5),
    "__cos": (1.5, 1.5),
    "__tan": (3.0, 3.0),
}
"""Largest error, in units in the last place, that the tests allow: (float32, float64), a little above what
they measured."""


def functions() -> frozenset[str]:
    """The names that `lower_call` knows."""
    return frozenset(_FUNCTIONS)


def lower_call(name: str, args: list[Expr], dtype: str) -> Expr:
    """``name(*args)`` as an expression; arguments and result are compute values of ``dtype``
    (`convert.compute_dtype`).

    The small floats compute in float32 and return a float32 not yet rounded to ``dtype``: `convert.store` or
    `convert.cast` rounds. Names beginning with ``__`` are the fast forms.

    Raises:
        TileTypeError: an unknown function, a wrong number of arguments, a dtype that is not a float.
    """
    if name not in functions():
        raise TileTypeError(
            f"T.{name} is not known on the cpu target", expected=", ".join(sorted(functions()))
        )
    if not convert.is_float(dtype):
        raise TileTypeError(
            f"T.{name} of {dtype}", expected="a float dtype", hint=f'T.{name}(T.cast(x, "float32"))'
        )
    f = FORMATS[convert.compute_dtype(dtype)]
    arity, lowered = _FUNCTIONS[name]
    if len(args) != arity:
        raise TileTypeError(f"T.{name} takes {arity} argument{'s' * (arity > 1)}, got {len(args)}")
    if name == "pow" and f.dtype == "float64":
        lowered = _libm("pow")
    t = Lets()
    # A constant gets a name too: TVM would compute with it as it builds the expression, and fails at 0/0.
    return t.done(lowered(t, *(t(a, named=isinstance(a, tirx.FloatImm)) for a in args), f))
