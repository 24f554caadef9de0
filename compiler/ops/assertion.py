"""``T.device_assert``: a condition that must hold while the kernel runs."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.builder.values import dtype_of, to_expr, truth
from tilescale.compiler.ir import source
from tilescale.compiler.ir.contexts import SimContext
from tilescale.compiler.ir.operations import Access, TileOp, register
from tilescale.compiler.ops.base import emit
from tilescale.compiler.tvm_compat import ir
from tilescale.errors import TileTypeError


def device_assert(condition: Any, msg: str = "") -> None:
    """Fails the launch, naming this line and ``msg``, where ``condition`` does not hold: a comparison, or an
    integer that is zero.

    Raises:
        TileTypeError: a float, of which it is not clear which values should hold, or a message that is no
        text.
    """
    loc = source.current()
    if not isinstance(msg, str):
        raise TileTypeError(
            f"T.device_assert's message is {msg}", loc=loc, expected="a condition, then a text"
        )
    test = to_expr(condition, "a condition")
    dtype = str(dtype_of(test))
    if "float" in dtype:
        raise TileTypeError(
            f"T.device_assert of a {dtype}",
            loc=loc,
            expected="a comparison",
            hint=f"T.device_assert({condition} != 0.0)",
        )
    emit("assert", [truth(test), ir.StringImm(str(msg))])


_HINT = "arguments for which it holds, or a kernel that makes it hold"


@register
class Assert(TileOp):
    name = "assert"
    in_lanes = in_iterations = True

    def effects(self, call: Any) -> list[Access]:
        return []

    def simulate(self, call: Any, cx: SimContext) -> Any:
        from tilescale.compiler.findings import Finding
        from tilescale.compiler.sim.nest import fails

        test, message = cx.scalar(call.args[0]), str(call.args[1].value)
        site = cx.site(call, "T.device_assert")

        def run(ex: Any) -> None:
            if fails(ex, test(ex)):
                ex.machine.report.add(
                    Finding("assertion", message or "the condition does not hold", ex.where(site), hint=_HINT)
                )

        return run
