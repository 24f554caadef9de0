"""How the operations of compiler/ops/shuffle.py are done on the CPU."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.builder.values import as_expr
from tilescale.compiler.cpu import convert
from tilescale.compiler.cpu.lower import Lowering as CpuLowering
from tilescale.compiler.ir.lowerings import lowers
from tilescale.compiler.ir.scales import WARP, WIDTHS
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.ops.shuffle import OF_WARPS, mask_of
from tilescale.compiler.tvm_compat import tirx


@lowers("cpu", "shuffle")
def lower_shuffle(call: Any, cx: CpuLowering) -> Any:
    into = cx.view(call.args[0])
    kind, width = str(call.attrs["kind"]), int(call.attrs["width"])
    thread = cx.thread_number()
    lane = tirx.floormod(thread, as_expr(WARP))
    table = cx.exchange_table(convert.storage_dtype(into.dtype))
    meet = cx.barrier_of_lanes(mask_of(call), call)
    there = thread - lane + _taken_from(kind, lane, cx.scalar(call.args[2]), width)
    # Behind the first barrier all values are there, behind the second all have been read.
    return sequence([
        tirx.BufferStore(table, convert.encode(cx.scalar(call.args[1]), into.dtype), [thread]), meet,
        tirx.BufferStore(into.buf, tirx.BufferLoad(table, [there]), [into.offset]), meet,
    ])  # fmt: skip


@lowers("cpu", "sync_threads")
def lower_sync_threads(call: Any, cx: CpuLowering) -> Any:
    number, count = int(call.attrs["barrier"]), int(call.attrs["count"])
    if number == OF_WARPS:
        return cx.barrier_of_lanes(mask_of(call), call)
    return cx.numbered_barrier(
        as_expr(number), count // WIDTHS[str(call.attrs["executor"])], cx.site("barrier", "threads", call)
    )


@lowers("cpu", "arrive_threads")
def lower_arrive_threads(call: Any, cx: CpuLowering) -> Any:
    executors = int(call.attrs["count"]) // WIDTHS[str(call.attrs["executor"])]
    cx.waits = True  # those who come to the same barrier by T.sync_threads
    return cx.call("ts_barrier_arrive", as_expr(int(call.attrs["barrier"])), as_expr(executors))


def _taken_from(kind: str, lane: Any, by: Any, width: int) -> Any:
    """`taken_from` as an expression."""
    first = tirx.floordiv(lane, as_expr(width)) * width
    if kind == "from":
        return first + tirx.floormod(by, as_expr(width))
    there = {"xor": lambda: tirx.bitwise_xor(lane, by), "up": lambda: lane - by, "down": lambda: lane + by}[
        kind
    ]()
    return tirx.if_then_else(there >= first if kind == "up" else there < first + width, there, lane)
