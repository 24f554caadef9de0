"""``T.device_assert`` and ``T.assume``: conditions that hold while a kernel runs."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.builder import state as bld
from tilescale.compiler.builder.values import dtype_of, to_expr, truth
from tilescale.compiler.ir import source
from tilescale.compiler.ir.contexts import SimContext
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.operations import Access, TileOp, register
from tilescale.compiler.ops.base import emit
from tilescale.compiler.tvm_compat import ir, tirx
from tilescale.errors import TileTypeError, TileValueError


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


def assume(condition: Any) -> None:
    """A promise, on which what stands behind it in its body may rely: that an index lies inside of a tensor.

    Of an extent's divisor (``N % 8 == 0`` of a ``T.dynamic``) it is ``multiple_of=8``, which each call
    checks. Any other is checked by the simulator and on the CPU. On a GPU nobody looks: what a kernel does
    where it does not hold is not defined.

    Raises:
        TileTypeError: no condition. TileValueError: one that is false.
    """
    b, loc = bld.current(), source.current()
    e = condition if isinstance(condition, bool) else truth(condition)
    for part in [e] if isinstance(e, bool) else conjuncts(e):
        known = part if isinstance(part, bool) else constant(part)
        if known is not None and not known:
            raise TileValueError("T.assume of what is false", loc=loc)
        if known is not None:
            continue
        name, number = multiple_of(part)
        if number > 0:
            b.promise(name, number)
        else:
            emit("assume", [part])


def multiple_of(e: Any) -> tuple[str, int]:
    """Of ``N % 8 == 0`` the symbol and the number; 0 of any other condition."""
    rest = e.a if isinstance(e, tirx.EQ) and constant(e.b) == 0 else None
    if not isinstance(rest, tirx.FloorMod):
        return "", 0
    name = next((n for n, v in bld.current().symbols.items() if rest.a.same_as(v)), "")
    return name, (constant(rest.b) or 0) if name else 0


def conjuncts(e: Any) -> list[Any]:
    """The conditions that all have to hold for one to hold."""
    return [*conjuncts(e.a), *conjuncts(e.b)] if isinstance(e, tirx.And) else [e]


_HINT = "arguments for which it holds, or a kernel that makes it hold"


@register
class Assert(TileOp):
    name = "assert"
    spelling = "device_assert"
    in_lanes = in_iterations = True

    def effects(self, call: Any) -> list[Access]:
        return []

    def message(self, call: Any) -> str:
        """What failing says."""
        return str(call.args[1].value)

    def simulate(self, call: Any, cx: SimContext) -> Any:
        from tilescale.compiler.findings import Finding
        from tilescale.compiler.sim.nest import fails

        test, message = cx.scalar(call.args[0]), self.message(call)
        site = cx.site(call, f"T.{self.spelling}")

        def run(ex: Any) -> None:
            if fails(ex, test(ex)):
                ex.machine.report.add(
                    Finding("assertion", message or "the condition does not hold", ex.where(site), hint=_HINT)
                )

        return run


@register
class Assume(Assert):
    name = "assume"
    spelling = "assume"

    def message(self, call: Any) -> str:
        return "what T.assume promises does not hold"
