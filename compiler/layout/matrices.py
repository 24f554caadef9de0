"""Stores of fragments by stmatrix (PTX ISA 9.0, "stmatrix"): a warp writes up to four 8 × 8 matrices of
16-bit elements at once.

The instruction takes of lane l two neighbours of row l / 4 of each matrix, which is how accumulators of mma
and wgmma lie, and from lanes 8q … 8q + 7 the addresses of matrix q's eight rows, 16 bytes each. So a nest
that stores one value an iteration into 16-bit shared memory, and whose loop has those digits in its lanes,
goes by matrices instead of pairs; where memory's rows are the fragment's columns, by ``.trans``.

Bank conflicts: a matrix is one wavefront if its rows lie in different banks, 16 bytes each. Under a swizzle
of 128 bytes eight rows have eight different chunks; under 64 or 32 bytes rows that share a chunk's number lie
in different halves or quarters of 128 bytes. Pairs of the same eight rows and 16 bytes are one wavefront as
well, so it is instructions and addresses that are saved: one for four.

A row is written by the lane that names it and not by those that hold it, which passes/insert_barriers.py has
to know (`writers`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tilescale.compiler.ir import numeric
from tilescale.compiler.ir.nests import Nest
from tilescale.compiler.ir.scales import WARP
from tilescale.compiler.ir.target import Target
from tilescale.compiler.layout.loops import in_registers, plain_index
from tilescale.compiler.layout.match import Loop, idle
from tilescale.compiler.layout.shared import Shared
from tilescale.compiler.tvm_compat import sym, tirx

#: rows of a matrix, and elements of a row
SIDE = 8
#: matrices of one instruction
MOST = 4


@dataclass
class Matrices:
    """A nest that stores by matrices. ``rows``, ``cols``: the loop's axes along the rows and columns of
    fragments; ``trans``: memory's rows run along ``rows``. ``bits``: factors of the slots' digits that count
    an instruction's matrices, the fastest first: (digit, factor)."""

    rows: int
    cols: int
    trans: bool
    bits: list[tuple[int, int]]

    @property
    def count(self) -> int:
        made = 1
        for _, n in self.bits:
            made *= n
        return made


def matrices(nest: Nest, loop: Loop | None, layout: Any, target: Target) -> Matrices | None:
    """How a nest goes by matrices into a tile of ``layout``; None where it does not."""
    s = nest.body
    if (
        not target.matrix_stores
        or loop is None
        or nest.alone
        or not isinstance(s, tirx.BufferStore)
        or not isinstance(layout, Shared)
    ):
        return None
    others = [a for a in nest.accesses if not a.node.same_as(s)]
    if (
        layout.bits != 16
        or len(s.indices) < 2
        or any(not in_registers(a.buffer) or a.mode != "read" for a in others)
    ):
        return None
    axes = _axes(loop)
    if axes is None or any(loop.shifts) or loop.fragment.first_thread % WARP:
        return None
    if any(
        n != reach and idle(loop, k, WARP) is None
        for k, (n, reach) in enumerate(zip(loop.extents, loop.fragment.shape, strict=True))
    ):
        return None  # padding, other than whole warps'
    rows, cols = axes
    last = _row_of(s.indices[-1], loop.vars)
    if last not in (rows, cols) or layout.vector(len(s.indices) - 1) < SIDE:
        return None
    if any(p.stride % SIDE for p in layout.pieces if not (p.axis == len(s.indices) - 1 and p.unit == 1)):
        return None
    bits, left = [], MOST
    for k in reversed(range(len(loop.digits) - 1)):
        n = min(left, loop.digits[k].extent & -loop.digits[k].extent)
        if n > 1:
            bits.append((k, n))
            left //= n
    return Matrices(rows, cols, last == rows, bits)


def writers(loop: Loop, made: Matrices) -> Any:
    """The thread that writes what each thread holds in each round of a loop, int array (threads, rounds): the
    lane that names the row."""
    threads, counters = np.arange(loop.fragment.threads)[:, None], dict(enumerate(loop._counters()))
    matrix, unit = np.zeros(1, np.int64), 1
    for k, n in made.bits:
        matrix, unit = matrix + counters[k] % n * unit, unit * n
    row = threads % 4 * 2 + counters[len(loop.digits) - 1] if made.trans else threads % WARP // 4
    return threads // WARP * WARP + SIDE * matrix + row


def _axes(loop: Loop) -> tuple[int, int] | None:
    """The loop's axes along rows and columns of 8 × 8 matrices; None where its lanes hold none. All lanes of
    a warp run, or none."""
    lanes = {p.stride: p for p in loop.thread_digits if p.stride < WARP}
    inner = loop.digits[-1] if loop.digits else None
    if loop.fragment.threads % WARP or set(lanes) != {1, 4} or inner is None or inner.axis is None:
        return None
    column, row = lanes[1], lanes[4]
    pair = inner.axis == column.axis and (inner.unit, inner.extent, inner.stride) == (1, 2, 1)
    if row.axis is None or row.axis == column.axis or (row.unit, row.extent) != (1, SIDE):
        return None
    return (row.axis, inner.axis) if pair and (column.unit, column.extent) == (2, 4) else None


def _row_of(e: Any, variables: Any) -> int | None:
    """Which variable an index is, plus a multiple of a row of a matrix; None where it is none."""
    found = plain_index(e, variables)
    if found is not None:
        return found[0] if found[0] >= 0 and found[1] % SIDE == 0 else None
    for k, v in enumerate(variables):
        rest = sym.Analyzer().simplify(e - v)
        known = sym.Analyzer().modular_set(rest)
        if not _mentions(rest, v) and int(known.coeff) % SIDE == 0 and int(known.base) % SIDE == 0:
            return k
    return None


def _mentions(e: Any, var: Any) -> bool:
    used = numeric.variables(e)
    return var in used or None in used
