"""``T.device_assert``: a condition that must hold while the kernel runs."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.frontend.values import as_expr
from tilescale.compiler.ops.base import Access, TileOp, emit, register
from tilescale.compiler.tvm_compat import ir, tirx


def device_assert(condition: Any, msg: str = "") -> None:
    """Fails the launch, naming this line and ``msg``, where ``condition`` does not hold."""
    test = as_expr(condition, "bool")
    test = test if str(test.ty) == "bool" else tirx.NE(test, tirx.const(0, str(test.ty)))
    emit("assert", [test, ir.StringImm(str(msg))])


@register
class Assert(TileOp):
    name = "assert"

    def effects(self, call: Any) -> list[Access]:
        return []

    def lower_cpu(self, call: Any, cx: Any) -> Any:
        site = cx.site("assert", "", call, str(call.args[1].value))
        return tirx.IfThenElse(tirx.Not(cx.scalar(call.args[0])), cx.call("ts_fail", site), None)
