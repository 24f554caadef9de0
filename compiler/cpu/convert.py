"""Conversions between all dtypes, as scalar expressions of integer and float arithmetic that vectorise.

Three forms of a value:

- *storage*: what lies in memory. bf16 lies in uint16, fp8 and bool in uint8, the others in their own dtype.
- *compute*: what expressions are made of. fp16, bf16 and fp8 are float32, all others their own dtype.
- a *rounded* compute value, representable in its dtype: what `cast` and `load` return.

Rounding is to nearest, ties to even. Out of range: fp16, bf16 and e5m2 become infinite; e4m3fn has no
infinity and becomes NaN (from 464 upward; 448 is its largest), as OCP's 8-bit format and ml_dtypes have it.
Float to integer truncates toward zero, saturates, and takes NaN to 0, as PTX ``cvt.rzi`` does. Integers reach
the small floats through float32, as in PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilescale.compiler.cpu.expr import (
    bits,
    dtype_of,
    is_nan,
    let,
    lit,
    native_cast,
    not_equal,
    select,
    wrapped,
)
from tilescale.compiler.cpu.tile import Buf, Expr, Stmt
from tilescale.compiler.tvm_compat import tirx, tvm
from tilescale.errors import TileTypeError

FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
INTS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
DTYPES = (*FLOATS, *INTS, "bool")
ALIASES = {
    "e4m3": "float8_e4m3fn",
    "float8_e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
    "fp8": "float8_e4m3fn",
}
_STORAGE = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8", "bool": "uint8"}


@dataclass(frozen=True)
class _Float8:
    """A one-byte format: where its exponent sits, and its codes for overflow and NaN."""

    mantissa: int
    bias: int
    overflow: int
    nan: int


_FP8 = {"float8_e4m3fn": _Float8(3, 7, 0x7F, 0x7F), "float8_e5m2": _Float8(2, 15, 0x7C, 0x7F)}


def canonical(dtype: str) -> str:
    """The full name of a dtype.

    Raises:
        TileTypeError: unknown dtype.
    """
    name = ALIASES.get(dtype, dtype)
    if name not in DTYPES:
        raise TileTypeError(
            f"dtype {dtype!r} is not supported on the cpu target", expected="one of " + ", ".join(DTYPES)
        )
    return name


def storage_dtype(dtype: str) -> str:
    """What a buffer of ``dtype`` is declared as at thread IR."""
    name = canonical(dtype)
    return _STORAGE.get(name, name)


def compute_dtype(dtype: str) -> str:
    """What expressions over ``dtype`` are computed in."""
    name = canonical(dtype)
    return "float32" if name in FLOATS and name not in ("float64", "float32") else name


def is_float(dtype: str) -> bool:
    return canonical(dtype) in FLOATS


def load(buf: Buf, index: Expr | int, dtype: str) -> Expr:
    """The element as a compute value (exact)."""
    return decode(tirx.BufferLoad(buf, [index]), dtype)


def store(buf: Buf, index: Expr | int, value: Expr, dtype: str) -> Stmt:
    """Stores a compute value (float64 too for the small floats), rounding it to ``dtype``."""
    return tirx.BufferStore(buf, encode(value, dtype), [index])


def cast(value: Expr, src: str, dst: str, *, rounded: bool = True) -> Expr:
    """A compute value of ``src`` as a rounded compute value of ``dst``. ``rounded``: the value is one that
    ``src`` can hold."""
    src, dst = canonical(src), canonical(dst)
    if src == dst:
        return value
    if dst == "bool":
        return let(value, lambda v: not_equal(v, lit(0, dtype_of(v))))
    if src == "bool":
        return select(value, lit(1, compute_dtype(dst)), lit(0, compute_dtype(dst)))
    if dst in INTS:
        return _float_to_int(value, dst) if src in FLOATS else native_cast(value, dst)
    if dst in ("float64", "float32"):
        return native_cast(value, dst)
    if rounded and _holds(dst, src):
        return value
    return decode(encode(value, dst), dst)


def _holds(wide: str, narrow: str) -> bool:
    """Whether every value of ``narrow`` is one of ``wide`` (a cast between them is then nothing at all)."""
    return {
        "float16": narrow in ("float8_e4m3fn", "float8_e5m2"),
        "bfloat16": narrow in ("float8_e4m3fn", "float8_e5m2"),
    }.get(wide, False)


def decode(stored: Expr, dtype: str) -> Expr:
    """Storage to compute, exact."""
    dtype = canonical(dtype)
    if dtype == "bool":
        return tirx.NE(stored, lit(0, "uint8"))
    if dtype == "float16":
        return native_cast(stored, "float32")
    if dtype == "bfloat16":
        return bits(native_cast(stored, "uint32") << lit(16, "uint32"), "float32")
    if dtype == "float8_e5m2":  # e5m2 is the upper byte of an fp16
        return native_cast(bits(native_cast(stored, "uint16") << lit(8, "uint16"), "float16"), "float32")
    if dtype == "float8_e4m3fn":
        return let(native_cast(stored, "uint16"), _decode_e4m3)
    return stored


def _decode_e4m3(byte: Expr) -> Expr:
    """Read as an fp16 the fields mean 2^-8 of the value (bias 7, not 15), subnormals included; 0x7f is
    NaN."""

    def k(v: int) -> Expr:
        return lit(v, "uint16")

    half = ((byte & k(0x80)) << k(8)) | ((byte & k(0x7F)) << k(7))
    value = native_cast(bits(half, "float16"), "float32") * lit(256.0, "float32")
    return select(tirx.EQ(byte & k(0x7F), k(0x7F)), bits(lit(0x7FC00000, "uint32"), "float32"), value)


def encode(value: Expr, dtype: str) -> Expr:
    """Compute to storage, rounding to nearest even."""
    dtype = canonical(dtype)
    if dtype == "bool":
        return native_cast(value, "uint8")
    if dtype in ("float64", "float32") or dtype in INTS:
        return native_cast(value, dtype)
    source = dtype_of(value)
    if source == "float64":
        value = _round_to_odd(value)
    elif source != "float32":
        value = native_cast(value, "float32")
    if dtype == "float16":
        return native_cast(value, "float16")
    if dtype == "bfloat16":
        return let(bits(value, "uint32"), _encode_bf16)
    return let(bits(value, "uint32"), lambda u: _encode_fp8(u, _FP8[dtype]))


def _k(v: int) -> Expr:
    return lit(v, "uint32")


def _round_to_odd(value: Expr) -> Expr:
    """float64 → float32 by truncation with a sticky last bit: rounding the result once more to a narrower
    format (at least two bits narrower) is then the correct rounding of the float64 (Boldo and Melquiond,
    "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd", IEEE Trans.
    Computers 57(4), 2008)."""

    def fix(wide: Expr) -> Expr:
        def adjust(near: Expr) -> Expr:
            back, u = native_cast(near, "float64"), bits(near, "uint32")
            grown = tirx.GT(tirx.abs(back), tirx.abs(wide))
            odd = select(grown, u - _k(1), u) | _k(1)
            return select(tirx.LT(back, wide) | tirx.GT(back, wide), bits(odd, "float32"), near)

        return let(native_cast(wide, "float32"), adjust)

    return let(value, fix)


def _encode_bf16(u: Expr) -> Expr:
    rounded = (u + _k(0x7FFF) + ((u >> _k(16)) & _k(1))) >> _k(16)
    quiet = (u >> _k(16)) | _k(0x40)
    nan = tirx.GT(u & _k(0x7FFFFFFF), _k(0x7F800000))
    return native_cast(select(nan, quiet, rounded), "uint16")


def _encode_fp8(u: Expr, fmt: _Float8) -> Expr:
    """Normal results round on the integer bits; subnormal ones by adding a power of two whose last place is
    theirs."""
    shift = 23 - fmt.mantissa
    smallest_normal = (127 + 1 - fmt.bias) << 23
    magic = (127 + 23 + 1 - fmt.bias - fmt.mantissa) << 23

    def with_magnitude(m: Expr) -> Expr:
        normal = (
            m - _k((127 - fmt.bias) << 23) + _k((1 << (shift - 1)) - 1) + ((m >> _k(shift)) & _k(1))
        ) >> _k(shift)
        tiny = bits(bits(m, "float32") + bits(_k(magic), "float32"), "uint32") - _k(magic)
        code = tirx.min(normal, _k(fmt.overflow))
        code = select(tirx.LT(m, _k(smallest_normal)), tiny, code)
        code = select(tirx.GT(m, _k(0x7F800000)), _k(fmt.nan), code)
        return native_cast(code | ((u >> _k(24)) & _k(0x80)), "uint8")

    return let(u & _k(0x7FFFFFFF), with_magnitude)


def _float_to_int(value: Expr, dst: str) -> Expr:
    """Truncates, saturates, takes NaN to 0. LLVM's own conversion is undefined out of range, its saturating
    one is scalar."""
    width, signed = tvm.DataType(dst).bits, dst.startswith("int")
    low = -(2 ** (width - 1)) if signed else 0
    # The first value above the range: a power of two, so exact in float.
    top = 2 ** (width - 1) if signed else 2**width
    # x86 converts vectors to int32 and int64 at full speed; narrower ones are cut out of an int32.
    through = dst if width >= 32 else "int32"
    if isinstance(value, tirx.FloatImm):
        known = float(value.value)
        return wrapped(0 if known != known else int(min(max(known, low), top - 1)), dst)

    def clamp(x: Expr) -> Expr:
        dtype = dtype_of(x)
        inside = native_cast(native_cast(x, through), dst)
        result = select(tirx.GE(x, lit(float(top), dtype)), lit(top - 1, dst), inside)
        result = select(tirx.LE(x, lit(float(low), dtype)), lit(low, dst), result)
        return select(is_nan(x), lit(0, dst), result)

    return let(value, clamp)
