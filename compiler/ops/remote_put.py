"""A put with its signal by the warps that do nothing else (passes/remote_puts.py): what a non-blocking
``T.copy(…, dst=rank, signal=s[i])`` of a tensor has become where a block has such warps."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.ir.operations import VOID, register
from tilescale.compiler.ops.copy import RemoteCopy
from tilescale.compiler.tvm_compat import ir, tirx


def remote_put(call: Any, warps: int) -> Any:
    """The put that a ``ts.remote_copy`` asks for, by so many warps."""
    attrs = {k: call.attrs[k] for k in ("executor", "reach", "signal_op")}
    made = ir.Call(
        "ts.remote_put", list(call.args), attrs={**attrs, "warps": warps}, ret_ty=VOID, span=call.span
    )
    return tirx.Evaluate(made, call.span)


@register
class RemotePut(RemoteCopy):
    """``ts.remote_put(src, dst, rank, counter, value)``: it begins where it stands and is complete where its
    signal is seen. The signal tells of it and of the block's puts before it."""

    name = "remote_put"
    levels = ("scheduled",)
    attributes = ("signal_op", "warps")
    moves = in_place = False

    def side(self, call: Any) -> str:
        return "dst"

    def nest(self, call: Any) -> Any:
        return None

    def queue(self, call: Any) -> str:
        return "put"
