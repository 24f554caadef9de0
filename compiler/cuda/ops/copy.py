"""How the operations of compiler/ops/copy.py are done on the GPU."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.cuda import bulk, cp_async, tma
from tilescale.compiler.cuda.tma import stored
from tilescale.compiler.ir.lowerings import Lowering, lowers


@lowers("cuda", "copy")
class Copy(Lowering):
    def shared_layouts(self, call: Any) -> dict[Any, Any]:
        return {call.args[0].source: stored(call.args[0])} if "bulk" in call.attrs else {}

    def lower(self, call: Any, cx: Any) -> Any:
        if "put" in call.attrs:
            return bulk.put(cx, call)
        if "bulk" in call.attrs:
            return tma.store(cx, call)
        return cp_async.load(cx, call) if cx.role is None else tma.load(cx, call)
