"""How the operations of compiler/ops/argmax.py are done on the CPU: line by line, an element after the other,
once for each pick."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.cpu import convert
from tilescale.compiler.cpu.expr import loop, native_cast, seq
from tilescale.compiler.cpu.lower import Lowering as CpuLowering
from tilescale.compiler.cpu.tile import imm
from tilescale.compiler.cpu.view import like
from tilescale.compiler.ir.lowerings import lowers
from tilescale.compiler.ir.picks import Search, compared_in
from tilescale.compiler.ops.argmax import Picks
from tilescale.compiler.tvm_compat import tirx


@lowers("cpu", "argmax", "topk")
def lower_picks(call: Any, cx: CpuLowering) -> Any:
    picks, src = Picks.of(call), cx.tile(call.args[0])
    left = [*picks.extents, picks.count]
    values, indices = (like(cx.tile(r), left) for r in call.args[1:])
    compared = compared_in(src.dtype)

    def line(ids: list[Any]) -> Any:
        where = dict(zip(picks.others, ids, strict=True))

        def element(at: Any) -> Any:
            return src.index(
                *(at if n == picks.axis else where.get(n, imm(0)) for n in range(len(src.shape)))
            )

        def put(number: Any, at: Any) -> Any:
            value = tirx.BufferLoad(src.buf, [element(at)])  # to the bit
            index = tirx.BufferStore(indices.buf, at, [indices.index(*ids, number)])
            return seq([tirx.BufferStore(values.buf, value, [values.index(*ids, number)]), index])

        load = lambda at: native_cast(convert.load(src.buf, element(at), src.dtype), compared)  # noqa: E731
        return Search(picks.extent, picks.count, compared, picks.least, load, put).statements()

    def lines(ids: list[Any]) -> Any:
        if len(ids) == len(picks.extents):
            return line(ids)
        return loop("i", picks.extents[len(ids)], lambda n: lines([*ids, n]))

    return lines([])
