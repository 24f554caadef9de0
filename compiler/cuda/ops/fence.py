"""How the fences of NVIDIA's GPUs between threads and asynchronous units are done (compiler/ops/fence.py)."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.ir.lowerings import lowers
from tilescale.compiler.tvm_compat import ir, tirx


@lowers("cuda", "proxy_fence")
def lower_proxy_fence(call: Any, cx: Any) -> Any:
    """By each thread for itself: what it wrote, or acquired from others, comes before what TMA does behind
    it."""
    made = tirx.call_extern("void", "ts::fence_proxy_async_global")
    return tirx.Evaluate(
        ir.Call(made.op, list(made.args), attrs={"comment": str(call.attrs["why"])}, ret_ty=made.ty),
        call.span,
    )
