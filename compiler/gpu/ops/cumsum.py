"""Running sums and maxima on a GPU: each line by one thread, in order. Lines lie in shared memory."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.ir.contexts import LoweringContext, StageContext
from tilescale.compiler.ir.lowerings import Lowering, lowers
from tilescale.compiler.layout.loops import element_dtype, in_registers


@lowers("gpu", "cumsum")
class CumSum(Lowering[LoweringContext]):
    def stage(self, call: Any, cx: StageContext) -> list[Any] | None:
        """Tiles in registers go through shared memory."""
        src, dst = call.args
        if not in_registers(src.source) and not in_registers(dst.source):
            return None
        shape = [int(r.extent) for r in src.region]
        before, after = [], []
        frm = to = None
        if in_registers(src.source):
            frm = cx.tile(f"{src.source.name}_shared", shape, element_dtype(src.source), "shared", call.span)
            before.append(cx.copy(src, frm, call))
        if in_registers(dst.source):
            same = frm is not None and element_dtype(dst.source) == element_dtype(src.source)
            to = (
                frm
                if same
                else cx.tile(
                    f"{dst.source.name}_shared", shape, element_dtype(dst.source), "shared", call.span
                )
            )
            after.append(cx.copy(to, dst, call))
        return [*before, cx.again(call, [frm or src, to or dst]), *after]
