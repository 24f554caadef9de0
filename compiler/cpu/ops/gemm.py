"""How the operations of compiler/ops/gemm.py are done on the CPU."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.cpu.gemm import emit_gemm
from tilescale.compiler.cpu.lower import Lowering as CpuLowering
from tilescale.compiler.cpu.view import matrix
from tilescale.compiler.ir.lowerings import lowers
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.tvm_compat import tirx


@lowers("cpu", "gemm")
def lower_gemm(call: Any, cx: CpuLowering) -> Any:
    tiles = cx.tile(call.args[0]), cx.whole(cx.operand(call.args[1]), call.args[1]), cx.tile(call.args[2])
    a, b, c = (matrix(tile) for tile in tiles)
    trans = {"trans_a": bool(call.attrs["trans_a"]), "trans_b": bool(call.attrs["trans_b"])}
    known = constant(call.args[3])
    if known is not None:
        done = emit_gemm(cx, a, b, c, clear=bool(known), **trans)
    else:
        fresh, more = (
            emit_gemm(cx, a, b, c, clear=True, **trans),
            emit_gemm(cx, a, b, c, clear=False, **trans),
        )
        done = tirx.IfThenElse(cx.scalar(call.args[3]), fresh, more)
    # instrumented kernels log their products too: what computing overlaps with is half of a timeline
    return cx.observed(done, cx.site("gemm", cx.name_of(call.args[2]), call)) if cx.instrument else done
