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
    """``wait_group``, and all accumulators named behind it that products of this warpgroup may be writing.
    One that only another warpgroup has would take registers for nothing."""
    found: dict[Any, Any] = {}
    others = _of_others(cx.program.func.body, node)

    def look(c: Any) -> None:
        free = c.op.name == "ts.wgmma" and int(c.attrs["pending"]) == FREE
        if free and c.args[2].source in cx.places and c not in others:
            found.setdefault(c.args[2].source, c.args[2])

    structural_walk(cx.program.func.body, (ir.Call, look))
    return awaited(cx, list(found.values()), int(node.attrs["count"]), node.span)


def _of_others(body: Any, node: Any) -> set[Any]:
    """The calls that no warpgroup makes which makes ``node``: those in the other branch of a condition on the
    warpgroup's number."""
    numbers: set[Any] = set()
    others: set[Any] = set()

    def name(s: Any) -> None:
        if isinstance(s.value, ir.Call) and s.value.op.name == "ts.scale_index":
            numbers.update([s.var] if str(s.value.args[0].value) == "warpgroup" else [])

    def inside(s: Any) -> set[Any]:
        calls: set[Any] = set()
        if s is not None:
            structural_walk(s, (ir.Call, calls.add))
        return calls

    def branch(s: Any) -> None:
        asked: list[Any] = []
        structural_walk(s.condition, ((ir.Var, ir.TensorLoad, ir.Call), asked.append))
        then, other = inside(s.then_case), inside(s.else_case)
        if asked and all(v in numbers for v in asked) and (node in then) != (node in other):
            others.update(other - then if node in then else then - other)

    structural_walk(body, (tirx.Bind, name))
    structural_walk(body, (tirx.IfThenElse, branch))
    return others
