"""Scalar arithmetic: what a kernel writes inside T.Parallel. Exact by default; fast only where written
``T.__exp``, or where the kernel's ``pass_configs`` ask for fast math."""

from __future__ import annotations

import math as _math
from typing import Any

from tilescale.compiler.builder.narrow import Value, narrow_bits
from tilescale.compiler.builder.state import active, asks_for
from tilescale.compiler.builder.values import (
    Buffer,
    as_expr,
    binary,
    compare,
    const,
    convert,
    dtype_of,
    float_function,
    same_dtype,
    to_expr,
    truth,
)
from tilescale.compiler.ir import source
from tilescale.compiler.tvm_compat import ir, is_expr, register_op, tirx
from tilescale.errors import TileTypeError, TileValueError
from tilescale.language.dtypes import GREATEST, RANGES, Narrow, canonical
from tilescale.language.funcs import FAST_MATH
from tilescale.language.symbolic import SymExpr
from tilescale.language.vectors import Vector, named_vector

#: functions of float32 that have a fast form
FAST = ("exp", "exp2", "exp10", "log", "log2", "log10", "sin", "cos", "tan")


def _unary(name: str, python: Any, doc: str) -> Any:
    register_op(f"ts.math.{name}", pure=True)

    def call(x: Any) -> Any:
        e = to_expr(x, f"the argument of T.{name}")
        if not is_expr(e):
            return python(e)
        dt = str(e.ty)
        if "float" not in dt and name.startswith("__"):
            raise TileTypeError(
                f"T.{name} of {dt}",
                loc=source.current(),
                expected="a float",
                hint=f'T.{name}(T.cast(…, "float32"))',
            )
        if "float" not in dt:
            e, dt = convert(e, "float32"), "float32"
        chosen = f"__{name}" if name in FAST and dt == "float32" and asks_for(FAST_MATH) else name
        return ir.Call(f"ts.math.{chosen}", [e], ret_ty=ir.PrimType(dt))

    call.__name__ = call.__qualname__ = name
    call.__doc__ = doc
    return call


exp = _unary("exp", _math.exp, "e to the x.")
exp2 = _unary("exp2", lambda x: 2.0**x, "Two to the x.")
exp10 = _unary("exp10", lambda x: 10.0**x, "Ten to the x.")
log = _unary("log", _math.log, "The natural logarithm.")
log2 = _unary("log2", _math.log2, "The logarithm to base 2.")
log10 = _unary("log10", _math.log10, "The logarithm to base 10.")
log1p = _unary("log1p", _math.log1p, "log(1 + x), exact near zero.")
sqrt = _unary("sqrt", _math.sqrt, "The square root, correctly rounded.")
rsqrt = _unary("rsqrt", lambda x: 1.0 / _math.sqrt(x), "The reciprocal of the square root.")
sin = _unary("sin", _math.sin, "The sine, in radians.")
cos = _unary("cos", _math.cos, "The cosine, in radians.")
tan = _unary("tan", _math.tan, "The tangent, in radians.")
tanh = _unary("tanh", _math.tanh, "The hyperbolic tangent.")
sinh = _unary("sinh", _math.sinh, "The hyperbolic sine.")
cosh = _unary("cosh", _math.cosh, "The hyperbolic cosine.")
asin = _unary("asin", _math.asin, "The inverse sine.")
acos = _unary("acos", _math.acos, "The inverse cosine.")
atan = _unary("atan", _math.atan, "The inverse tangent.")
asinh = _unary("asinh", _math.asinh, "The inverse hyperbolic sine.")
acosh = _unary("acosh", _math.acosh, "The inverse hyperbolic cosine.")
atanh = _unary("atanh", _math.atanh, "The inverse hyperbolic tangent.")
sigmoid = _unary("sigmoid", lambda x: 1.0 / (1.0 + _math.exp(-x)), "1 / (1 + exp(-x)).")
erf = _unary("erf", _math.erf, "The error function.")
floor = _unary("floor", _math.floor, "The greatest integer not above x.")
ceil = _unary("ceil", _math.ceil, "The least integer not below x.")
trunc = _unary("trunc", _math.trunc, "x without its fraction.")
_round_to_even = _unary("round", round, "The nearest integer, halves to even.")
nearbyint = _unary("nearbyint", round, "The nearest integer, halves to even.")
__exp = _unary("__exp", _math.exp, "e to the x, fast.")
__exp2 = _unary("__exp2", lambda x: 2.0**x, "Two to the x, fast.")
__exp10 = _unary("__exp10", lambda x: 10.0**x, "Ten to the x, fast.")
__log = _unary("__log", _math.log, "The natural logarithm, fast.")
__log2 = _unary("__log2", _math.log2, "The logarithm to base 2, fast.")
__log10 = _unary("__log10", _math.log10, "The logarithm to base 10, fast.")
__sin = _unary("__sin", _math.sin, "The sine, fast.")
__cos = _unary("__cos", _math.cos, "The cosine, fast.")
__tan = _unary("__tan", _math.tan, "The tangent, fast.")
__rcp = _unary("__rcp", lambda x: 1.0 / x, "1 / x, fast.")


def fast_rcp(x: Any) -> Any:
    """1 / x of float32, fast: to one unit in the last place, subnormal numbers taken for zero on a GPU. Of
    other dtypes the quotient itself."""
    e = to_expr(x, "the argument of T.fast_rcp")
    return __rcp(e) if is_expr(e) and str(e.ty) == "float32" else binary("/", 1.0, e)


def _predicate(name: str, python: Any, doc: str) -> Any:
    register_op(f"ts.math.{name}", pure=True)

    def call(x: Any) -> Any:
        e = to_expr(x, f"the argument of T.{name}")
        if not is_expr(e):
            return python(e)
        if "float" not in str(e.ty):
            return const(name == "isfinite", "bool")
        return ir.Call(f"ts.math.{name}", [e], ret_ty=ir.PrimType("bool"))

    call.__name__ = call.__qualname__ = name
    call.__doc__ = doc
    return call


isnan = _predicate("isnan", _math.isnan, "Whether x is not a number.")
isinf = _predicate("isinf", _math.isinf, "Whether x is infinite.")
isfinite = _predicate("isfinite", _math.isfinite, "Whether x is finite.")

for _name in ("pow", "fmod", "atan2", "copysign", "hypot", "fma", "ieee_add", "ieee_sub", "ieee_mul"):
    register_op(f"ts.math.{_name}", pure=True)


def _python(*values: Any) -> bool:
    return not any(is_expr(to_expr(v)) for v in values)


def pow(a: Any, b: Any) -> Any:
    """a to the power b."""
    return a**b if _python(a, b) else float_function("pow", a, b)


power = pow


def fmod(a: Any, b: Any) -> Any:
    """The remainder of a / b with the sign of a."""
    return _math.fmod(a, b) if _python(a, b) else float_function("fmod", a, b)


def atan2(a: Any, b: Any) -> Any:
    """The angle of the point (b, a), in radians."""
    return _math.atan2(a, b) if _python(a, b) else float_function("atan2", a, b)


def round(x: Any, rounding_mode: str = "ties-to-even") -> Any:
    """The nearest integer: of two as near the even one, or with "ties-away-from-zero" the larger magnitude.

    Raises:
        TileValueError: another mode.
    """
    if rounding_mode == "ties-to-even":
        return _round_to_even(x)
    if rounding_mode != "ties-away-from-zero":
        raise TileValueError(
            f"T.round(…, {rounding_mode!r})",
            loc=source.current(),
            expected='"ties-to-even" or "ties-away-from-zero"',
        )
    e = to_expr(x, "the argument of T.round")
    if not is_expr(e):
        return _math.copysign(_math.floor(abs(e) + 0.5), e) if isinstance(e, float) else e
    kind = str(e.ty)
    if "float" not in kind:
        return e
    whole = trunc(e)  # what is left is exact, and 0 where x has no fraction
    left, one = tirx.Sub(e, whole), const(1.0, kind)
    away = if_then_else(compare("<", e, 0.0), tirx.Sub(whole, one), tirx.Add(whole, one))
    half = const(0.5, kind)
    return if_then_else(
        tirx.Or(compare(">=", left, half), compare("<=", left, tirx.Sub(const(0.0, kind), half))), away, whole
    )


def copysign(a: Any, b: Any) -> Any:
    """The magnitude of a with the sign of b."""
    return _math.copysign(a, b) if _python(a, b) else float_function("copysign", a, b)


def hypot(a: Any, b: Any) -> Any:
    """The length of (a, b)."""
    return _math.hypot(a, b) if _python(a, b) else float_function("hypot", a, b)


def max(a: Any, *rest: Any) -> Any:
    """The greatest; a NaN on the left is kept, as in ``a if a >= b or isnan(a) else b``."""
    for b in rest:
        a = _extreme("max", a, b)
    return a


def min(a: Any, *rest: Any) -> Any:
    """The least."""
    for b in rest:
        a = _extreme("min", a, b)
    return a


def _extreme(name: str, a: Any, b: Any) -> Any:
    if not active() and (isinstance(a, SymExpr) or isinstance(b, SymExpr)):
        return SymExpr(name, a, b)  # an extent, in front of a kernel
    if _python(a, b):
        return (a if a >= b else b) if name == "max" else (a if a <= b else b)
    x, y, _ = same_dtype(a, b, f"an argument of T.{name}")
    return binary(name, x, y)


def abs(x: Any) -> Any:
    """The magnitude."""
    e = to_expr(x)
    if not is_expr(e):
        return e if e >= 0 else -e
    if "uint" in str(e.ty) or str(e.ty) == "bool":
        return e
    return tirx.abs(convert(e, "float32") if "float8" in str(e.ty) else e)


def clamp(x: Any, min_val: Any, max_val: Any) -> Any:
    """x, no less than ``min_val`` and no more than ``max_val``."""
    return min(max(x, min_val), max_val)


def cast(value: Any, dtype: Any) -> Any:
    """``value`` converted to ``dtype``: floats round to nearest even, float to integer truncates.

    A Python number becomes a constant of that dtype. A value of 4 bits reads as one of the 8 bits that tiles
    hold; T.reinterpret gives its own. A vector becomes one of as many lanes, ``T.float16x2``, by lane.
    """
    if isinstance(of := named_vector(dtype), Vector):
        from tilescale.compiler.ops.lanes_of import cast as of_lanes

        return of_lanes(value, of)
    dt = canonical(dtype)
    if isinstance(dt, Narrow):
        e = to_expr(value)
        return Value(const(e, "float32" if dt.is_float else "int32") if not is_expr(e) else value, dt)
    return convert(_truncated(value, dtype), canonical(dtype))


def _truncated(value: Any, dtype: Any) -> Any:
    return int(value) if isinstance(value, float) and "int" in canonical(dtype) else value


Cast = lambda dtype, value: cast(value, dtype)  # noqa: E731  # TVM's argument order, kept for kernels that use it


def if_then_else(condition: Any, a: Any, b: Any) -> Any:
    """``a`` where the condition holds, else ``b``; only the chosen one is evaluated."""
    test = to_expr(condition, "a condition")
    if not is_expr(test):
        return a if test else b
    return tirx.if_then_else(truth(test), *alike(a, b))


def alike(a: Any, b: Any) -> tuple[Any, Any]:
    """The two values of a choice as expressions of one dtype."""
    if _python(a, b):
        booleans = isinstance(a, bool) and isinstance(b, bool)
        dt = "float32" if isinstance(a, float) or isinstance(b, float) else "bool" if booleans else "int32"
        a, b = const(a, dt), const(b, dt)
    what = "a branch of T.if_then_else"
    a, b = to_expr(a, what), to_expr(b, what)
    for x, y in ((a, b), (b, a)):
        if type(x) is int and is_expr(y) and str(y.ty) == "bool":  # which has no such number
            a, b = (const(v, "int32") if v is x else v for v in (a, b))
    x, y, _ = same_dtype(a, b, what)
    return x, y


Select = if_then_else


def infinity(dtype: Any = "float32") -> Any:
    """Positive infinity of a floating dtype."""
    dt = canonical(dtype)
    if not dt.is_float or dt == "float8_e4m3fn":
        raise TileTypeError(f"{dt} has no infinity", loc=source.current(), hint=f"T.max_value({dt!r})")
    return const(_math.inf, dt) if not dt.startswith("float8") else convert(_math.inf, dt)


def max_value(dtype: Any) -> Any:
    """The greatest finite value of a dtype; of one of 4 bits a number of Python's."""
    dt = canonical(dtype)
    if isinstance(dt, Narrow):
        return RANGES[dt][1]
    if dt.is_float:
        return convert(GREATEST[dt], dt)
    return (
        const(True, dt) if dt == "bool" else const(2 ** (dt.bits - (0 if dt.startswith("u") else 1)) - 1, dt)
    )


def min_value(dtype: Any) -> Any:
    """The least finite value of a dtype; of one of 4 bits a number of Python's."""
    dt = canonical(dtype)
    if isinstance(dt, Narrow):
        return RANGES[dt][0]
    if dt.is_float:
        return convert(-GREATEST[dt], dt)
    return const(0, dt) if dt.startswith(("u", "b")) else const(-(2 ** (dt.bits - 1)), dt)


def _operator(op: str) -> Any:
    def call(a: Any, b: Any) -> Any:
        return binary(op, a, b)

    call.__doc__ = f"``a {op} b``."
    return call


floordiv, floormod = _operator("//"), _operator("%")
shift_left, shift_right = _operator("<<"), _operator(">>")
bitwise_and, bitwise_or, bitwise_xor = _operator("&"), _operator("|"), _operator("^")


def truncdiv(a: Any, b: Any) -> Any:
    """The integer quotient rounded toward zero, as in C."""
    return int(a / b) if _python(a, b) else tirx.truncdiv(as_expr(a), as_expr(b))


def truncmod(a: Any, b: Any) -> Any:
    """The remainder of :func:`truncdiv`, as in C."""
    return int(_math.fmod(a, b)) if _python(a, b) else tirx.truncmod(as_expr(a), as_expr(b))


def bitwise_not(x: Any) -> Any:
    """All bits turned; of a truth value its opposite."""
    e = to_expr(x)
    return not e if isinstance(e, bool) else ~e


def popcount(x: Any) -> Any:
    """How many bits are set."""
    e = to_expr(x)
    return tirx.popcount(e) if is_expr(e) else int(e).bit_count()


def clz(x: Any) -> Any:
    """How many zeros stand above the highest bit that is set (int32): all 32 or 64 of zero.

    Raises:
        TileTypeError: no integer of 32 or 64 bits.
    """
    dt = dtype_of(x)
    if "int" not in str(dt) or dt.bits not in (32, 64):
        raise TileTypeError(
            f"T.clz of {dt}", loc=source.current(), expected="an integer of 32 or 64 bits",
            hint='T.cast(x, "uint32")',
        )  # fmt: skip
    e = to_expr(x)
    return tirx.clz(e) if is_expr(e) else 32 - (int(e) & 0xFFFFFFFF).bit_length()


def reinterpret(a: Any, b: Any = None, *, dtype: Any = None) -> Any:
    """The bits of a value as another dtype of the same size: ``T.reinterpret(value, dtype)`` (or TVM's
    order). TVM's "handle", a pointer, is the value itself: T.attr alone takes one, and does not look at
    it."""
    from tilescale.compiler.builder.lanes import Lanes

    a, b, dtype = named_vector(a), named_vector(b), named_vector(dtype)
    for to, value in ((a, b), (b, a), (dtype, a)):
        if isinstance(to, Vector) or isinstance(value, Lanes) and to is not None:
            from tilescale.compiler.ops.lanes_of import reinterpret as of_lanes

            return of_lanes(value, to)
    if (b is None) == (dtype is None):
        raise TileTypeError("T.reinterpret of a value to no dtype, or to two", loc=source.current())
    if dtype is not None:
        if str(dtype) == "handle":
            return a
        b = dtype
    kind, value = (a, b) if isinstance(a, str) else (b, a)
    dt = canonical(kind)
    if (found := narrow_bits(dt, value)) is not None:
        return found
    e = as_expr(value)
    if canonical(str(e.ty)).bits != dt.bits:
        raise TileValueError(f"{e.ty} and {dt} have different sizes", loc=source.current())
    return tirx.reinterpret(str(dt), e)


def _elsewhere(mode: Any, word: str) -> bool:
    """Whether a rounding is not to nearest, and so ops/rounding.py's."""
    from tilescale.compiler.ops import rounding

    rounding.check(mode, word)
    return bool(mode != "rn")


def _directed(word: str, mode: str, *values: Any) -> Any:
    from tilescale.compiler.ops import rounding

    return rounding.directed(word, mode, *values)


def _alone(name: str, op: str, a: Any, b: Any) -> Any:
    """An operation that no target may take together with another one (a product and a sum as one FMA)."""
    if _python(a, b):
        return binary(op, a, b)
    x, y, dt = same_dtype(a, b, f"an argument of T.{name}")
    return ir.Call(f"ts.math.{name}", [x, y], ret_ty=ir.PrimType(dt)) if "float" in dt else binary(op, x, y)


def ieee_add(a: Any, b: Any, rounding_mode: str = "rn") -> Any:
    """a + b, correctly rounded, never contracted."""
    if _elsewhere(rounding_mode, "ieee_add"):
        return _directed("ieee_add", rounding_mode, a, b)
    return _alone("ieee_add", "+", a, b)


def ieee_sub(a: Any, b: Any, rounding_mode: str = "rn") -> Any:
    """a - b, correctly rounded, never contracted."""
    if _elsewhere(rounding_mode, "ieee_sub"):
        return _directed("ieee_sub", rounding_mode, a, b)
    return _alone("ieee_sub", "-", a, b)


def ieee_mul(a: Any, b: Any, rounding_mode: str = "rn") -> Any:
    """a * b, correctly rounded, never contracted."""
    if _elsewhere(rounding_mode, "ieee_mul"):
        return _directed("ieee_mul", rounding_mode, a, b)
    return _alone("ieee_mul", "*", a, b)


def ieee_fdiv(a: Any, b: Any, rounding_mode: str = "rn") -> Any:
    """a / b, correctly rounded."""
    if _elsewhere(rounding_mode, "ieee_fdiv"):
        return _directed("ieee_fdiv", rounding_mode, a, b)
    return binary("/", a, b, exact=True)


def ieee_sqrt(x: Any, rounding_mode: str = "rn") -> Any:
    """The square root, correctly rounded."""
    return ieee_fsqrt(x, rounding_mode)


def ieee_fsqrt(x: Any, rounding_mode: str = "rn") -> Any:
    """The square root, correctly rounded."""
    if _elsewhere(rounding_mode, "ieee_fsqrt"):
        return _directed("ieee_fsqrt", rounding_mode, x)
    return sqrt(x)


def ieee_frcp(x: Any, rounding_mode: str = "rn") -> Any:
    """1 / x, correctly rounded."""
    if _elsewhere(rounding_mode, "ieee_frcp"):
        return _directed("ieee_frcp", rounding_mode, x)
    return binary("/", 1.0, x, exact=True)


def ieee_frsqrt(x: Any) -> Any:
    """1 / sqrt(x)."""
    return rsqrt(x)


def __ldg(x: Any, index: Any = None) -> Any:
    """The element ``x`` of a tensor, or that at ``index`` of the tensor ``x``, by CUDA's and TileLang's word.
    A GPU reads tensors that a kernel does not write through the read-only cache anyway.

    Raises:
        TileTypeError: a tile, or an index into what is no tensor.
    """
    if index is not None and not isinstance(x, Buffer):
        raise TileTypeError(f"T.__ldg of {x} at {index}", loc=source.current(), expected="T.__ldg(A, i)")
    return to_expr(x if index is None else x[index], "what T.__ldg reads")


def ieee_fmaf(a: Any, b: Any, c: Any, rounding_mode: str = "rn") -> Any:
    """a * b + c, rounded once."""
    if _elsewhere(rounding_mode, "ieee_fmaf"):
        return _directed("ieee_fmaf", rounding_mode, a, b, c)
    x, y, _ = same_dtype(a, b, "an argument of T.ieee_fmaf")
    x, z, _ = same_dtype(x, c, "an argument of T.ieee_fmaf")
    y, z, dt = same_dtype(y, z, "an argument of T.ieee_fmaf")
    return ir.Call("ts.math.fma", [convert(x, dt), y, z], ret_ty=ir.PrimType(dt))


def likely(x: Any) -> Any:
    """A hint that a condition mostly holds; the value is the condition."""
    return to_expr(x, "a condition")
