"""How much of a block's shared memory tiles take, before they have layouts."""

from __future__ import annotations

from math import prod
from typing import Any

from tilescale.compiler.ir.holders import holders
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.layout.loops import bits_of

#: bytes that swizzled tiles are aligned to, and take in whole
WHOLE = 1024
#: bytes of shared memory beside the tiles: barriers
BESIDE = 1024


def tile_bytes(program: TileProgram) -> dict[Any, int]:
    """The bytes of each tile in shared memory, of all executors that have one, in units of ``WHOLE``; rows of
    numbers in less."""
    sizes: dict[Any, int] = {}
    for buffer, who in holders(program).items():
        shape = [int(e) for e in buffer.ty.shape]
        unit = WHOLE if len(shape) > 1 else 128
        sizes[buffer] = -(-prod(shape) * bits_of(buffer) // 8 // unit) * unit * len(who)
    return sizes
