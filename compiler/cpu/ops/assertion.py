"""How the operations of compiler/ops/assertion.py are done on the CPU."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.cpu.lower import Lowering as CpuLowering
from tilescale.compiler.ir.lowerings import lowers
from tilescale.compiler.tvm_compat import tirx


@lowers("cpu", "assert")
def lower_assert(call: Any, cx: CpuLowering) -> Any:
    site = cx.site("assert", "", call, str(call.args[1].value))
    return tirx.IfThenElse(tirx.Not(cx.scalar(call.args[0])), cx.call("ts_fail", site), None)
