"""Numbers of 4 bits (T.int4, T.uint4, T.float4_e2m1fn) in terms of bytes.

A tile holds each in 8 bits of a dtype that has all their values, so that whatever reads a tile needs to know
nothing of them; products are those of 8 bits, which hardware has where it has none of 4. What is stored into
a tile is rounded to one of their values. A tensor has two numbers a byte, the even one in the lower bits.

float4_e2m1fn has ±{0, 0.5, 1, 1.5, 2, 3, 4, 6}; larger values become ±6, as a NaN does (OCP Microscaling
Formats 1.0, section 5.3.3; PTX ISA, cvt with .satfinite).
"""

from __future__ import annotations

from typing import Any, NoReturn

from tilescale.compiler.builder import state as bld
from tilescale.compiler.builder.poison import Poison
from tilescale.compiler.builder.values import (
    Buffer,
    Region,
    Scalar,
    as_expr,
    compare,
    const,
    convert,
    float_function,
    resolved,
    to_expr,
)
from tilescale.compiler.ir import source
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.tvm_compat import ir, is_expr, tirx
from tilescale.errors import TileTypeError, TileValueError
from tilescale.language.dtypes import Narrow, dtype

GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Element(Scalar):
    """An element of a tensor of 4-bit numbers; the base of a tile of it where a tile is needed."""

    def __init__(self, buffer: Buffer, indices: list[Any]):
        self.buffer, self.indices = buffer, indices

    def load(self) -> Any:
        """Its value, in the dtype that tiles hold."""
        *outer, last = self.indices
        byte = tirx.BufferLoad(self.buffer.var, [*outer, tirx.floordiv(last, const(2, str(last.ty)))])
        return decoded(byte, tirx.floormod(last, const(2, str(last.ty))), dtype_of_tensor(self.buffer))

    def __repr__(self) -> str:
        return f"{self.buffer.name}[{', '.join(map(str, self.indices))}]"


class Value(Scalar):
    """A value that was converted to a dtype of 4 bits (T.cast): it knows its bits. ``exact``: it is one of
    theirs, in the dtype that tiles hold."""

    def __init__(self, value: Any, dt: Narrow, exact: bool = False):
        self.value, self.dtype = value if exact else rounded(value, dt), dt

    def load(self) -> Any:
        return self.value

    def __repr__(self) -> str:
        return f"T.{self.dtype}({self.value})"


def refuse_part(part: Region) -> NoReturn:
    raise TileTypeError(
        f"{part.name} is a tensor of {part.dtype}, two numbers a byte",
        loc=source.current(),
        expected="T.copy of a part of it, or an element read",
        hint=f"T.copy({part}, tile), and a tile of T.{part.dtype}",
    )


def dtype_of_tensor(buffer: Buffer) -> Narrow:
    """The dtype of a tensor, or a tile, of 4-bit numbers."""
    assert isinstance(buffer.dtype, Narrow)
    return buffer.dtype


def of_load(value: Any) -> Narrow | None:
    """The dtype of 4 bits of the tile that an expression loads from, if it is such a load."""
    if isinstance(value, ir.TensorLoad):
        buffer = bld.current().buffers.get(value.source)
        if buffer is not None and isinstance(buffer.dtype, Narrow):
            return buffer.dtype
    return None


def narrow_bits(dt: dtype, value: Any) -> Any:
    """T.reinterpret from or to 4 bits, which lie in the lower half of a byte; None where none are there.

    Raises:
        TileTypeError: a dtype that is no byte on the other side.
    """
    of = value.dtype if isinstance(value, Value) else of_load(value)
    if of is None and not isinstance(dt, Narrow):
        return None
    e = to_expr(value)
    other = str(dt) if of is not None else str(e.ty)
    if other not in ("uint8", "int8"):
        raise TileTypeError(
            f"T.reinterpret of {of or e.ty} as {dt}",
            loc=source.current(),
            expected="T.uint8 on the other side, whose lower 4 bits are those of the number",
        )
    if of is not None:
        return tirx.Cast(str(dt), encoded(e, of))
    assert isinstance(dt, Narrow)
    return Value(decoded(e, 0, dt), dt, exact=True)


def rounded(value: Any, dt: Narrow) -> Any:
    """A value as one of the dtype's, in the dtype that tiles hold: integers keep their lower 4 bits, floats
    round to nearest even (to integers they truncate).

    Raises:
        TileValueError: a Python number that is no value of the dtype.
    """
    if isinstance(value, Poison):
        value.refuse()
    if isinstance(value, Value) and value.dtype == dt:
        return value.value
    if isinstance(value, Element) and value.buffer.dtype == dt:
        return value.load()
    e = to_expr(value, "a stored value")
    if not is_expr(e):
        _require_value(e, dt)
        return convert(e, dt.held)
    if of_load(e) == dt:
        return e
    if dt.is_float:
        return tirx.Cast(ir.PrimType(str(dt.held)), _to_grid(tirx.Cast("float32", e)))
    low = tirx.bitwise_and(tirx.Cast("int32", e), const(15, "int32"))
    return tirx.Cast(str(dt.held), _signed(low) if dt == "int4" else low)


def _require_value(value: Any, dt: Narrow) -> None:
    low, high = (-8, 7) if dt == "int4" else (0, 15)
    if dt.is_float:
        fits = abs(float(value)) in GRID
    else:
        fits = float(value).is_integer() and low <= value <= high
    if not fits:
        raise TileValueError(
            f"{value} is no value of {dt}",
            loc=source.current(),
            expected="± one of " + ", ".join(f"{g:g}" for g in GRID) if dt.is_float else f"{low} to {high}",
        )


def _to_grid(x: Any) -> Any:
    """A float32 as the nearest value of float4_e2m1fn; halfway between two the one whose last bit is 0, which
    is the even multiple of the distance between them."""
    size = tirx.Select(compare("<", tirx.abs(x), 6.0), tirx.abs(x), const(6.0, "float32"))  # NaN: 6
    step = tirx.Select(
        compare("<", size, 2.0),
        const(0.5, "float32"),
        tirx.Select(compare("<", size, 4.0), const(1.0, "float32"), const(2.0, "float32")),
    )
    inverse = tirx.Select(
        compare("<", size, 2.0),
        const(2.0, "float32"),
        tirx.Select(compare("<", size, 4.0), const(1.0, "float32"), const(0.5, "float32")),
    )
    count = ir.Call("ts.math.round", [size * inverse], ret_ty=ir.PrimType("float32"))
    return float_function("copysign", count * step, x)


def _signed(low: Any) -> Any:
    """4 bits of two's complement as an int32."""
    return tirx.bitwise_xor(low, const(8, "int32")) - const(8, "int32")


def decoded(byte: Any, which: Any, dt: Narrow) -> Any:
    """The ``which``-th number (0: the lower bits) of a byte, in the dtype that tiles hold."""
    bits = tirx.Cast("int32", tirx.Cast("uint8", byte))
    shift = as_expr(which, "int32") * const(4, "int32")
    low = tirx.bitwise_and(tirx.shift_right(bits, tirx.Cast("int32", shift)), const(15, "int32"))
    if not dt.is_float:
        return tirx.Cast(str(dt.held), _signed(low) if dt == "int4" else low)
    # Exponents differ by 6, so that 1 and above have the bits of e4m3 two places on; 0.5 is normal there.
    size = tirx.bitwise_and(low, const(7, "int32"))
    normal = tirx.shift_left(size + const(12, "int32"), const(2, "int32"))
    small = tirx.Select(compare("==", size, 0), const(0, "int32"), const(0x30, "int32"))
    made = tirx.Select(compare("<", size, 2), small, normal)
    sign = tirx.shift_left(tirx.bitwise_and(low, const(8, "int32")), const(4, "int32"))
    return tirx.reinterpret(str(dt.held), tirx.Cast("uint8", tirx.bitwise_or(made, sign)))


def encoded(value: Any, dt: Narrow) -> Any:
    """The 4 bits, as an int32, of a value in the dtype that tiles hold."""
    if not dt.is_float:
        return tirx.bitwise_and(tirx.Cast("int32", value), const(15, "int32"))
    bits = tirx.Cast("int32", tirx.reinterpret("uint8", value))
    size = tirx.bitwise_and(bits, const(0x7F, "int32"))
    normal = tirx.shift_right(size, const(2, "int32")) - const(12, "int32")
    small = tirx.Select(compare("==", size, 0), const(0, "int32"), const(1, "int32"))
    made = tirx.Select(compare("<", size, 0x38), small, normal)
    sign = tirx.shift_right(tirx.bitwise_and(bits, const(0x80, "int32")), const(4, "int32"))
    return tirx.bitwise_or(made, sign)


def halved(index: Any, what: str) -> Any:
    """Half of a column's number.

    Raises:
        TileTypeError: it may be odd, and two numbers share a byte.
    """
    e = as_expr(index)
    if constant(resolved(tirx.floormod(e, const(2, str(e.ty))))) != 0:
        raise TileTypeError(
            f"{what} is {index}, which may be odd",
            loc=source.current(),
            expected="an even number: two numbers of 4 bits share a byte",
        )
    known = constant(e)
    return known // 2 if known is not None else tirx.floordiv(e, const(2, str(e.ty)))
