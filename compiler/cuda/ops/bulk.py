"""How the operations of compiler/ops/bulk.py are done on the GPU."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.cuda.tma import await_stores
from tilescale.compiler.ir.lowerings import lowers
from tilescale.compiler.tvm_compat import tirx

lowers("cuda", "await_stores")(await_stores)


@lowers("cuda", "fence_writes")
def lower_fence_writes(call: Any, cx: Any) -> Any:
    return tirx.Evaluate(tirx.call_extern("void", "ts::fence_proxy_async_global"), call.span)
