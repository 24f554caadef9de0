"""How the operations of compiler/ops/wgmma.py are done on the GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tilescale.compiler.cuda import wgmma, wgmma_sp
from tilescale.compiler.cuda.ops import gemm, gemm_sp
from tilescale.compiler.gpu.ops.gemm import both_operands, stage
from tilescale.compiler.ir.contexts import LayoutContext, StageContext
from tilescale.compiler.ir.lowerings import Lowering, lowers
from tilescale.compiler.ir.source import loc_of
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.layout.infer import Demand
from tilescale.compiler.layout.instructions import wgmma_operand
from tilescale.compiler.layout.loops import bits_of, element_dtype, in_registers
from tilescale.compiler.layout.products import extents, wgmma_fragments
from tilescale.compiler.layout.sparse import sparse_fragments
from tilescale.compiler.layout.tensor_cores import HALVES

if TYPE_CHECKING:
    from tilescale.compiler.cuda.lower import Lowering as CudaLowering


@lowers("cuda", "wgmma")
class Wgmma(Lowering["CudaLowering"]):
    demands = True

    def stage(self, call: Any, cx: StageContext) -> list[Any] | None:
        a = call.args[0].source
        return stage(call, cx, (element_dtype(a) in HALVES or bits_of(a) == 8) and gemm.held_left(call, cx))

    def layouts(self, call: Any, cx: LayoutContext) -> list[Any]:
        (a, _, c), loc = (r.source for r in call.args[:3]), loc_of(call.span)
        out = []
        for f, down, across in wgmma_fragments(call, cx.executor_of(call).threads):
            what = f"T.gemm (wgmma, {down} × {across} warpgroups)"
            out.append([Demand(c, f, what, loc)])
            if in_registers(a):
                held = replace(
                    wgmma_operand(f.shape[0], extents(call)[2], (down, across), bits_of(a)),
                    first_thread=f.first_thread,
                )
                out[-1].append(Demand(a, held, f"{what}'s left operand", loc))
        return out

    def shared_layouts(self, call: Any) -> dict[Any, Any]:
        return gemm.shared_layouts(call)

    def insists(self, call: Any) -> bool:
        return True

    def lower(self, call: Any, cx: CudaLowering) -> Any:
        return wgmma.emit(cx, call, *both_operands(cx, call), extents(call))


@lowers("cuda", "wgmma_sp")
class WgmmaSp(Lowering["CudaLowering"]):
    demands = True

    def layouts(self, call: Any, cx: LayoutContext) -> list[Any]:
        made = sparse_fragments(call, cx.executor_of(call).threads)
        return [
            [
                Demand(
                    call.args[2].source, f, f"T.gemm_sp (wgmma.sp, {wm} × {wn} warpgroups)", loc_of(call.span)
                )
            ]
            for f, wm, wn in made
        ]

    def shared_layouts(self, call: Any) -> dict[Any, Any]:
        return gemm_sp.shared_layouts(call)

    def lower(self, call: Any, cx: CudaLowering) -> Any:
        return wgmma_sp.emit(cx, call)


@lowers("cuda", "await_products")
def lower_await_products(call: Any, cx: CudaLowering) -> Any:
    apart = len(call.args) - int(call.attrs["behind"])
    straight = bool(int(call.attrs["straight"]))
    pending = cx.await_own(int(call.attrs["pending"]))
    if pending is None:
        return sequence([])
    tiles, behind = ([t for t in part if cx.has(t)] for part in (call.args[:apart], call.args[apart:]))
    return wgmma.awaited(cx, tiles, pending, call.span, behind, straight)


@lowers("cuda", "ping_pong_barrier")
def lower_ping_pong_barrier(call: Any, cx: CudaLowering) -> Any:
    return wgmma.ping_pong(cx, str(call.attrs["what"]), call.span)
