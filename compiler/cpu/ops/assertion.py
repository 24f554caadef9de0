"""How the operations of compiler/ops/assertion.py are done on the CPU."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.cpu.lower import Lowering as CpuLowering
from tilescale.compiler.ir.lowerings import lowers
from tilescale.compiler.ir.operations import find
from tilescale.compiler.ops.assertion import Assert
from tilescale.compiler.tvm_compat import tirx


@lowers("cpu", "assert", "assume")
def lower_assert(call: Any, cx: CpuLowering) -> Any:
    op = find(call)
    assert isinstance(op, Assert)
    site = cx.site("assert", "", call, op.message(call))
    return tirx.IfThenElse(tirx.Not(cx.scalar(call.args[0])), cx.call("ts_fail", site), None)
