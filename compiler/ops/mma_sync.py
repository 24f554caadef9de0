"""``T.mma_sync``: a warp's product of 16 × 8, of which each lane gives registers of its own.

PTX ISA 9.0, "Matrix Fragments for mma.m16n8k16 with floating point type" and "… for mma.m16n8k32": lane
4·g + q has of A the rows g and g + 8, of B the column g, of D the rows g and g + 8 of the columns 2·q and
2·q + 1. A register has ``each`` neighbours along k; the other half of k lies in registers behind.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np

from tilescale.compiler.builder import state as bld
from tilescale.compiler.builder.values import Region
from tilescale.compiler.ir import source
from tilescale.compiler.ir.contexts import SimContext
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.operations import Access, TileOp, register
from tilescale.compiler.ir.scales import WARP
from tilescale.compiler.ops.base import emit, is_tile, region
from tilescale.compiler.ops.shuffle import in_threads
from tilescale.errors import TileTypeError, TileValueError
from tilescale.language.dtypes import BITS

_BYTES = ("int8", "uint8")
#: a lane's sums of one product
SUMS = 4


def each(dtype: str) -> int:
    """Numbers in a register of 32 bits."""
    return 32 // BITS[dtype]


def has_product(a: str, b: str, c: str) -> bool:
    """Whether there is an instruction of these dtypes (PTX ISA 9.0, "mma": .atype, .btype, .ctype)."""
    if a in _BYTES:
        return b in _BYTES and c == "int32"
    return a == b and (a, c) in (("float16", "float32"), ("float16", "float16"), ("bfloat16", "float32"))


def mma_sync(A: Any, B: Any, C: Any) -> None:
    """C += A · B by the lanes of a warp, 16 × 8, k of 32 bytes: mma.sync's m16n8k16 and m16n8k32.

    Args:
        A: 16 bytes of T.alloc_local of each lane's own: 8 numbers of 16 bits, 16 of 8 bits. B: 8 bytes of it.
        C: 4 numbers. Each is a whole array of so many, or begins at the element that it names.

    Raises:
        TileSyntaxError: not at the scale of threads, or in T.Parallel. TileTypeError: no memory of each
            thread's own, dtypes without an instruction. TileValueError: other extents, threads that make no
            whole warps.
    """
    loc = source.current()
    whole_warps("T.mma_sync")
    names = [("A", A), ("B", B), ("C", C)]
    for name, value in names:
        if not is_tile(value):
            raise TileTypeError(
                f"{name} of T.mma_sync is {value!r}", loc=loc, expected="T.alloc_local memory, or a[i] of it"
            )
    a, b, c = (str(region(value, f"{name} of T.mma_sync").dtype) for name, value in names)
    if not has_product(a, b, c):
        raise TileTypeError(
            f"T.mma_sync of {a} by {b} into {c}",
            loc=loc,
            expected="float16 into float32 or float16, bfloat16 into float32, 8-bit integers into int32",
            hint="T.gemm of tiles has products of other dtypes",
        )
    counts = (4 * each(a), 2 * each(b), SUMS)
    made = [
        registers(f"{name} of T.mma_sync", value, n) for (name, value), n in zip(names, counts, strict=True)
    ]
    emit("mma_sync", [r.ir() for r in made])


def whole_warps(what: str) -> None:
    """
    Raises:
        TileSyntaxError: not at the scale of threads, or in T.Parallel. TileValueError: threads that make no
            whole warps.
    """
    in_threads(what)
    launch = bld.current().launch
    if launch is not None and launch.threads % WARP:
        raise TileValueError(
            f"{what} by {launch.threads} threads",
            loc=source.current(),
            expected=f"whole warps: a multiple of {WARP}",
        )


def registers(what: str, value: Any, count: int) -> Region:
    """The neighbours in a thread's own memory that an operand is.

    Raises:
        TileTypeError: memory that is not each thread's own. TileValueError: not so many.
    """
    made = region(value, what, (count,))
    if made.buffer.scope != "local":
        raise TileTypeError(
            f"{what} is {made.name}, which lies in {made.buffer.scope}",
            loc=source.current(),
            expected="registers of each thread's own: T.alloc_local",
        )
    if [constant(e) for e in made.extents] != [1] * (len(made.extents) - 1) + [count]:
        raise TileValueError(
            f"{what} is {made.name} of {' × '.join(map(str, made.extents))} numbers",
            loc=source.current(),
            expected=f"{count} of {made.dtype} for each lane",
            hint=f"{made.name}[i] for the {count} that begin at i",
        )
    return made


@register
class MmaSync(TileOp):
    """``mma_sync(A, B, C)``: all lanes of a warp come to it; it orders nothing but its own values."""

    name = "mma_sync"
    waits = by_thread = True

    def effects(self, call: Any) -> list[Access]:
        a, b, c = call.args
        return [Access(a, "read"), Access(b, "read"), Access(c, "read"), Access(c, "write")]

    def simulate(self, call: Any, cx: SimContext) -> Any:
        from tilescale.compiler.sim import numerics

        a, b, c = (cx.view(r, call) for r in call.args)
        site, n = cx.site(call, "T.mma_sync"), each(a.dtype)
        wide = np.int64 if c.dtype == "int32" else np.float64

        def run(ex: Any) -> Generator[str, None, None]:
            lane = ex.linear % WARP
            mine = a.read(ex).reshape(-1).copy(), b.read(ex).reshape(-1).copy()
            lanes = yield from ex.machine.exchange(ex, ex.linear // WARP, lane, WARP, mine, site)
            g, q = lane // 4, lane % 4
            # (lane of the row, half of k, row, neighbours) and (column, its lane, half of k, neighbours)
            x = np.stack([lanes[4 * g + k][0] for k in range(4)]).reshape(4, 2, 2, n)
            y = np.stack([lanes[8 * q + k][1] for k in range(8)]).reshape(2, 4, 2, n)
            rows = x.transpose(2, 1, 0, 3).reshape(2, 8 * n).astype(wide)
            columns = y.transpose(0, 2, 1, 3).reshape(2, 8 * n).astype(wide)
            total = c.read(ex).reshape(2, 2).astype(wide) + rows @ columns.T
            c.write(ex, numerics.encode(total, c.dtype))

        return run
