"""The wait for products that run beside the threads (scheduled level of a GPU only)."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.ops.base import VOID, Access, TileOp, register
from tilescale.compiler.tvm_compat import ir, tirx


def await_products(tiles: list[Any], span: Any) -> Any:
    """``ts.await_products(tiles)``: every product issued before is complete, and ``tiles``, the accumulators, may be read."""
    return tirx.Evaluate(ir.Call("ts.await_products", list(tiles), attrs={"executor": "block"}, ret_ty=VOID, span=span), span)


@register
class AwaitProducts(TileOp):
    name = "await_products"
    completes = True

    def effects(self, call: Any) -> list[Access]:
        return [Access(tile, mode) for tile in call.args for mode in ("read", "write")]

    def lower_cuda(self, call: Any, cx: Any) -> Any:
        from tilescale.compiler.cuda.wgmma import awaited

        return awaited(cx, call.args, 0)

    def simulate(self, call: Any, cx: Any) -> Any:
        from tilescale.compiler.sim import flights

        return lambda ex: flights.wait(ex, flights.PRODUCT)
