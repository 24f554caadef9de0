"""Products of warpgroups on the emulated GPU: where their operands lie in shared memory, and what they
are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilescale.compiler.emulator.copies import EmulationError
from tilescale.compiler.emulator.maps import swizzled
from tilescale.compiler.sim import numerics, tiles

SWIZZLE_OF = {1: 128, 2: 64, 3: 32}


@dataclass
class Product:
    """A product under way. Operands in shared memory: descriptor, rows, whether they are stored across."""

    key: tuple[int, int, int]
    a: Any
    b: tuple[int, int, bool]
    keep: bool
    seen: tuple[Any, Any]
    dtypes: tuple[str, str]
    sums: str
    block: Any
    #: where the numbers of a left operand that keeps two in four belong, (64, words), from registers; None:
    #: it is whole
    places: Any = None
    asked: Any = None
    #: where each operand lies in shared memory, once somebody has asked
    begins: dict[int, Any] = field(default_factory=dict)

    def reads(self, which: int) -> Any:
        """The first byte of each element of an operand."""
        if which not in self.begins:
            self.begins[which] = operand(self, which)
        return self.begins[which]

    def reach(self, which: int) -> int:
        """Bytes of a row of an operand in shared memory that an instruction reads."""
        return 64 if which and self.places is not None else 32

    @property
    def size(self) -> int:
        """Bytes of an operand's element."""
        return int(numerics.storage(self.dtypes[0]).itemsize)

    @property
    def wide(self) -> Any:
        return np.float64 if self.sums == "float32" else np.int64


def in_memory(p: Product) -> tuple[int, ...]:
    """Which operands of a product lie in shared memory."""
    return (1,) if isinstance(p.a, Held) else (0, 1)


def factors(stored: Any, dtype: str) -> Any:
    """What tensor cores multiply: float32 is cut to tf32."""
    return tiles.tf32(stored) if dtype == "float32" else numerics.decode(stored, dtype)


def accumulates(d: Any, sums: str, name: str) -> None:
    """
    Raises:
        EmulationError: an accumulator has another dtype than its instruction writes.
    """
    if d.memory.data.dtype != sums:
        raise EmulationError(f"{name} writes {sums}, and its accumulator is of {d.memory.data.dtype}")


def operand(p: Product, which: int) -> Any:
    """The first byte of each element of an operand, 32 bytes of each row (64 beside one that keeps two in
    four), by its descriptor (PTX ISA, "Matrix Descriptor Format", "Strides"). Across rows there are 16-bit
    elements alone."""
    descriptor, rows, across = p.b if which or isinstance(p.a, Held) else p.a
    start, leading, stride = (descriptor >> s & 0x3FFF for s in (0, 16, 32))
    width = SWIZZLE_OF.get(descriptor >> 62)
    if width is None:
        raise EmulationError("a matrix descriptor without a swizzle")
    r, k = np.indices((rows, p.reach(which) // p.size))
    if not across and width < p.reach(which):
        raise EmulationError("a product reads more of a row than its swizzle has")
    if across:
        if p.size != 2:
            raise EmulationError(f"a product of {p.dtypes} whose operands do not run along k")
        wide = width // 2
        address = r // wide * (leading << 4) + r % wide * 2 + k // 8 * (stride << 4) + k % 8 * width
    else:
        address = r // 8 * (stride << 4) + r % 8 * width + k * p.size
    return swizzled((start << 4) + address, width)


@dataclass
class Held:
    """A left operand in registers: lanes and slots of its elements, 64 rows of a step of k."""

    registers: Any
    lanes: Any
    slots: Any
