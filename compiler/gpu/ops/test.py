"""How the operations of compiler/ops/test.py are done on GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilescale.compiler.ir.lowerings import lowers
from tilescale.compiler.ops.sync import is_global

if TYPE_CHECKING:
    from tilescale.compiler.gpu.lower import Lowering as GpuLowering


@lowers("gpu", "test")
def lower_test(call: Any, cx: GpuLowering) -> Any:
    return cx.test(call) if is_global(call.args[0]) else cx.shared_test(call)
