"""Atomic updates of a tensor by a whole tile: by TMA."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.cuda.tma import combine, stored
from tilescale.compiler.gpu.ops.atomic import lower_atomic
from tilescale.compiler.ir.lowerings import Lowering, lowers


@lowers("cuda", "atomic")
class Atomic(Lowering):
    def shared_layouts(self, call: Any) -> dict[Any, Any]:
        return {call.args[1].source: stored(call.args[1])} if "bulk" in call.attrs else {}

    def lower(self, call: Any, cx: Any) -> Any:
        return combine(cx, call) if "bulk" in call.attrs else lower_atomic(call, cx)
