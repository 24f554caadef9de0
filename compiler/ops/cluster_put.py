"""Copies between blocks of a cluster by engines (scheduled level of a GPU only; PTX ISA, "cp.async.bulk"), and the wait for those that were
announced to this block."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.ir.operations import VOID, Access, TileOp, register
from tilescale.compiler.ops.copy import RemoteCopy
from tilescale.compiler.tvm_compat import ir, tirx


def cluster_put(call: Any, landed: Any) -> Any:
    """A T.copy into another block as ``ts.cluster_put``."""
    where = {k: call.attrs[k] for k in ("executor", "reach")}
    return ir.Call("ts.cluster_put", [*call.args[:3], landed], attrs=where, ret_ty=VOID, span=call.span)


def await_puts(landed: Any, count: Any, span: Any) -> Any:
    """``ts.await_puts(landed, count)``: what other blocks have announced to this one is there, for the thread that waits. ``landed``: the
    barrier that counts their bytes; ``count``: how often it has been awaited."""
    return tirx.Evaluate(ir.Call("ts.await_puts", [landed, count], attrs={"executor": "block"}, ret_ty=VOID, span=span), span)


@register
class ClusterPut(RemoteCopy):
    """``ts.cluster_put(src, dst, block, landed)``: bytes announced to that block's barrier ``landed``, which counts them in."""

    name = "cluster_put"
    levels = ("scheduled",)
    attributes = ()

    def effects(self, call: Any) -> list[Access]:
        return [Access(call.args[0], "read", proxy="async"), Access(call.args[1], "write", call.args[2], proxy="async")]

    def nest(self, call: Any) -> Any:
        return None

    def side(self, call: Any) -> str:
        return "dst"


@register
class AwaitPuts(TileOp):
    name = "await_puts"
    levels = ("scheduled",)
    completes = True

    def effects(self, call: Any) -> list[Access]:
        return []

