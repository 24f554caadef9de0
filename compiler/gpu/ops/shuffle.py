"""How the operations of compiler/ops/shuffle.py are done on GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilescale.compiler.ir.lowerings import lowers
from tilescale.compiler.ops.shuffle import mask_of
from tilescale.compiler.tvm_compat import tirx

if TYPE_CHECKING:
    from tilescale.compiler.gpu.lower import Lowering as GpuLowering


@lowers("gpu", "shuffle")
def lower_shuffle(call: Any, cx: GpuLowering) -> Any:
    dst, value, by = call.args
    buf, flat, _, _ = cx.access(dst.source, [r.min for r in dst.region], call, True)
    width = tirx.IntImm("int32", int(call.attrs["width"]))
    given = [cx.scalar(value), cx.scalar(by), width, *lanes(call)]
    made = tirx.call_extern(str(buf.ty.dtype), f"ts::lane_{call.attrs['kind']}", *given)
    return tirx.BufferStore(buf, made, [flat], call.span)


@lowers("gpu", "sync_threads")
def lower_sync_threads(call: Any, cx: GpuLowering) -> Any:
    return cx.numbered_barrier(int(call.attrs["barrier"]), int(call.attrs["count"]))


def lanes(call: Any) -> list[Any]:
    """The last argument of what some of a warp's lanes do."""
    return [tirx.IntImm("uint32", mask_of(call))] if "mask" in call.attrs else []


@lowers("gpu", "arrive_threads")
def lower_arrive_threads(call: Any, cx: GpuLowering) -> Any:
    return cx.named_barrier(int(call.attrs["barrier"]), int(call.attrs["count"]), waits=False)
