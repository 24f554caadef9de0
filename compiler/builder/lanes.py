"""Vectors of a thread while a kernel is traced (ops/lanes_of.py has the words)."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.builder.held import held
from tilescale.compiler.builder.values import Buffer, binary, index_expr
from tilescale.compiler.ir import source
from tilescale.compiler.ir.numbers import constant
from tilescale.errors import TileTypeError, TileValueError
from tilescale.language.dtypes import dtype


def _refuse(self: Any, *_: Any) -> Any:
    raise TileTypeError(
        f"{self} is a vector, and no operand",
        loc=source.current(),
        expected="a scalar",
        hint="T.add2 and its like of vectors of two; T.extract_lane(v, k) for a lane",
    )


class Lanes:
    """A value of several lanes, each one a scalar that is computed already."""

    def __init__(self, dt: dtype, values: list[Any]):
        self.dtype, self.values = dt, tuple(values)

    def __str__(self) -> str:
        return f"{self.dtype}x{len(self.values)}"

    __repr__ = __str__
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __neg__ = __abs__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __bool__ = __iter__ = _refuse
    __hash__ = object.__hash__


class Ramp:
    """``T.Ramp(base, stride, lanes)``: the indices base, base + stride, …, of which ``A[ramp]`` is a vector.

    Raises:
        TileValueError: lanes that are not 2, 4 or 8.
    """

    def __init__(self, base: Any, stride: Any, lanes: int):
        count = constant(lanes)
        if count not in (2, 4, 8):
            raise TileValueError(f"T.Ramp of {lanes} lanes", loc=source.current(), expected="2, 4 or 8")
        first, step = held(index_expr(base), "base"), held(index_expr(stride), "stride")
        self.indices = [binary("+", first, binary("*", step, k)) for k in range(count)]


def is_ramp(items: tuple[Any, ...]) -> bool:
    """Whether an index names a vector.

    Raises:
        TileTypeError: on another axis than the last one.
    """
    if any(isinstance(i, Ramp) for i in items[:-1]):
        raise TileTypeError("T.Ramp on an axis before the last", loc=source.current(), expected="A[i, ramp]")
    return bool(items) and isinstance(items[-1], Ramp)


def load(buffer: Buffer, items: tuple[Any, ...]) -> Lanes:
    """``A[…, ramp]``."""
    at = items[-1].indices
    places = [(*items[:-1], i) for i in at]
    return Lanes(buffer.dtype, [held(buffer[p], "lane") for p in places])


def stored(buffer: Buffer, items: tuple[Any, ...], value: Any) -> bool:
    """``A[…, ramp] = v``, ``A[…, i:i + 4] = v``; False of an assignment without vectors.

    Raises:
        TileTypeError: another dtype, or other extents than the vector's.
    """
    if not is_ramp(items) and not isinstance(value, Lanes):
        return False
    if not isinstance(value, Lanes):
        raise TileTypeError(
            f"{value} is assigned to several elements of {buffer.name}",
            loc=source.current(),
            expected="a vector, as T.float32x2(a, b)",
        )
    last = items[-1]
    if isinstance(last, Ramp):
        places = [(*items[:-1], i) for i in last.indices]
    elif not any(isinstance(i, slice) for i in items):
        places = []
    else:
        part = buffer[items]
        first = part.mins[-1]
        places = [(*part.mins[:-1], binary("+", first, k)) for k in range(constant(part.extents[-1]) or 0)]
        if any(constant(e) != 1 for e in part.extents[:-1]):
            places = []
    if len(places) != len(value.values) or buffer.dtype != value.dtype:
        raise TileTypeError(
            f"{value} is assigned to a part of {buffer.name}, of {buffer.dtype}",
            loc=source.current(),
            expected=f"{len(value.values)} neighbours of its last axis, of {value.dtype}",
            hint="T.reinterpret(v, T.float32x4) for the bits of another dtype",
        )
    for at, one in zip(places, value.values, strict=True):
        buffer.store(at, one)
    return True
