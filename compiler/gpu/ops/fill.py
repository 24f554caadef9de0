"""T.fill on a GPU: threads store the elements (`TileOp.nest`)."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.ir.contexts import LoweringContext, StageContext
from tilescale.compiler.ir.lowerings import Lowering, lowers
from tilescale.compiler.passes.roles import root
from tilescale.compiler.tvm_compat import ir, structural_walk, tirx


@lowers("gpu", "fill")
class Fill(Lowering[LoweringContext]):
    def stage(self, call: Any, cx: StageContext) -> list[Any] | None:
        """A value that reads what is filled gets a name in front: it is one number, and C would read it anew
        for each element."""
        (dst, value), loads = call.args, list[Any]()
        structural_walk(value, (ir.TensorLoad, loads.append))
        filled = root(cx.program.func.body, dst.source)
        if not any(root(cx.program.func.body, e.source).same_as(filled) for e in loads):
            return None
        name = tirx.Var("value", value.ty)
        return [tirx.Bind(name, value, call.span), cx.again(call, [dst, name])]
