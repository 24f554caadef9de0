"""How the operations of compiler/ops/vote.py are done on the CPU: each leaves its value in a table, and reads
those of the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilescale.compiler.builder.values import as_expr
from tilescale.compiler.cpu import convert
from tilescale.compiler.cpu.expr import loop
from tilescale.compiler.cpu.lower import Lowering as CpuLowering
from tilescale.compiler.ir.lowerings import lowers
from tilescale.compiler.ir.scales import WARP
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.ops.shuffle import EVERYONE, mask_of
from tilescale.compiler.ops.vote import MATCHES
from tilescale.compiler.tvm_compat import tirx


@lowers("cpu", "vote")
def lower_vote(call: Any, cx: CpuLowering) -> Any:
    kind, value = str(call.attrs["kind"]), cx.scalar(call.args[1])
    thread = cx.thread_number()
    warp = tirx.floordiv(thread, as_expr(WARP))
    mask = mask_of(call)
    meet = cx.barrier_of_lanes(mask, call)
    dtype = str(value.ty)
    table = cx.exchange_table(convert.storage_dtype(dtype))

    def brought(place: Any) -> Any:
        return convert.decode(tirx.BufferLoad(table, [place]), dtype)

    def bit(lane: Any) -> Any:
        there = brought(warp * WARP + lane)
        holds = tirx.EQ(there, brought(thread)) if kind in MATCHES else there
        bits = tirx.Cast("uint64", holds) << tirx.Cast("uint64", lane)
        return bits if mask == EVERYONE else tirx.bitwise_and(bits, tirx.const(mask, "uint64"))

    def told(lanes: Any) -> Any:
        if kind in ("ballot", "active", "match_any"):
            return lanes
        every = tirx.EQ(lanes, tirx.const(mask, "uint64"))
        if kind == "match_all":
            return tirx.Select(every, lanes, tirx.const(0, "uint64"))
        return every if kind == "all" else tirx.NE(lanes, tirx.const(0, "uint64"))

    return _gathered(cx, call, (table, convert.encode(value, dtype), meet), (WARP, bit, told, "uint64"))


@lowers("cpu", "block_vote")
def lower_block_vote(call: Any, cx: CpuLowering) -> Any:
    kind, threads = str(call.attrs["kind"]), int(cx.program.launch.threads)
    table = cx.exchange_table(convert.storage_dtype("bool"))
    meet = cx.numbered_barrier(as_expr(0), threads, cx.site("barrier", "threads", call))

    def one(thread: Any) -> Any:
        return tirx.Cast("int32", convert.decode(tirx.BufferLoad(table, [thread]), "bool"))

    def told(count: Any) -> Any:
        return {"count": count, "and": tirx.EQ(count, as_expr(threads)), "or": count > 0}[kind]

    given = convert.encode(cx.scalar(call.args[1]), "bool")
    return _gathered(cx, call, (table, given, meet), (threads, one, told, "int32"))


def _gathered(
    cx: CpuLowering,
    call: Any,
    exchange: tuple[Any, Any, Any],
    fold: tuple[int, Callable[[Any], Any], Callable[[Any], Any], str],
) -> Any:
    """Behind the first barrier all values are there, behind the second all have been read.

    Args:
        exchange: the table, what this thread leaves in it, the barrier. fold: how many values, what the sum
            has of each of them, what is told by the sum, the sum's dtype.
    """
    table, given, meet = exchange
    count, term, told, dtype = fold
    into, here = cx.view(call.args[0]), [as_expr(0)]
    total = tirx.decl_buffer((1,), dtype, "told", layout=None, scope="local", data_alignment=64)

    def add(k: Any) -> Any:
        return tirx.BufferStore(total, tirx.BufferLoad(total, here) + term(k), here)

    made = tirx.Cast(into.dtype, told(tirx.BufferLoad(total, here)))
    return sequence([
        tirx.BufferStore(table, given, [cx.thread_number()]), meet, tirx.AllocBuffer(total),
        tirx.BufferStore(total, tirx.const(0, dtype), here), loop("k", count, add),
        tirx.BufferStore(into.buf, made, [into.offset]), meet,
    ])  # fmt: skip
