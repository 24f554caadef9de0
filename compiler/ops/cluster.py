"""Blocks of a cluster that arrive at its barrier at one place and wait at another (PTX ISA,
"barrier.cluster"). An arrival releases what the executor did before it, a wait acquires what the others'
arrivals released; what is done between the two is ordered with nothing. All threads of all blocks of the
cluster do both, in turn."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.builder import state as bld
from tilescale.compiler.builder.values import as_expr
from tilescale.compiler.ir import source
from tilescale.compiler.ir.contexts import SimContext
from tilescale.compiler.ir.operations import Access, TileOp, register
from tilescale.compiler.ops.base import emit
from tilescale.compiler.ops.sync import not_in_parallel
from tilescale.compiler.tvm_compat import tirx
from tilescale.errors import TileSyntaxError


def cluster_arrive() -> None:
    """This block has come to the cluster's barrier, and goes on; ``T.cluster_wait()`` comes behind.

    Raises:
        TileSyntaxError: inside T.Scale below the block, or in T.Parallel.
    """
    _emit("cluster_arrive", {"relaxed": 0})


def cluster_arrive_relaxed() -> None:
    """As :func:`cluster_arrive`, and releases nothing: what was written before it is not known behind the
    wait."""
    _emit("cluster_arrive", {"relaxed": 1}, "cluster_arrive_relaxed")


def cluster_wait() -> None:
    """Until all blocks of the cluster have come to ``T.cluster_arrive()``. As :func:`cluster_arrive`."""
    _emit("cluster_wait", {})


def block_rank_in_cluster() -> Any:
    """The block's number within its cluster, x first; 0 where clusters are of one block.

    Raises:
        TileSyntaxError: outside T.Kernel.
    """
    launch, rank, stride = bld.current().launch, None, 1
    if launch is None:
        raise TileSyntaxError("T.block_rank_in_cluster stands outside T.Kernel", loc=source.current())
    for block, extent in zip(launch.block_vars, launch.cluster, strict=False):
        if extent > 1:
            place = tirx.floormod(block, as_expr(extent)) * as_expr(stride)
            rank = place if rank is None else rank + place
        stride *= extent
    return as_expr(0) if rank is None else rank


def _emit(name: str, attrs: dict[str, Any], word: str = "") -> None:
    what, b = f"T.{word or name}", bld.current()
    not_in_parallel(what)
    if b.launch is None or b.executor != "block":
        raise TileSyntaxError(
            f"{what} stands {'outside T.Kernel' if b.launch is None else f'in a {b.executor}'}",
            loc=source.current(),
            expected="a statement of the whole block",
            hint="behind the T.Scale, or T.cluster_sync()",
        )
    emit(name, [], {**attrs, "reach": "cta_cluster"})


@register
class ClusterArrive(TileOp):
    name = "cluster_arrive"
    attributes = ("relaxed",)
    waits = True

    def synchronizes(self, call: Any) -> str:
        return "cta_cluster"  # with the wait that follows: all blocks come, and what is stored is complete

    def effects(self, call: Any) -> list[Access]:
        return []

    def simulate(self, call: Any, cx: SimContext) -> Any:
        from tilescale.compiler.sim import arrivals

        relaxed, each = bool(int(call.attrs["relaxed"])), cx.executor_count()
        site = cx.site(call, f"T.cluster_arrive{'_relaxed' if relaxed else ''}")
        return lambda ex: arrivals.arrive(ex, arrivals.of_cluster(ex, each), relaxed, site)


@register
class ClusterWait(TileOp):
    name = "cluster_wait"
    waits = True

    def synchronizes(self, call: Any) -> str:
        return "cta_cluster"

    def effects(self, call: Any) -> list[Access]:
        return []

    def simulate(self, call: Any, cx: SimContext) -> Any:
        from tilescale.compiler.sim import arrivals

        site, each = cx.site(call, "T.cluster_wait"), cx.executor_count()
        return lambda ex: arrivals.wait(ex, arrivals.of_cluster(ex, each), site)
