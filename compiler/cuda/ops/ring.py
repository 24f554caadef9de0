"""How the operations of compiler/ops/ring.py are done on the GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilescale.compiler.cuda import rings
from tilescale.compiler.cuda.ops import cp_async
from tilescale.compiler.ir.lowerings import lowers

if TYPE_CHECKING:
    from tilescale.compiler.cuda.lower import Lowering as CudaLowering


@lowers("cuda", "ring_acquire", "ring_commit", "ring_wait", "ring_release")
def lower_ring(call: Any, cx: CudaLowering) -> Any:
    if cx.role is None:
        return cp_async.token(cx, call)
    return getattr(rings, call.op.name.removeprefix("ts.ring_"))(cx, call)
