"""How much of a block's shared memory tiles take, before they have layouts."""

from __future__ import annotations

from math import prod
from typing import Any

from tilescale.compiler.layout.loops import bits_of
from tilescale.compiler.tvm_compat import structural_walk, tirx

#: bytes that swizzled tiles are aligned to, and take in whole
WHOLE = 1024
#: bytes of shared memory beside the tiles: barriers
BESIDE = 1024


def tile_bytes(body: Any) -> dict[Any, int]:
    """The bytes of each tile in shared memory, in units of ``WHOLE``; rows of numbers in less."""
    sizes: dict[Any, int] = {}

    def size(s: Any) -> None:
        shape = [int(e) for e in s.buffer.ty.shape]
        if s.buffer.ty.storage_scope.startswith("shared"):
            unit = WHOLE if len(shape) > 1 else 128
            sizes[s.buffer] = -(-prod(shape) * bits_of(s.buffer) // 8 // unit) * unit

    structural_walk(body, (tirx.AllocBuffer, size))
    return sizes
