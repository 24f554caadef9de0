"""How the operations of compiler/ops/expert.py are done on the GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilescale.compiler.cuda.wgmma import awaited
from tilescale.compiler.gpu.build import call
from tilescale.compiler.ir.lowerings import lowers
from tilescale.compiler.ops.wgmma import FREE
from tilescale.compiler.tvm_compat import ir, structural_walk, tirx

if TYPE_CHECKING:
    from tilescale.compiler.cuda.lower import Lowering as CudaLowering


@lowers("cuda", "set_max_nreg")
def set_max_nreg(node: Any, cx: CudaLowering) -> Any:
    if not cx.target.moves_registers:
        return tirx.Evaluate(tirx.IntImm("int32", 0))
    cx.one_block = True  # PTX ISA, "setmaxnreg": the kernel must say how many registers its blocks may have
    return call(
        f"{'more' if int(node.attrs['more']) else 'fewer'}_registers<{int(node.attrs['count'])}>",
        span=node.span,
    )


@lowers("cuda", "fence_proxy_async")
def fence_proxy_async(node: Any, cx: CudaLowering) -> Any:
    return (
        call("fence_proxy_async", span=node.span)
        if cx.target.proxies
        else tirx.Evaluate(tirx.IntImm("int32", 0))
    )


@lowers("cuda", "wait_wgmma")
def wait_wgmma(node: Any, cx: CudaLowering) -> Any:
    """``wait_group``, and all accumulators that products may be writing named behind it."""
    found: dict[Any, Any] = {}

    def look(c: Any) -> None:
        if c.op.name == "ts.wgmma" and int(c.attrs["pending"]) == FREE and c.args[2].source in cx.places:
            found.setdefault(c.args[2].source, c.args[2])

    structural_walk(cx.program.func.body, (ir.Call, look))
    return awaited(cx, list(found.values()), int(node.attrs["count"]), node.span)
