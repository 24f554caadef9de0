"""How the operations of compiler/ops/tma.py are done on the GPU."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.cuda import tma
from tilescale.compiler.ir.lowerings import Lowering, lowers
from tilescale.compiler.tvm_compat import tirx

lowers("cuda", "tma_load")(tma.load)
lowers("cuda", "await_stores")(tma.await_stores)


@lowers("cuda", "tma_store")
class TmaStore(Lowering):
    def shared_layouts(self, call: Any) -> dict[Any, Any]:
        return {call.args[0].source: tma.stored(call.args[0])}

    def lower(self, call: Any, cx: Any) -> Any:
        return tma.store(cx, call)


@lowers("cuda", "tma_reduce")
class TmaReduce(Lowering):
    def shared_layouts(self, call: Any) -> dict[Any, Any]:
        return {call.args[1].source: tma.stored(call.args[1])}

    def lower(self, call: Any, cx: Any) -> Any:
        return tma.combine(cx, call)


@lowers("cuda", "fence_writes")
def lower_fence_writes(call: Any, cx: Any) -> Any:
    return tirx.Evaluate(tirx.call_extern("void", "ts::fence_proxy_async_global"), call.span)
