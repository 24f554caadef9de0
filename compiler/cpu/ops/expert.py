"""How the operations of compiler/ops/expert.py are done on the CPU."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.builder.values import as_expr
from tilescale.compiler.cpu.lower import Lowering as CpuLowering
from tilescale.compiler.ir.lowerings import lowers
from tilescale.compiler.tvm_compat import tirx


@lowers("cpu", "set_max_nreg", "fence_proxy_async", "wait_wgmma")
def lower_expert(call: Any, cx: CpuLowering) -> Any:
    return tirx.Evaluate(as_expr(0))
