"""How the operations of compiler/ops/packets.py are done on GPUs: neighbouring threads have neighbouring packets,
which each stores, or awaits, for itself. So the executor's threads need not meet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilescale.compiler.ir.contexts import LayoutContext
from tilescale.compiler.ir.lowerings import Lowering, lowers
from tilescale.compiler.ir.nests import element_nest, indexed, long_axes
from tilescale.compiler.ir.source import loc_of
from tilescale.compiler.layout.infer import Demand
from tilescale.compiler.layout.spread import best
from tilescale.compiler.ops.packets import PutPackets
from tilescale.compiler.tvm_compat import tirx

if TYPE_CHECKING:
    from tilescale.compiler.gpu.lower import Lowering as GpuLowering


class _Packets(Lowering["GpuLowering"]):
    demands = True

    def layouts(self, call: Any, cx: LayoutContext) -> list[Any]:
        """A packet a thread, side by side: what a wave stores at once is one run of memory."""
        held = call.args[0 if call.op.name == f"ts.{PutPackets.name}" else 1].source
        shape = tuple(int(e) for e in held.ty.shape)
        made = best(shape, cx.executor_of(call).threads, 64, -1, 1)
        return [[Demand(held, made, "packets", loc_of(call.span))]]


@lowers("gpu", "put_packets")
class Put(_Packets):
    def lower(self, call: Any, cx: GpuLowering) -> Any:
        held, box, rank = call.args
        return cx.packets(call, _moves(call, held, box), box, rank)


@lowers("gpu", "get_packets")
class Get(_Packets):
    def lower(self, call: Any, cx: GpuLowering) -> Any:
        box, held = call.args
        return cx.packets(call, _moves(call, box, held), box)


def _moves(call: Any, frm: Any, to: Any) -> Any:
    """``to[…] = frm[…]``, packet by packet."""
    kept = long_axes(frm), long_axes(to)
    sizes = [to.region[k].extent for k in kept[1]]

    def element(at: list[Any]) -> Any:
        value = tirx.BufferLoad(frm.source, indexed(frm, at, kept[0]))
        return tirx.BufferStore(to.source, value, indexed(to, at, kept[1]), call.span)

    return element_nest(sizes, element, call, call.op.name.replace("ts.", "T."))
