"""``T.test``: looks at an own counter once, without waiting.

Where the condition holds, what the signals released comes before what follows, as behind a ``T.wait``; where
it does not, nothing is ordered. On a GPU one thread looks for its executor and passes on what it saw.
"""

from __future__ import annotations

from typing import Any

from tilescale.compiler.builder import state as bld
from tilescale.compiler.builder.values import convert
from tilescale.compiler.ir import source
from tilescale.compiler.ir.contexts import SimContext
from tilescale.compiler.ir.operations import Access, TileOp, register
from tilescale.compiler.ir.signals import COMPARISONS
from tilescale.compiler.ops.sync import counter, not_in_parallel
from tilescale.compiler.tvm_compat import ir, tirx
from tilescale.errors import TileValueError


def test(counter_: Any, value: Any = 1, cmp: str = "ge") -> Any:
    """Whether an own counter compares with ``value`` (ge, eq, gt, ne, le, lt) now; if so, later accesses come
    after its signals.

    Raises:
        TileValueError: another comparison. TileTypeError: no counter of the open scale.
    """
    not_in_parallel("T.test")
    target = counter(counter_, "T.test")
    if cmp not in COMPARISONS:
        raise TileValueError(
            f"T.test with cmp={cmp!r}", loc=source.current(), expected="one of " + ", ".join(COMPARISONS)
        )
    b = bld.current()
    seen = tirx.Var(b.unique("seen"), "int32")
    attrs = {"cmp": cmp, "executor": b.executor, "reach": b.reach}
    call = ir.Call(
        "ts.test",
        [target.ir(), convert(value, "int64")],
        attrs=attrs,
        ret_ty=ir.PrimType("int32"),
        span=b.span(),
    )
    b.emit(tirx.Bind(seen, call, b.span()))
    return tirx.NE(seen, tirx.IntImm("int32", 0))


@register
class Test(TileOp):
    name = "test"
    attributes = ("cmp",)

    def acquires(self, call: Any) -> bool:
        return True

    def effects(self, call: Any) -> list[Access]:
        return [Access(call.args[0], "read")]

    def order(self, call: Any) -> tuple[bool, bool]:
        return False, True

    def simulate(self, call: Any, cx: SimContext) -> Any:
        flag, value, cmp = cx.view(call.args[0], call), cx.scalar(call.args[1]), str(call.attrs["cmp"])
        site, reach = cx.awaiting(call.args[0], call), str(call.attrs["reach"])
        cx.peeking(call.args[0])

        def run(ex: Any) -> int:
            counter = flag.counter(ex)
            return 0 if counter is None else int(ex.machine.test(ex, counter, cmp, value(ex), site, reach))

        return run
