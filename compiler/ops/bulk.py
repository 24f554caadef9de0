"""Stores by TMA (scheduled level of a GPU only): the wait in front of the next use of the memory that they read."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.ops.base import VOID, Access, TileOp, register
from tilescale.compiler.tvm_compat import ir, tirx


def await_stores(tile: Any, span: Any) -> Any:
    """``ts.await_stores(tile)``: every ``T.copy`` by TMA out of ``tile`` that was issued before has read it; the tile may be written."""
    return tirx.Evaluate(ir.Call("ts.await_stores", [tile], attrs={"executor": "block"}, ret_ty=VOID, span=span), span)


@register
class AwaitStores(TileOp):
    name = "await_stores"
    completes = True

    def effects(self, call: Any) -> list[Access]:
        # The thread that issued the stores waits for them. To everyone else they are its reads: who writes the tile behind this meets it.
        return [Access(call.args[0], "read")]

    def lower_cuda(self, call: Any, cx: Any) -> Any:
        from tilescale.compiler.cuda.tma import await_stores

        return await_stores(cx, call)

    def simulate(self, call: Any, cx: Any) -> Any:
        from tilescale.compiler.sim import flights

        return lambda ex: flights.wait(ex, flights.STORE)
