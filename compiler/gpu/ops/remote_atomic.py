"""How the operations of compiler/ops/remote_atomic.py are done on GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilescale.compiler.ir.lowerings import lowers

if TYPE_CHECKING:
    from tilescale.compiler.gpu.lower import Lowering as GpuLowering


@lowers("gpu", "remote_atomic")
def lower_remote_atomic(call: Any, cx: GpuLowering) -> Any:
    return cx.remote_atomic(call)
