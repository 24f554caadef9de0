"""How the operation of compiler/ops/dependent.py is done on NVIDIA's GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilescale.compiler.gpu.build import call
from tilescale.compiler.ir.lowerings import lowers
from tilescale.compiler.tvm_compat import tirx

if TYPE_CHECKING:
    from tilescale.compiler.cuda.lower import Lowering as CudaLowering


@lowers("cuda", "pdl_trigger")
def pdl_trigger(node: Any, cx: CudaLowering) -> Any:
    if not cx.target.dependent_launches or cx.dependent:  # which has said so at its beginning
        return tirx.Evaluate(tirx.IntImm("int32", 0))
    return call("admit_launches", span=node.span)
