"""How the operation of compiler/ops/ldmatrix.py is done on the CPU: the lanes leave their rows in a table."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.builder.values import as_expr
from tilescale.compiler.cpu import convert
from tilescale.compiler.cpu.expr import loop
from tilescale.compiler.cpu.lower import Lowering as CpuLowering
from tilescale.compiler.ir.lowerings import lowers
from tilescale.compiler.ir.scales import WARP
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.ops.ldmatrix import MATRICES, holder
from tilescale.compiler.ops.mma_sync import each
from tilescale.compiler.ops.shuffle import EVERYONE
from tilescale.compiler.tvm_compat import tirx


@lowers("cpu", "ldmatrix")
def lower_ldmatrix(call: Any, cx: CpuLowering) -> Any:
    row, into = (cx.tile(r) for r in call.args)
    n, thread = each(row.dtype), cx.thread_number()
    count, transposed = MATRICES * n, bool(call.attrs["transposed"])
    warp, lane = tirx.floordiv(thread, as_expr(WARP)), tirx.floormod(thread, as_expr(WARP))
    table = cx.exchange_table(convert.storage_dtype(row.dtype), count)
    meet = cx.barrier_of_lanes(EVERYONE, call)

    def left(k: Any) -> Any:
        value = tirx.BufferLoad(row.buf, [row.offset + k * row.strides[-1]])
        return tirx.BufferStore(table, value, [thread * count + k])

    def got(k: int) -> Any:
        who, at = holder(lane, k, n, transposed)
        value = tirx.BufferLoad(table, [(warp * WARP + who) * count + at])
        return tirx.BufferStore(into.buf, value, [into.offset + k * into.strides[-1]])

    # Behind the first barrier all rows are there, behind the second all have been read.
    return sequence([loop("k", count, left), meet, *(got(k) for k in range(count)), meet])
