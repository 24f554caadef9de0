"""Gives every tile of the block a layout. On the CPU: row-major, rows padded by a cache line where they would
all fall into the same few cache sets (a multiple of 2 KiB from row to row: 64 sets of 64 bytes hold 4 KiB).

Where a target has layouts to choose among (swizzles, fragments), its solver stands here; the IR stays as it
is.
"""

from __future__ import annotations

from typing import Any

from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.layout import Strided
from tilescale.compiler.tvm_compat import structural_walk, tirx
from tilescale.language.dtypes import BITS

ALIASING_BYTES = 2048
LINE_BYTES = 64


def layouts(program: TileProgram) -> TileProgram:
    """The program with ``program.layouts``: a layout for each allocated tile."""
    allocated: list[Any] = []
    structural_walk(program.func.body, (tirx.AllocBuffer, lambda s: allocated.append(s.buffer)))
    viewed: set[Any] = set()
    structural_walk(program.func.body, (tirx.DeclBuffer, lambda s: viewed.add(s.data.args[0])))
    chosen: dict[Any, Strided] = {}
    for var in allocated:
        shape = tuple(int(e) for e in var.ty.shape)
        dt = str(getattr(var.ty.dtype, "dtype", var.ty.dtype))
        row = shape[-1] * BITS[dt] // 8
        rows = len(shape) > 1 and shape[-2] > 1
        # a view reads the same memory in row-major order without gaps, so what is viewed has none
        pad = LINE_BYTES * 8 // BITS[dt] if rows and row % ALIASING_BYTES == 0 and var not in viewed else 0
        chosen[var] = Strided.row_major(shape, pad)
    program.layouts = chosen
    return program
