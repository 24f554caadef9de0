"""How the operations of compiler/ops/sync.py are done on GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilescale.compiler.ir.lowerings import lowers
from tilescale.compiler.ops.participants import behind_misfits
from tilescale.compiler.ops.sync import is_global

if TYPE_CHECKING:
    from tilescale.compiler.gpu.lower import Lowering as GpuLowering


@lowers("gpu", "barrier")
def lower_barrier(call: Any, cx: GpuLowering) -> Any:
    reach = str(call.attrs["reach"])
    if reach in ("grid", "device"):
        return cx.barrier(call)
    if reach == "cta_cluster":
        return behind_misfits(
            call, cx, lambda text: cx.fail("collective", call, text), cx.cluster_barrier(call)
        )
    return cx.sync(str(call.attrs["executor"]), "T.barrier")


@lowers("gpu", "team_sync")
def lower_team_sync(call: Any, cx: GpuLowering) -> Any:
    return behind_misfits(call, cx, lambda text: cx.fail("collective", call, text), cx.team_sync(call))


@lowers("gpu", "signal")
def lower_signal(call: Any, cx: GpuLowering) -> Any:
    return cx.signal(call) if is_global(call.args[0]) else cx.shared_signal(call)


@lowers("gpu", "wait")
def lower_wait(call: Any, cx: GpuLowering) -> Any:
    return cx.wait(call) if is_global(call.args[0]) else cx.shared_wait(call)
