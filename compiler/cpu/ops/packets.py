"""How the operations of compiler/ops/packets.py are done on the CPU: row by row, by the runtime."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from tilescale.compiler.cpu.expr import lit, loop, seq
from tilescale.compiler.cpu.lower import Lowering as CpuLowering
from tilescale.compiler.cpu.memory import narrow
from tilescale.compiler.cpu.view import View, like, widened
from tilescale.compiler.ir.lowerings import lowers
from tilescale.compiler.ops.packets import is_dense
from tilescale.compiler.tvm_compat import tirx
from tilescale.packets import words


@lowers("cpu", "put_packets")
def lower_put(call: Any, cx: CpuLowering) -> Any:
    box = cx.memory[call.args[1].source]
    site = cx.site("packets", box.name, call, "put")
    peer = cx.scalar(call.args[2])
    there = cx.remote(box, peer, "device", site)
    each = words(is_dense(call))
    to, size = _part(call.args[1], each, cx)

    def row(first: Any, data: Any, count: Any) -> Any:
        own, other = _start(box.buf), _start(there)
        if is_dense(call):
            return cx.call("ts_put_dense", own, other, size, first, data, count, site)
        return cx.call("ts_put_packets", own, other, size, first, data, count)

    done = _rows(call.args[0], to, cx, row)
    if not cx.instrument:
        return done
    crosses = 8 * each * prod(int(e) for e in to.shape)
    begin, end = (
        cx.call("ts_event", site, lit(phase, "int32"), narrow(peer, "int32"), lit(crosses, "int64"))
        for phase in (0, 1)
    )
    return seq([begin, done, end])


@lowers("cpu", "get_packets")
def lower_get(call: Any, cx: CpuLowering) -> Any:
    cx.waits = True
    box = cx.memory[call.args[0].source]
    site = cx.site("packets", box.name, call, "get")
    frm, size = _part(call.args[0], words(is_dense(call)), cx)
    get = "ts_get_dense" if is_dense(call) else "ts_get_packets"

    def row(first: Any, data: Any, count: Any) -> Any:
        return cx.call(get, _start(box.buf), size, first, data, count, site)

    return cx.observed(_rows(call.args[1], frm, cx, row), site)


def _part(region: Any, each: int, cx: CpuLowering) -> tuple[View, Any]:
    """A part of a box, in packets of ``each`` words; the words of a half. A launch fails where it does not
    lie inside."""
    view = cx.view(region)
    cx._require_inside(view, region)
    size: Any = lit(each, "int64")
    for extent in cx.memory[region.source].shape:
        size = size * widened(extent, "int64")
    return view, size


def _start(buf: Any) -> Any:
    return tirx.address_of(tirx.BufferLoad(buf, [lit(0, "int64")]))


def _rows(held: Any, box: View, cx: CpuLowering, row: Callable[[Any, Any, Any], Any]) -> Any:
    """``row(first packet, address of the data, how many)`` for each row of a tile of packets."""
    tile = like(cx.tile(held), [int(e) for e in box.shape])
    *outer, count = tile.shape

    def nest(ids: list[Any]) -> Any:
        if len(ids) < len(outer):
            return loop("i", outer[len(ids)], lambda v: nest([*ids, v]))
        at = [*ids, lit(0, "int32")]
        data = tirx.address_of(tirx.BufferLoad(tile.buf, [tile.index(*at)]))
        return row(box.at(at), data, lit(count, "int64"))

    return nest([])
