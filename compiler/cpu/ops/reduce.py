"""How the operations of compiler/ops/reduce.py are done on the CPU."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.cpu.lower import Lowering as CpuLowering
from tilescale.compiler.cpu.reduce import emit_reduce
from tilescale.compiler.cpu.view import like
from tilescale.compiler.ir.lowerings import lowers


@lowers("cpu", "reduce")
def lower_reduce(call: Any, cx: CpuLowering) -> Any:
    src, dst = cx.tile(call.args[0]), cx.tile(call.args[1])
    axis = int(call.attrs["axis"]) + len(src.shape)
    dst = like(dst, [e for k, e in enumerate(src.shape) if k != axis])
    return emit_reduce(cx, src, dst, axis, str(call.attrs["op"]), bool(call.attrs["clear"]))
