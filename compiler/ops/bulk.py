"""Stores by TMA (scheduled level of a GPU only): the wait in front of the next use of the memory that they read, or of what they wrote."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.ir.operations import VOID, Access, TileOp, register
from tilescale.compiler.tvm_compat import ir, tirx


def await_stores(tile: Any, span: Any, complete: bool = False) -> Any:
    """``ts.await_stores(tile)``: every ``T.copy`` by TMA out of ``tile`` that was issued before has read it; the tile may be written.
    ``complete``: those of all tiles have written what they store too, and what follows comes behind that."""
    attrs = {"executor": "block", "complete": int(complete)}
    return tirx.Evaluate(ir.Call("ts.await_stores", [tile], attrs=attrs, ret_ty=VOID, span=span), span)


def fence_writes(span: Any) -> Any:
    """``ts.fence_writes()``: what threads wrote to tensors comes before what TMA stores there behind their next meeting."""
    return tirx.Evaluate(ir.Call("ts.fence_writes", [], attrs={"executor": "block"}, ret_ty=VOID, span=span), span)


@register
class AwaitStores(TileOp):
    name = "await_stores"
    completes = True

    def effects(self, call: Any) -> list[Access]:
        # The thread that issued the stores waits for them. To everyone else they are its reads: who writes the tile behind this meets it.
        return [Access(call.args[0], "read")]

    def simulate(self, call: Any, cx: Any) -> Any:
        from tilescale.compiler.sim import flights

        complete = bool(int(call.attrs["complete"]))
        return lambda ex: flights.wait(ex, flights.STORE, complete=complete)


@register
class FenceWrites(TileOp):
    name = "fence_writes"

    def effects(self, call: Any) -> list[Access]:
        return []

    def simulate(self, call: Any, cx: Any) -> Any:
        return lambda ex: None  # one statement of an executor follows the other there
