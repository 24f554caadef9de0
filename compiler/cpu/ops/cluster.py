"""How the operations of compiler/ops/cluster.py are done on the CPU."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.builder.values import as_expr
from tilescale.compiler.cpu.lower import Lowering as CpuLowering
from tilescale.compiler.ir.lowerings import lowers


@lowers("cpu", "cluster_arrive")
def lower_cluster_arrive(call: Any, cx: CpuLowering) -> Any:
    # Relaxed arrivals release here, too, which no program can tell.
    return cx.call("ts_cluster_arrive", as_expr(cx.executor_count()))


@lowers("cpu", "cluster_wait")
def lower_cluster_wait(call: Any, cx: CpuLowering) -> Any:
    cx.waits = True
    return cx.call("ts_cluster_wait", as_expr(cx.executor_count()), cx.site("barrier", "cta_cluster", call))
