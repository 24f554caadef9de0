"""``T.fill`` and ``T.clear``: one value into every element of a tile."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.builder.lanes import scalars
from tilescale.compiler.builder.values import convert
from tilescale.compiler.ir.contexts import SimContext
from tilescale.compiler.ir.operations import Access, TileOp, register
from tilescale.compiler.ops.base import emit, region, unheeded
from tilescale.compiler.tvm_compat import tirx


def fill(buffer: Any, value: Any, annotations: dict[str, Any] | None = None) -> None:
    """Stores ``value``, converted to the tile's dtype, into every element; nothing outside a tensor is
    written."""
    unheeded("fill", annotations)
    target = region(scalars(buffer, alone=True), "the tile to fill", (), narrow=True)
    emit("fill", [target.ir(), convert(value, target.dtype)])


def clear(buffer: Any, annotations: dict[str, Any] | None = None) -> None:
    """Stores zero into every element."""
    unheeded("clear", annotations)
    fill(buffer, 0)


@register
class Fill(TileOp):
    name = "fill"
    plain = True

    def effects(self, call: Any) -> list[Access]:
        return [Access(call.args[0], "write")]

    def nest(self, call: Any) -> Any:
        from tilescale.compiler.ir.nests import element_nest, indexed, long_axes

        dst, value = call.args
        kept = long_axes(dst)
        put = lambda at: tirx.BufferStore(dst.source, value, indexed(dst, at, kept), call.span)  # noqa: E731
        return element_nest([dst.region[k].extent for k in kept], put, call, "T.fill")

    def simulate(self, call: Any, cx: SimContext) -> Any:
        from tilescale.compiler.sim import numerics

        target, value = cx.view(call.args[0], call), cx.scalar(call.args[1])
        return lambda ex: target.write(ex, numerics.encode(value(ex), target.dtype))
