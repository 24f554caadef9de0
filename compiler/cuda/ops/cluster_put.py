"""How the operations of compiler/ops/cluster_put.py are done on the GPU."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.cuda import bulk
from tilescale.compiler.ir.lowerings import lowers


@lowers("cuda", "cluster_put")
def lower_cluster_put(call: Any, cx: Any) -> Any:
    return bulk.put(cx, call)


@lowers("cuda", "await_puts")
def lower_await_puts(call: Any, cx: Any) -> Any:
    return bulk.await_puts(cx, call)
