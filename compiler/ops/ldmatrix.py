"""``T.ldmatrix``: the lanes of a warp load four matrices of 8 rows of 16 bytes from shared memory.

PTX ISA 9.0, "ldmatrix" (.x4): lane 8·m + r names row r of matrix m, and gets of each matrix a register: its
row lane // 4, there the lane % 4-th of four parts. With ``transposed`` the columns of the matrices are what
is named so, of numbers of 16 bits.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, ClassVar

import numpy as np

from tilescale.compiler.ir import source
from tilescale.compiler.ir.contexts import SimContext
from tilescale.compiler.ir.operations import Access, TileOp, register
from tilescale.compiler.ir.scales import WARP
from tilescale.compiler.ops.base import emit, is_tile, region
from tilescale.compiler.ops.mma_sync import each, registers, whole_warps
from tilescale.errors import TileTypeError
from tilescale.language.booleans import require_bools
from tilescale.language.dtypes import BITS

MATRICES, ROWS = 4, 8


def ldmatrix(src: Any, dst: Any, transposed: bool = False) -> None:
    """Each lane names a row of 16 bytes in shared memory, and gets what the instruction shares out of all the
    lanes' rows: operands of T.mma_sync.

    Args:
        src: the row's first element, ``tile[i, j]``, at a multiple of 16 bytes. dst: 16 bytes of the lane's
            own, a whole array of T.alloc_local or from an element on.
        transposed: of 16-bit numbers: matrices whose columns are registers' neighbours.

    Raises:
        TileSyntaxError: not at the scale of threads, or in T.Parallel. TileTypeError: no shared memory, no
            memory of each thread's own, two dtypes, numbers of other sizes. TileValueError: other extents,
            threads that make no whole warps.
    """
    loc = source.current()
    whole_warps("T.ldmatrix")
    require_bools(transposed=transposed)
    for name, value in (("the source", src), ("the destination", dst)):
        if not is_tile(value):
            raise TileTypeError(
                f"{name} of T.ldmatrix is {value!r}", loc=loc, expected="tile[i, j], and T.alloc_local memory"
            )
    dtype, held = (str(region(x, "an operand of T.ldmatrix").dtype) for x in (src, dst))
    bits = BITS.get(dtype, 0)
    if dtype != held or bits not in ((16,) if transposed else (8, 16)):
        raise TileTypeError(
            f"T.ldmatrix from {dtype} to {held}{', transposed' if transposed else ''}",
            loc=loc,
            expected="one dtype of 16 bits, or of 8 bits where it is not transposed",
        )
    count = MATRICES * each(dtype)
    row = region(src, "the source of T.ldmatrix", (count,))
    if row.buffer.scope != "shared":
        raise TileTypeError(
            f"the source of T.ldmatrix is {row.name}, which lies in {row.buffer.scope}",
            loc=loc,
            expected="a tile of T.alloc_shared",
        )
    into = registers("the destination of T.ldmatrix", dst, count)
    emit("ldmatrix", [row.ir(), into.ir()], {"transposed": int(transposed)})


def holder(lane: Any, slot: Any, n: int, transposed: bool) -> tuple[Any, Any]:
    """Who names the row that a lane's slot comes from, and where in it; ``n`` numbers a register. Of ints and
    of expressions alike."""
    matrix, part, line = slot // n * ROWS, lane % 4 * n + slot % n, lane // 4
    return (matrix + part, line) if transposed else (matrix + line, part)


@register
class LdMatrix(TileOp):
    """``ldmatrix(row, into)``. transposed: 1 where it is. All lanes of a warp come to it; it orders nothing
    but its own values."""

    name = "ldmatrix"
    attributes: ClassVar[tuple[str, ...]] = ("transposed",)
    waits = by_thread = True

    def effects(self, call: Any) -> list[Access]:
        return [Access(call.args[0], "read"), Access(call.args[1], "write")]

    def simulate(self, call: Any, cx: SimContext) -> Any:
        row, into = (cx.view(r, call) for r in call.args)
        site, n = cx.site(call, "T.ldmatrix"), each(row.dtype)
        transposed = bool(call.attrs["transposed"])

        def run(ex: Any) -> Generator[str, None, None]:
            lane = ex.linear % WARP
            mine = row.read(ex).reshape(-1).copy()
            rows = yield from ex.machine.exchange(ex, ex.linear // WARP, lane, WARP, mine, site)
            places = (holder(lane, s, n, transposed) for s in range(MATRICES * n))
            into.write(ex, np.array([rows[who][at] for who, at in places], mine.dtype))

        return run
