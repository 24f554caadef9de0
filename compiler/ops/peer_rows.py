"""Rows of a tile that TMA stores in another rank's memory, or adds to it (passes/peer_rows.py): what a
``T.copy(…, dst=rank, prefer_instruction="tma")`` has become where TMA can make it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilescale.compiler.ir.contexts import SimContext
from tilescale.compiler.ir.operations import VOID, Access, TileOp, register
from tilescale.compiler.tvm_compat import ir, tirx


def peer_rows(call: Any, tile: Any) -> Any:
    """What a ``ts.remote_copy`` asks for, of values that lie in ``tile``."""
    attrs = {k: call.attrs[k] for k in ("executor", "reach", "op") if k in call.attrs}
    made = ir.Call(
        "ts.peer_rows", [tile, *call.args[1:3]], attrs=attrs | {"side": "dst"}, ret_ty=VOID, span=call.span
    )
    return tirx.Evaluate(made, call.span)


@register
class PeerRows(TileOp):
    """``ts.peer_rows(tile, dst, rank)``: complete where it stands, since the threads that issue it wait for
    it. With ``attrs["op"]`` each element is added, atomically among the blocks of this rank, in the order of
    arrival."""

    name = "peer_rows"
    spelling = "copy"
    attributes = ("side", "op?")

    def effects(self, call: Any) -> list[Access]:
        tile, to, owner = call.args
        into = (
            Access(to, "update", owner, half="add", proxy="async")
            if "op" in call.attrs
            else Access(to, "write", owner, proxy="async")
        )
        return [Access(tile, "read", proxy="async"), into]

    def simulate(self, call: Any, cx: SimContext) -> Callable[[Any], None]:
        from tilescale.compiler.sim import atomics

        src, dst, peer = cx.view(call.args[0], call), cx.view(call.args[1], call), cx.scalar(call.args[2])
        if "op" in call.attrs:
            return lambda ex: atomics.posted(ex, dst, src.read(ex), peer(ex), wide=False)
        return lambda ex: dst.write(ex, src.read(ex), peer(ex))
