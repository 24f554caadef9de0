"""How the operations of compiler/ops/packets.py are done on GPUs: neighbouring threads have neighbouring
packets, which each stores, or awaits, for itself. So the executor's threads need not meet, unless several of
them hold one packet of a dense box: all have to have seen it when one of them empties its place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilescale.compiler.ir.contexts import LayoutContext
from tilescale.compiler.ir.lowerings import Lowering, lowers
from tilescale.compiler.ir.nests import element_nest, indexed, long_axes
from tilescale.compiler.ir.source import loc_of
from tilescale.compiler.layout.infer import Demand
from tilescale.compiler.layout.spread import best, divisors, spread
from tilescale.compiler.ops.packets import PutPackets, is_dense
from tilescale.compiler.tvm_compat import tirx

if TYPE_CHECKING:
    from tilescale.compiler.gpu.lower import Lowering as GpuLowering


class _Packets(Lowering["GpuLowering"]):
    demands = True

    def layouts(self, call: Any, cx: LayoutContext) -> list[Any]:
        """A packet a thread, side by side: what a wave stores at once is one run of memory. Of what is got
        each thread may also have whole columns: what comes from several ranks is mostly added up."""
        puts, threads = call.op.name == f"ts.{PutPackets.name}", cx.executor_of(call).threads
        held = call.args[0 if puts else 1].source
        shape = tuple(int(e) for e in held.ty.shape)
        two = is_dense(call) and shape[-1] % 2 == 0  # neighbours are one access
        made = [best(shape, threads, 64, -1, 1 + two)]
        if not puts:
            each = 1 + (two and shape[-1] >= 2 * threads)
            share = max(d for d in divisors(threads) if d < 2 * shape[-1] // each)
            made.append(spread(shape, threads, [*(1 for _ in shape[1:]), share], each, len(shape) - 1))
        return [[Demand(held, f, "packets", loc_of(call.span))] for f in dict.fromkeys(made)]


@lowers("gpu", "put_packets")
class Put(_Packets):
    def lower(self, call: Any, cx: GpuLowering) -> Any:
        held, box, rank = call.args
        return cx.packets(call, _moves(call, held, box), box, rank)


@lowers("gpu", "get_packets")
class Get(_Packets):
    def lower(self, call: Any, cx: GpuLowering) -> Any:
        box, held = call.args
        layout = cx.registers_of(held.source).layout
        if not is_dense(call):
            return cx.packets(call, _moves(call, box, held), box, several=layout.slots > 1)
        back = _moves(call, held, box)  # each thread empties what it has taken
        shared = len(layout.copies) > 1
        return cx.packets(call, _moves(call, box, held), box, several=True, empties=back, shared=shared)


def _moves(call: Any, frm: Any, to: Any) -> Any:
    """``to[…] = frm[…]``, packet by packet."""
    kept = long_axes(frm), long_axes(to)
    sizes = [to.region[k].extent for k in kept[1]]

    def element(at: list[Any]) -> Any:
        value = tirx.BufferLoad(frm.source, indexed(frm, at, kept[0]))
        return tirx.BufferStore(to.source, value, indexed(to, at, kept[1]), call.span)

    return element_nest(sizes, element, call, call.op.name.replace("ts.", "T."))
