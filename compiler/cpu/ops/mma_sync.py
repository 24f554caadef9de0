"""How the operation of compiler/ops/mma_sync.py is done on the CPU: the lanes leave their operands in tables,
and each computes its own sums."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.builder.values import as_expr
from tilescale.compiler.cpu import convert
from tilescale.compiler.cpu.expr import fma, loop
from tilescale.compiler.cpu.gemm import acc_dtype
from tilescale.compiler.cpu.lower import Lowering as CpuLowering
from tilescale.compiler.ir.lowerings import lowers
from tilescale.compiler.ir.scales import WARP
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.ops.mma_sync import SUMS, each
from tilescale.compiler.ops.shuffle import EVERYONE
from tilescale.compiler.tvm_compat import tirx


@lowers("cpu", "mma_sync")
def lower_mma_sync(call: Any, cx: CpuLowering) -> Any:
    a, b, c = (cx.tile(r) for r in call.args)
    n, thread = each(a.dtype), cx.thread_number()
    warp, lane = tirx.floordiv(thread, as_expr(WARP)), tirx.floormod(thread, as_expr(WARP))
    counts = (4 * n, 2 * n)
    tables = [
        cx.exchange_table(convert.storage_dtype(t.dtype), count)
        for t, count in zip((a, b), counts, strict=True)
    ]
    meet = cx.barrier_of_lanes(EVERYONE, call)

    def left(tile: Any, table: Any, count: int) -> Any:
        def one(k: Any) -> Any:
            return tirx.BufferStore(table, tirx.BufferLoad(tile.buf, [_at(tile, k)]), [thread * count + k])

        return loop("k", count, one)

    # Behind the first barrier all operands are there, behind the second all have been read.
    return sequence([
        left(a, tables[0], counts[0]), left(b, tables[1], counts[1]), meet,
        *(_sum(e, (a, b, c), tables, warp * WARP, lane) for e in range(SUMS)), meet,
    ])  # fmt: skip


def _sum(e: int, tiles: tuple[Any, Any, Any], tables: list[Any], first: Any, lane: Any) -> Any:
    """The lane's sum e, of row e // 2 of its two and column e % 2, rounded once. ``first``: the warp's first
    thread."""
    a, b, c = tiles
    n, acc = each(a.dtype), acc_dtype(a.dtype, b.dtype, c.dtype)
    total = tirx.decl_buffer((1,), acc, "total", layout=None, scope="local", data_alignment=64)
    here = [as_expr(0)]
    row = (
        first + tirx.floordiv(lane, as_expr(4)) * 4
    )  # the first of the lanes that have the row, and the column
    column = first + tirx.floormod(lane, as_expr(4)) * 8 + e % 2 * 4

    def add(k: Any) -> Any:
        half, near = tirx.floordiv(k, 4 * n), tirx.floormod(k, n)
        holder = tirx.floordiv(tirx.floormod(k, 4 * n), n)
        of_row = tirx.BufferLoad(tables[0], [(row + holder) * (4 * n) + half * (2 * n) + e // 2 * n + near])
        of_column = tirx.BufferLoad(tables[1], [(column + holder) * (2 * n) + half * n + near])
        x, y = (
            convert.cast(convert.decode(stored, t.dtype), t.dtype, acc)
            for stored, t in ((of_row, a), (of_column, b))
        )
        old = tirx.BufferLoad(total, here)
        return tirx.BufferStore(total, fma(x, y, old) if convert.is_float(acc) else old + x * y, here)

    begin = convert.cast(convert.load(c.buf, _at(c, e), c.dtype), c.dtype, acc)
    end = convert.cast(tirx.BufferLoad(total, here), acc, c.dtype)
    return sequence([
        tirx.AllocBuffer(total), tirx.BufferStore(total, begin, here),
        loop("k", 8 * n, add), convert.store(c.buf, _at(c, e), end, c.dtype),
    ])  # fmt: skip


def _at(tile: Any, k: Any) -> Any:
    """The place of a register's k-th number."""
    return tile.offset + k * tile.strides[-1]
