"""Vectors of a thread while a kernel is traced (ops/lanes_of.py has the words)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tilescale.compiler.builder.held import held
from tilescale.compiler.builder.values import Buffer, Region, binary, const, index_expr
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


class LanesOf(Lanes):
    """An element of a tensor or a tile of vectors: its lanes as they are now, and where they lie, as the base
    of a tile (T.copy)."""

    def __init__(self, tile: VectorTile, indices: list[Any]):
        self.tile, self.indices = tile, indices
        places = [(*indices, k) for k in range(tile.count)]
        super().__init__(tile.of.dtype, [held(tile.of[at], "lane") for at in places])


class VectorTile(Buffer):
    """A tensor or a tile of vectors: ``of`` has their lanes, as its last axis."""

    def __init__(self, of: Buffer, vector: Any):
        self.of, self.count = of, vector.count
        super().__init__(of.var, of.name, of.shape[:-1], of.dtype, of.scope, of.kind)
        self.dtype = vector

    @property
    def name(self) -> str:
        return self.of.name

    @name.setter
    def name(self, value: str) -> None:
        self.of.name = value

    def whole(self) -> Region:
        return replace(self.of.whole(), buffer=self)

    def _lanes_of(self, index: Any) -> tuple[Any, ...] | None:
        """The indices of one vector; None of a part.

        Raises:
            TileTypeError: several vectors by T.Ramp.
        """
        items = index if isinstance(index, tuple) else (index,)
        self._check_count(items)
        if any(isinstance(i, Ramp) for i in items):
            raise TileTypeError(
                f"T.Ramp as an index of {self.name}, of {self.dtype}",
                loc=source.current(),
                expected="one vector: an index on each axis",
            )
        whole = len(items) == self.ndim and not any(isinstance(i, slice) or i is Ellipsis for i in items)
        return items if whole else None

    def __getitem__(self, index: Any) -> Any:
        items = self._lanes_of(index)
        if items is None:
            part = index if isinstance(index, tuple) else (index,)
            part = part if any(i is Ellipsis for i in part) else (*part, ...)
            lanes = (*part, slice(None))
            return replace(self.of[lanes], buffer=self)
        return LanesOf(self, [held(index_expr(i), "at") for i in items])

    def __setitem__(self, index: Any, value: Any) -> None:
        items = self._lanes_of(index)
        if items is None:
            super().__setitem__(index, value)
            return
        made = value.lanes() if hasattr(value, "lanes") else value
        if not isinstance(made, Lanes) or made.dtype != self.of.dtype or len(made.values) != self.count:
            raise TileTypeError(
                f"{value} is assigned to an element of {self.name}",
                loc=source.current(),
                expected=f"a vector, {self.dtype!r}",
                hint=f"{self.dtype!r}(…) of its lanes' values, or of one value for all",
            )
        at = [held(index_expr(i), "at") for i in items]
        for k, one in enumerate(made.values):
            self.of.store((*at, k), one)


def scalars(value: Any, alone: bool) -> Any:
    """An operand of vectors as one of scalars: a tensor, a tile, a part of one, or the element that a tile
    begins at (``alone``: that is meant itself); anything else as it is."""
    if isinstance(value, VectorTile):
        return value.of
    if isinstance(value, Region) and isinstance(value.buffer, VectorTile):
        return replace(value, buffer=value.buffer.of)
    if not isinstance(value, LanesOf):
        return value
    of, at = value.tile.of, (*value.indices, const(0, "int32"))
    extents = (*(1 for _ in value.indices), value.tile.count)
    return Region(of, at, extents, (*(True for _ in value.indices), False)) if alone else of.read(list(at))


def vector_of(value: Any) -> Any:
    """The vectors that an operand is of; None of scalars."""
    if isinstance(value, LanesOf):
        return value.tile.dtype
    held_by = value.buffer if isinstance(value, Region) else value
    return held_by.dtype if isinstance(held_by, VectorTile) else None


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
