"""Copies between blocks of a cluster by engines (scheduled level of a GPU only): the wait for those that were announced to this block."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.ir.operations import VOID, Access, TileOp, register
from tilescale.compiler.tvm_compat import ir, tirx


def await_puts(landed: Any, count: Any, span: Any) -> Any:
    """``ts.await_puts(landed, count)``: what other blocks have announced to this one is there, for the thread that waits. ``landed``: the
    barrier that counts their bytes; ``count``: how often it has been awaited."""
    return tirx.Evaluate(ir.Call("ts.await_puts", [landed, count], attrs={"executor": "block"}, ret_ty=VOID, span=span), span)


@register
class AwaitPuts(TileOp):
    name = "await_puts"
    completes = True

    def effects(self, call: Any) -> list[Access]:
        return []

