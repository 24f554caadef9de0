"""Where a buffer of tile IR lies in a GPU kernel's thread IR."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tilescale.compiler.layout import Fragment, Piece, Shared
from tilescale.compiler.layout.shared import SWIZZLES
from tilescale.compiler.tvm_compat import tirx
from tilescale.packets import HEAD, words


@dataclass
class Global:
    """A parameter: flat, its extents and strides in elements, indexed in ``index`` (int32 where its size is
    known to be small)."""

    buf: Any
    shape: tuple[Any, ...]
    strides: tuple[Any, ...]
    index: str
    name: str

    def flat(self, at: list[Any]) -> Any:
        total: Any = tirx.IntImm(self.index, 0)
        for i, s in zip(at, self.strides, strict=True):
            total = total + widened(i, self.index) * widened(s, self.index)
        return total


@dataclass
class Box:
    """A box of packets (tilescale/packets.py), in the memory of whose rank it is: its words, and the number
    of this launch. Extents and strides are in packets."""

    buf: Any
    shape: tuple[Any, ...]
    strides: tuple[Any, ...]
    index: str
    name: str
    number: Any = None
    site: Any = None
    #: where a look at a packet says that it has not come; None where each is awaited
    late: Any = None
    #: packets have no marks; of those whether stores empty places
    dense: bool = False
    empties: bool = False

    def flat(self, at: list[Any]) -> Any:
        """The first word of a packet of this launch."""
        each = words(self.dense)
        size, word = widened(each, self.index), widened(0, self.index)
        for e in self.shape:
            size = size * widened(e, self.index)
        for i, s in zip(at, self.strides, strict=True):
            word = word + widened(i, self.index) * widened(s, self.index)
        half = widened(tirx.bitwise_and(self.number, tirx.IntImm("int32", 1)), self.index)
        return half * size + word * each + HEAD


@dataclass
class InShared:
    """A tile in the arena. ``base``: elements in front of this executor's own, where each executor has
    one."""

    buf: Any
    layout: Shared
    shape: tuple[int, ...]
    base: Any
    name: str

    def linear(self, at: list[Any]) -> Any:
        """The flat index in front of the swizzle, in elements: digits times strides."""
        return self.total(at, self.pieces)

    def flat(self, at: list[Any]) -> Any:
        """The flat index, in elements; the swizzle moves whole 16-byte chunks.

        What counts whole rows of the swizzle stands outside the XOR, which cannot reach it. Loops over rows
        then move one address by constants, where each row would need an address of its own."""
        bits = SWIZZLES[self.layout.swizzle]
        if not bits:
            total = self.linear(at)
        else:
            each = self.layout.bits // 8
            row, chunk = 128 // each, 16 // each
            width = chunk << bits
            within = [p for p in self.pieces if p.stride % width]
            whole = [p for p in self.pieces if p.stride % width == 0]
            low = self.total(at, within)
            if sum((p.extent - 1) * p.stride for p in within) < width:
                counted = [p for p in whole if p.stride % (row << bits)]
                lines = self.total(at, [replace(p, stride=p.stride // width) for p in counted])
                line = lines // (row // width)
            else:
                line = self.linear(at) // row
            total = self.total(at, whole) + (low ^ (line % (1 << bits) * chunk))
        return total if self.base is None else total + self.base

    @property
    def pieces(self) -> list[Piece]:
        return [p for axis in range(len(self.layout.shape)) for p in self.layout.pieces if p.axis == axis]

    def total(self, at: list[Any], pieces: list[Piece]) -> Any:
        """Digits of an index times their strides."""
        made: Any = tirx.IntImm("int32", 0)
        for p in pieces:
            assert p.axis is not None
            last = p.unit * p.extent >= self.layout.shape[p.axis]
            made = made + digit(at[p.axis], p.unit, p.extent, last) * p.stride
        return made


@dataclass
class Registers:
    """A fragment: an array of its slots in each thread."""

    buf: Any
    layout: Fragment
    shape: tuple[int, ...]
    name: str


@dataclass
class Private:
    """Memory of one iteration of a nest, row-major in its thread."""

    buf: Any
    shape: tuple[int, ...]
    name: str

    def flat(self, at: list[Any]) -> Any:
        total: Any = tirx.IntImm("int32", 0)
        for i, e in zip(at, self.shape, strict=True):
            total = total * e + widened(i, "int32")
        return total


#: parts of which an access has a flat index
Memory = Global | InShared | Private
Place = Memory | Registers | Box


def digit(index: Any, unit: int, extent: int, last: bool) -> Any:
    """``index // unit % extent``, without what changes nothing."""
    made = index if unit == 1 else index // unit
    return made if last else made % extent


def widened(value: Any, dtype: str) -> Any:
    if isinstance(value, int):
        return tirx.IntImm(dtype, value)
    if isinstance(value, tirx.IntImm):
        return tirx.IntImm(dtype, int(value.value))
    return value if str(value.ty) == dtype else tirx.Cast(dtype, value)
