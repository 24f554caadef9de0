"""T.gemm_sp on any GPU: A is written out into shared memory and multiplied as a whole. A target with
instructions for it overrides this where they take the product."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.gpu.ops.gemm import Own, into_shared
from tilescale.compiler.ir.contexts import StageContext
from tilescale.compiler.ir.lowerings import Lowering, lowering, lowers
from tilescale.compiler.layout.loops import element_dtype, in_registers
from tilescale.compiler.layout.sparse import dense_shape
from tilescale.compiler.ops.gemm_sp import as_gemm


@lowers("gpu", "gemm_sp")
class GemmSp(Lowering[Own]):
    def stage(self, call: Any, cx: StageContext) -> list[Any] | None:
        """A nest that writes A out, and the product."""
        a, b, c, clears, e = call.args
        m, k = dense_shape(call)
        copies, (a, e) = into_shared(call, cx, (a, e), [r for r in (a, e) if in_registers(r.source)])
        dense = cx.tile(f"{a.source.name}_dense", (m, k), element_dtype(a.source), "shared", call.span)
        again = cx.again(call, [a, b, c, clears, e])
        nest, product = as_gemm(again.value, dense)
        staged = lowering(product.value, cx.program.target).stage(product.value, cx)
        return [*copies, nest, *(staged or [product])]
