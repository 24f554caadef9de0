"""How the operations of compiler/ops/test.py are done on the CPU."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.builder.values import as_expr
from tilescale.compiler.cpu.lower import Lowering as CpuLowering
from tilescale.compiler.ir.lowerings import lowers
from tilescale.compiler.ir.signals import COMPARISONS
from tilescale.compiler.tvm_compat import tirx


@lowers("cpu", "test")
def lower_test(call: Any, cx: CpuLowering) -> Any:
    cx.waits = True  # a loop that looks lets the other blocks of its thread go on
    code = as_expr(COMPARISONS.index(str(call.attrs["cmp"])))
    return tirx.call_extern(
        "int32", "ts_test", cx.ctx, cx.address(call.args[0]), cx.scalar(call.args[1]), code
    )
