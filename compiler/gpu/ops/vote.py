"""How the operations of compiler/ops/vote.py are done on GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilescale.compiler.gpu.ops.shuffle import lanes
from tilescale.compiler.ir.lowerings import lowers
from tilescale.compiler.tvm_compat import tirx

if TYPE_CHECKING:
    from tilescale.compiler.gpu.lower import Lowering as GpuLowering


@lowers("gpu", "vote")
def lower_vote(call: Any, cx: GpuLowering) -> Any:
    kind = str(call.attrs["kind"])
    given = [] if kind == "active" else [cx.scalar(call.args[1])]
    return _stored(call, cx, f"ts::vote_{kind}", [*given, *lanes(call)])


@lowers("gpu", "block_vote")
def lower_block_vote(call: Any, cx: GpuLowering) -> Any:
    _, number, threads = cx.barrier_of("block")
    given = [cx.scalar(call.args[1]), number, tirx.IntImm("int32", threads)]
    return _stored(call, cx, f"ts::block_{call.attrs['kind']}", given)


def _stored(call: Any, cx: GpuLowering, name: str, given: list[Any]) -> Any:
    dst = call.args[0]
    buf, flat, _, _ = cx.access(dst.source, [r.min for r in dst.region], call, True)
    return tirx.BufferStore(buf, tirx.call_extern(str(buf.ty.dtype), name, *given), [flat], call.span)
