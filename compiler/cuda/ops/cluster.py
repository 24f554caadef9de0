"""How the operations of compiler/ops/cluster.py are done on NVIDIA's GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilescale.compiler.gpu.build import call
from tilescale.compiler.ir.lowerings import lowers

if TYPE_CHECKING:
    from tilescale.compiler.cuda.lower import Lowering as CudaLowering


@lowers("cuda", "cluster_arrive")
def cluster_arrive(node: Any, cx: CudaLowering) -> Any:
    relaxed = bool(int(node.attrs["relaxed"]))
    return call("cluster_arrive_relaxed" if relaxed else "cluster_arrive", span=node.span)


@lowers("cuda", "cluster_wait")
def cluster_wait(node: Any, cx: CudaLowering) -> Any:
    return call("cluster_wait", span=node.span)
