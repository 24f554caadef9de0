"""Rows of a tile that TMA adds to another rank's memory (passes/peer_sums.py): what a ``T.copy(…, dst=rank,
op="add", prefer_instruction="tma")`` has become where TMA can make it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilescale.compiler.ir.contexts import SimContext
from tilescale.compiler.ir.operations import VOID, Access, TileOp, register
from tilescale.compiler.tvm_compat import ir, tirx


def peer_sum(call: Any, tile: Any) -> Any:
    """What a ``ts.remote_copy`` that adds asks for, of values that lie in ``tile``."""
    attrs = {k: call.attrs[k] for k in ("executor", "reach")}
    made = ir.Call(
        "ts.peer_sum", [tile, *call.args[1:3]], attrs=attrs | {"side": "dst"}, ret_ty=VOID, span=call.span
    )
    return tirx.Evaluate(made, call.span)


@register
class PeerSum(TileOp):
    """``ts.peer_sum(tile, dst, rank)``: each element is added atomically among the blocks of this rank, in
    the order of arrival. Complete where it stands: the threads that issue it wait for it."""

    name = "peer_sum"
    spelling = "copy"
    attributes = ("side",)

    def effects(self, call: Any) -> list[Access]:
        tile, to, owner = call.args
        return [
            Access(tile, "read", proxy="async"),
            Access(to, "update", owner, half="add", proxy="async"),
        ]

    def simulate(self, call: Any, cx: SimContext) -> Callable[[Any], None]:
        from tilescale.compiler.sim import atomics

        src, dst, peer = cx.view(call.args[0], call), cx.view(call.args[1], call), cx.scalar(call.args[2])
        return lambda ex: atomics.posted(ex, dst, src.read(ex), peer(ex), wide=False)
