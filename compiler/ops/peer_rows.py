"""Rows of a tile that TMA stores in another rank's memory, or adds to it (passes/peer_rows.py): what a
``T.copy(…, dst=rank, prefer_instruction="tma")`` has become where TMA can make it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilescale.compiler.ir.contexts import SimContext
from tilescale.compiler.ir.operations import VOID, Access, TileOp, register
from tilescale.compiler.tvm_compat import ir, tirx

#: of copies that go on beside their executor: their tile has been read where they stand, or where the stage
#: of a ring that it is is filled anew
READ, RING = "read", "ring"


def awaited(executor: str, span: Any, pending: int = 0, complete: bool = True) -> Any:
    """``ts.await_rows()``: the executor's copies by TMA that go on beside it, all but the last ``pending``
    groups, are ``complete``, or have read their tiles."""
    attrs = {"executor": executor, "pending": pending, "complete": int(complete)}
    return tirx.Evaluate(ir.Call("ts.await_rows", [], attrs=attrs, ret_ty=VOID, span=span), span)


def grouped(executor: str, span: Any) -> Any:
    """``ts.rows_group()``: the copies since the last one are a group."""
    return tirx.Evaluate(
        ir.Call("ts.rows_group", [], attrs={"executor": executor}, ret_ty=VOID, span=span), span
    )


def peer_rows(call: Any, tile: Any) -> Any:
    """What a ``ts.remote_copy`` asks for, of values that lie in ``tile``."""
    attrs = {k: call.attrs[k] for k in ("executor", "reach", "op") if k in call.attrs}
    if "late" in call.attrs:
        attrs["late"] = READ
    made = ir.Call(
        "ts.peer_rows", [tile, *call.args[1:3]], attrs=attrs | {"side": "dst"}, ret_ty=VOID, span=call.span
    )
    return tirx.Evaluate(made, call.span)


@register
class PeerRows(TileOp):
    """``ts.peer_rows(tile, dst, rank)``: complete where it stands, since the threads that issue it wait for
    it; with ``attrs["late"]`` where ``ts.await_rows`` says so. With ``attrs["op"]`` each element is added,
    atomically among the blocks of this rank, in the order of arrival."""

    name = "peer_rows"
    spelling = "copy"
    attributes = ("side", "op?", "late?")

    def effects(self, call: Any) -> list[Access]:
        tile, to, owner = call.args
        late = str(call.attrs.get("late", ""))
        into = (
            Access(to, "update", owner, half="add", proxy="async")
            if "op" in call.attrs
            else Access(to, "write", owner, asynchronous=late != "", proxy="async")
        )
        return [Access(tile, "read", asynchronous=late == RING, proxy="async"), into]

    def queue(self, call: Any) -> str:
        return {"": "", READ: "copy", RING: "row"}[str(call.attrs.get("late", ""))]

    def simulate(self, call: Any, cx: SimContext) -> Callable[..., None]:
        from tilescale.compiler.sim import atomics, flights

        src, dst, peer = cx.view(call.args[0], call), cx.view(call.args[1], call), cx.scalar(call.args[2])
        site, late = cx.site_of(call), str(call.attrs.get("late", ""))
        if "op" in call.attrs:
            return lambda ex: atomics.posted(ex, dst, src.read(ex), peer(ex), wide=False)

        def begin(ex: Any, engine: Any) -> None:
            if late == READ:
                dst.write(ex, src.read(ex), peer(ex))
                return
            source, target = src.placed(ex, None), dst.placed(ex, peer(ex))
            flights.start(ex, flights.ROW, engine, site, (source,), None, lambda: target.write(source.read()))

        return begin if late else lambda ex: dst.write(ex, src.read(ex), peer(ex))


@register
class RowsGroup(TileOp):
    name = "rows_group"
    levels = ("scheduled",)

    def effects(self, call: Any) -> list[Access]:
        return []

    def simulate(self, call: Any, cx: SimContext) -> Callable[[Any], None]:
        from tilescale.compiler.sim import flights

        return flights.grouped


@register
class AwaitRows(TileOp):
    """What stands behind it comes behind the copies. Where they are not to be complete, their reads alone are
    over: whoever writes their tiles comes behind those."""

    name = "await_rows"
    attributes = ("pending", "complete")
    completes = True

    def effects(self, call: Any) -> list[Access]:
        return []

    def simulate(self, call: Any, cx: SimContext) -> Callable[[Any], None]:
        from tilescale.compiler.sim import flights

        pending, complete = int(call.attrs["pending"]), bool(int(call.attrs["complete"]))
        return lambda ex: flights.landed(ex, pending, complete)
