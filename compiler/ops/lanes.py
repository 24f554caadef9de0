"""Sums that lanes keep apart (scheduled level of a GPU only): where they add theirs up
(passes/defer_cross_lane_sums.py)."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.ir.contexts import SimContext
from tilescale.compiler.ir.operations import VOID, Access, TileOp, register
from tilescale.compiler.tvm_compat import ir, tirx


def join_lanes(tile: Any, masks: tuple[int, ...], span: Any) -> Any:
    """``ts.join_lanes(tile)``: every element becomes the sum of what the lanes have of it that differ in the
    bits of ``masks``."""
    attrs = {"executor": "block", "masks": ",".join(map(str, masks))}
    return tirx.Evaluate(ir.Call("ts.join_lanes", [tile], attrs=attrs, ret_ty=VOID, span=span), span)


@register
class JoinLanes(TileOp):
    name = "join_lanes"
    levels = ("scheduled",)
    attributes = ("masks",)

    def effects(self, call: Any) -> list[Access]:
        return [Access(call.args[0], "read"), Access(call.args[0], "write")]

    def simulate(self, call: Any, cx: SimContext) -> Any:
        raise NotImplementedError  # made for GPUs alone, behind everything that the simulator runs
