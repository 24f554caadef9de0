"""How the operations of compiler/ops/copy.py are done on the CPU."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.cpu import convert, move
from tilescale.compiler.cpu.lower import Lowering as CpuLowering
from tilescale.compiler.cpu.ops.atomic import on_cpu
from tilescale.compiler.cpu.view import View
from tilescale.compiler.ir.lowerings import lowers
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.tvm_compat import tirx


@lowers("cpu", "copy")
def lower_copy(call: Any, cx: CpuLowering) -> Any:
    site = cx.site("copy", cx.name_of(call.args[1]), call, "")
    src, dst = (cx.view(r, reach=call.attrs["reach"], site=site) for r in call.args)
    # Else products behind it read the tensor itself.
    return sequence([] if cx.forward(call.args[1], src) else [move.copy(cx, src, dst)])


@lowers("cpu", "remote_copy")
def lower_remote_copy(call: Any, cx: CpuLowering) -> Any:
    side, reach = str(call.attrs["side"]), call.attrs["reach"]
    peer = cx.scalar(call.args[2])
    site = cx.site(
        "copy", cx.name_of(call.args[1 if side == "dst" else 0]), call, "pull" if side == "src" else ""
    )
    src = cx.view(call.args[0], peer=peer if side == "src" else None, reach=reach, site=site)
    dst = cx.view(call.args[1], peer=peer if side == "dst" else None, reach=reach, site=site)
    moved = _added(cx, src, dst, str(call.attrs["op"])) if "op" in call.attrs else move.copy(cx, src, dst)
    body = cx.transferred([moved], src if side == "src" else dst, peer, site)
    if len(call.args) > 3:
        told = peer if side == "dst" else None  # of what is pulled it is the own rank
        body += cx.signalled(call, call.args[3], call.args[4], str(call.attrs["signal_op"]), told, site)
    return sequence(body)


def _added(cx: CpuLowering, src: View, dst: View, kind: str) -> Any:
    """Each element combined with what lies there; atomic among processes, too."""

    def one(target: Any, source: Any) -> Any:
        value = convert.load(src.buf, source, src.dtype)
        return tirx.Evaluate(on_cpu(dst, kind, target, convert.cast(value, src.dtype, dst.dtype)))

    return move.each(cx, dst, src, one)
