"""How the operations of compiler/ops/fence.py are done on GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilescale.compiler.ir.lowerings import lowers

if TYPE_CHECKING:
    from tilescale.compiler.gpu.lower import Lowering as GpuLowering


@lowers("gpu", "sync")
def lower_sync(call: Any, cx: GpuLowering) -> Any:
    return cx.sync(str(call.attrs["scope"]), str(call.attrs["why"]), bool(int(call.attrs["proxy"])))
