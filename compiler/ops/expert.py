"""Expert: what a thread says to the machine alone. It means nothing but time, or order between proxies, so
other targets do nothing."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.builder import state as bld
from tilescale.compiler.builder.values import as_expr, binary, compare
from tilescale.compiler.ir import source
from tilescale.compiler.ir.contexts import SimContext
from tilescale.compiler.ir.operations import Access, TileOp, register
from tilescale.compiler.ir.scales import EXECUTORS, WARP, WARPGROUP
from tilescale.compiler.ops.base import emit
from tilescale.compiler.tvm_compat import ir
from tilescale.errors import TileSyntaxError, TileValueError
from tilescale.language.booleans import require_bools


def set_max_nreg(reg_count: int, is_inc: int | bool) -> None:
    """Each thread of the warpgroup has so many registers from here on (PTX ISA, "setmaxnreg"): more, or
    fewer.

    Raises:
        TileValueError: no multiple of 8 from 24 to 256. TileSyntaxError: not inside ``T.Scale("warpgroup")``.
    """
    require_bools(is_inc=is_inc)
    if not isinstance(reg_count, int) or reg_count % 8 or not 24 <= reg_count <= 256:
        raise TileValueError(
            f"{reg_count} registers", loc=source.current(), expected="a multiple of 8 from 24 to 256"
        )
    b = bld.current()
    branch = b.executor == "block" and any(f.kind == "if" and f.device for f in b.frames)
    if b.executor != "warpgroup" and not branch:  # of a branch frontend/conditions.py decides
        raise TileSyntaxError(
            "registers move between warpgroups", loc=source.current(), hint='inside T.Scale("warpgroup")'
        )
    emit("set_max_nreg", [], {"count": reg_count, "more": int(bool(is_inc))})


def inc_max_nreg(reg_count: int) -> None:
    """``T.set_max_nreg`` for a warpgroup that gets registers."""
    set_max_nreg(reg_count, True)


def dec_max_nreg(reg_count: int) -> None:
    """``T.set_max_nreg`` for a warpgroup that gives registers away."""
    set_max_nreg(reg_count, False)


def fence_proxy_async() -> None:
    """What this executor's threads wrote to shared memory is visible to TMA and to wgmma (PTX ISA,
    "Proxies"), whoever starts them behind a barrier that follows."""
    emit("fence_proxy_async", [])


def wait_wgmma(count: int = 0) -> None:
    """All products that were issued with ``wg_wait=-1`` but the last ``count`` are complete."""
    emit("wait_wgmma", [], {"count": int(count)})


def warpgroup_wait(count: int = 0) -> None:
    """The same as ``T.wait_wgmma``."""
    wait_wgmma(count)


def get_thread_binding(dim: int = 0) -> Any:
    """The thread's index in the executor around it. At the block's scale, where statements run once for all
    threads, those that depend on it become the threads' own (frontend/own.py).

    Args:
        dim: of a block whose threads have several axes (``T.Kernel(…, threads=(32, 4))``), the axis, x first.

    Raises:
        TileSyntaxError: in a warp or a warpgroup. TileValueError: an axis that the block does not have.
    """
    b = bld.current()
    axes = b.launch.hints.get("axes", (b.launch.threads,)) if b.launch is not None else (1,)
    if not isinstance(dim, int) or not 0 <= dim < max(len(axes), 3):
        raise TileValueError(f"axis {dim!r} of the block", loc=source.current(), expected="0, 1 or 2")
    if b.executor == "block" and b.launch is not None:
        if b.launch.threads == 1:
            return as_expr(0)
        index: Any = ir.Call("ts.scale_index", [ir.StringImm("thread")], ret_ty=ir.PrimType("int32"))
        if dim >= len(axes):
            return as_expr(0)
        for extent in axes[:dim]:
            index = binary("//", index, extent)
        return binary("%", index, axes[dim]) if dim < len(axes) - 1 else index
    if b.executor != "thread" or dim:
        raise TileSyntaxError(
            "a thread's index outside T.Scale",
            loc=source.current(),
            hint='with T.Scale("thread") as (tid, threads):',
        )
    return ir.Call("ts.scale_index", [ir.StringImm("thread")], ret_ty=ir.PrimType("int32"))


def thread_binding(begin: int, end: int, thread: str = "threadIdx.x") -> Any:
    """The thread's index along an axis of the block, of ``end`` threads, by TVM's name: `get_thread_binding`.

    Raises:
        TileValueError: an axis that there is not, or another number of threads.
    """
    b = bld.current()
    dim = "xyz".find(str(thread).removeprefix("threadIdx.")) if isinstance(thread, str) else -1
    held = b.launch.hints.get("axes", (b.launch.threads,)) if b.launch is not None else (1,)
    named = dim >= 0 and len(thread) == len("threadIdx.x")
    numbers = isinstance(begin, int) and isinstance(end, int)
    if not named or not numbers or begin != 0 or (dim < len(held) and held[dim] != end):
        raise TileValueError(
            f"T.thread_binding({begin!r}, {end!r}, thread={thread!r}) of a block of {held} threads",
            loc=source.current(),
            expected='0, the threads along the axis, and "threadIdx.x", "threadIdx.y" or "threadIdx.z"',
        )
    return get_thread_binding(dim)


def get_lane_idx(warp_size: int | None = None) -> Any:
    """The thread's number in its warp; inside ``T.Scale("thread")``, or at the block's scale.

    Args:
        warp_size: counted in groups of so many threads; 32 without.

    Raises:
        TileValueError: no positive number.
    """
    return binary("%", get_thread_binding(), _extent("T.get_lane_idx", "warp_size", warp_size, WARP))


def get_warp_idx(warp_size: int | None = None) -> Any:
    """The number of the thread's warp in the block; inside ``T.Scale("thread")`` alone, or at the block's
    scale. ``warp_size`` as of :func:`get_lane_idx`.

    Raises:
        TileSyntaxError: elsewhere, also in T.Scale("warp"), which gives the number itself.
    """
    return _group(
        "T.get_warp_idx", 'T.Scale("warp")', _extent("T.get_warp_idx", "warp_size", warp_size, WARP)
    )


def get_warp_idx_sync(warp_size: int | None = None) -> Any:
    """The same as `get_warp_idx`: the compiler knows by itself what is the same for a warp."""
    return get_warp_idx(warp_size)


def get_warp_group_idx(warp_size: int | None = None, warps_per_group: int | None = None) -> Any:
    """The number of the thread's warpgroup in the block, as :func:`get_warp_idx`. ``warps_per_group``: a
    group is so many warps; 4 without."""
    what = "T.get_warp_group_idx"
    lanes = _extent(what, "warp_size", warp_size, WARP)
    return _group(
        what,
        'T.Scale("warpgroup")',
        lanes * _extent(what, "warps_per_group", warps_per_group, WARPGROUP // WARP),
    )


def _extent(what: str, name: str, given: Any, without: int) -> int:
    if given is None:
        return without
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise TileValueError(f"{what} with {name}={given!r}", loc=source.current(), expected="a positive int")
    return given


def _group(what: str, scale: str, threads: int) -> Any:
    if [s for s in bld.current().scales if s in EXECUTORS and s != "block"] not in ([], ["thread"]):
        raise TileSyntaxError(
            f"{what} is a thread's",
            loc=source.current(),
            hint=f'T.Scale("thread"), or {scale} as (w, n)',
        )
    return binary("//", get_thread_binding(), threads)


def shuffle_elect(thread_extent: int = 0) -> Any:
    """Whether this is the first of every ``thread_extent`` threads (of all, where it is 0); inside
    ``T.Scale("thread")``."""
    thread = get_thread_binding()
    return compare("==", binary("%", thread, as_expr(thread_extent)) if thread_extent else thread, as_expr(0))


class _Hint(TileOp):
    def effects(self, call: Any) -> list[Access]:
        return []

    def simulate(self, call: Any, cx: SimContext) -> Any:
        return lambda ex: None


@register
class SetMaxNreg(_Hint):
    name = "set_max_nreg"
    attributes = ("count", "more")


@register
class FenceProxyAsync(_Hint):
    name = "fence_proxy_async"

    def simulate(self, call: Any, cx: SimContext) -> Any:
        from tilescale.compiler.sim import mbarriers

        return mbarriers.fence


@register
class WaitWgmma(_Hint):
    name = "wait_wgmma"
    attributes = ("count",)

    def simulate(self, call: Any, cx: SimContext) -> Any:
        from tilescale.compiler.sim import flights

        pending = int(call.attrs["count"])
        return lambda ex: flights.wait(ex, flights.PRODUCT, pending)
