"""How the operation of compiler/ops/mma_sync.py is done on the GPU: the instruction, of registers that lie as
it has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilescale.compiler.cuda.ops.extern import address, in_order
from tilescale.compiler.ir.contexts import LayoutContext
from tilescale.compiler.ir.lowerings import Lowering, lowers
from tilescale.compiler.layout.loops import element_dtype
from tilescale.compiler.layout.tensor_cores import depth, kind_of
from tilescale.compiler.ops.mma_sync import each
from tilescale.compiler.tvm_compat import tirx
from tilescale.errors import TileSyntaxError

if TYPE_CHECKING:
    from tilescale.compiler.cuda.lower import Lowering as CudaLowering


@lowers("cuda", "mma_sync")
class MmaSync(Lowering["CudaLowering"]):
    def layouts(self, call: Any, cx: LayoutContext) -> list[Any]:
        return [in_order(call, call.args, "T.mma_sync", cx)]

    def lower(self, call: Any, cx: CudaLowering) -> Any:
        if not cx.target.matrix_products:
            raise TileSyntaxError(f"T.mma_sync needs sm_80, and this is {cx.target.arch}", loc=cx.here)
        a, b, c = call.args
        bits = 32 // each(element_dtype(a.source))
        sums = "f16_" if element_dtype(c.source) == "float16" else ""
        name = f"ts::mma_{sums}m16n8k{depth(bits)}_{kind_of(call)}"
        operands = [address(cx, r, r is c, call) for r in (c, a, b)]
        return tirx.Evaluate(tirx.call_extern("void", name, *operands), call.span)
