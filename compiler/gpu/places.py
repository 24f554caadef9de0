"""Where a buffer of tile IR lies in a GPU kernel's thread IR."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilescale.compiler.layout import Fragment, Shared
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
        total: Any = tirx.IntImm("int32", 0)
        for axis in range(len(at)):
            digits = [p for p in self.layout.pieces if p.axis == axis]
            for p in digits:
                total = (
                    total
                    + digit(at[axis], p.unit, p.extent, last=p.unit * p.extent >= self.layout.shape[axis])
                    * p.stride
                )
        return total

    def flat(self, at: list[Any]) -> Any:
        """The flat index, in elements; the swizzle moves whole 16-byte chunks."""
        total = self.linear(at)
        bits = SWIZZLES[self.layout.swizzle]
        if bits:
            each = self.layout.bits // 8
            row, chunk = 128 // each, 16 // each
            total = total ^ (total // row % (1 << bits) * chunk)
        return total if self.base is None else total + self.base


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
