"""How the operations of compiler/ops/assertion.py are done on GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilescale.compiler.ir.lowerings import lowers
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.tvm_compat import tirx

if TYPE_CHECKING:
    from tilescale.compiler.gpu.lower import Lowering as GpuLowering


@lowers("gpu", "assert")
def lower_assert(call: Any, cx: GpuLowering) -> Any:
    failed = cx.fail("assert", call, str(call.args[1].value))
    return tirx.IfThenElse(tirx.Not(cx.scalar(call.args[0])), failed, None)


@lowers("gpu", "assume")
def lower_assume(call: Any, cx: GpuLowering) -> Any:
    return sequence([])  # what stands behind it is lowered by what it says (State.statements)
