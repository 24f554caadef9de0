"""How the operations of compiler/ops/wgmma.py are done on the GPU."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.cuda.wgmma import awaited, turned
from tilescale.compiler.ir.lowerings import lowers
from tilescale.compiler.ir.statements import sequence


@lowers("cuda", "await_products")
def lower_await_products(call: Any, cx: Any) -> Any:
    apart = len(call.args) - int(call.attrs["behind"])
    straight = bool(int(call.attrs["straight"]))
    pending = cx.await_own(int(call.attrs["pending"]))
    if pending is None:
        return sequence([])
    tiles, behind = ([t for t in part if cx.has(t)] for part in (call.args[:apart], call.args[apart:]))
    return awaited(cx, tiles, pending, call.span, behind, straight)


@lowers("cuda", "turn")
def lower_turn(call: Any, cx: Any) -> Any:
    return turned(cx, str(call.attrs["what"]), call.span)
