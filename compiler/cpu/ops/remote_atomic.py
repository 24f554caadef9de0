"""How the operations of compiler/ops/remote_atomic.py are done on the CPU."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.cpu import convert as conversions
from tilescale.compiler.cpu import move
from tilescale.compiler.cpu.lower import Lowering as CpuLowering
from tilescale.compiler.cpu.ops.atomic import on_cpu
from tilescale.compiler.ir.lowerings import lowers
from tilescale.compiler.ir.operations import VOID
from tilescale.compiler.tvm_compat import tirx


@lowers("cpu", "remote_atomic")
def lower_remote_atomic(call: Any, cx: CpuLowering) -> Any:
    site = cx.site("atomic", cx.name_of(call.args[0]), call)
    v = cx.view(call.args[0], peer=cx.scalar(call.args[2]), reach="device", site=site)
    kind, operand = str(call.attrs["kind"]), cx.scalar(call.args[1])
    if str(call.ty) != str(VOID):
        cx._require_inside(v, call.args[0])
        return conversions.decode(on_cpu(v, kind, v.offset, operand), v.dtype)
    return move.each(cx, v, None, lambda target, _: tirx.Evaluate(on_cpu(v, kind, target, operand)))
