"""How the operations of compiler/ops/lanes.py are done on GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilescale.compiler.gpu.ops.reduce import emit_join
from tilescale.compiler.ir.lowerings import lowers
from tilescale.compiler.ir.statements import sequence

if TYPE_CHECKING:
    from tilescale.compiler.gpu.lower import Lowering as GpuLowering


@lowers("gpu", "join_lanes")
def lower_join_lanes(call: Any, cx: GpuLowering) -> Any:
    return emit_join(cx, call) if cx.has(call.args[0]) else sequence([])  # another warpgroup's
