"""A put, or a pull, with its signal by the warps that do nothing else (passes/remote_puts.py): what a
non-blocking ``T.copy(…, dst=rank, signal=s[i])`` of a tensor, or one with ``src=rank``, has become where a
block has such warps."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.ir.operations import VOID, register
from tilescale.compiler.ops.copy import RemoteCopy
from tilescale.compiler.tvm_compat import ir, tirx


def remote_put(call: Any, warps: int, depth: int) -> Any:
    """The put or pull that a ``ts.remote_copy`` asks for, by so many warps, each of whose threads has so many
    accesses under way."""
    attrs = {k: call.attrs[k] for k in ("executor", "reach", "signal_op", "side")}
    made = ir.Call(
        "ts.remote_put",
        list(call.args),
        attrs={**attrs, "warps": warps, "depth": depth},
        ret_ty=VOID,
        span=call.span,
    )
    return tirx.Evaluate(made, call.span)


@register
class RemotePut(RemoteCopy):
    """``ts.remote_put(src, dst, rank, counter, value)``: it begins where it stands and is complete where its
    signal is seen. The signal tells of it and of the block's puts and pulls before it. ``attrs["side"]``: the
    rank's, "dst" of a put and "src" of a pull."""

    name = "remote_put"
    levels = ("scheduled",)
    attributes = ("signal_op", "side", "warps", "depth")
    moves = in_place = False

    def nest(self, call: Any) -> Any:
        return None

    def queue(self, call: Any) -> str:
        return "put" if self.side(call) == "dst" else "pull"
