"""How the operations of compiler/ops/fill.py are done on the CPU."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.cpu import move
from tilescale.compiler.cpu.lower import Lowering as CpuLowering
from tilescale.compiler.ir.lowerings import lowers


@lowers("cpu", "fill")
def lower_fill(call: Any, cx: CpuLowering) -> Any:
    return move.fill(cx, cx.view(call.args[0]), cx.scalar(call.args[1]))
