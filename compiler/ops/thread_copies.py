"""Expert: copies that each thread starts and awaits by itself (PTX ISA 9.0, "cp.async"), by TileLang's names.

``T.ptx_cp_async`` begins one of 4, 8 or 16 bytes from a tensor into shared memory. It is complete behind
``T.ptx_wait_group`` of the group that ``T.ptx_commit_group`` made of it, or where the barrier's phase is over
at which ``T.cp_async_barrier_noinc`` arrives: the thread's arrival comes when its copies have. The simulator
copies at once. Between threads the author's barriers order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from tilescale.compiler.builder.values import Region, binary, to_expr, truth
from tilescale.compiler.ir import source
from tilescale.compiler.ir.contexts import SimContext
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.operations import Access, TileOp, register
from tilescale.compiler.ops.base import emit, of_iterations
from tilescale.compiler.ops.choices import only_if
from tilescale.compiler.ops.expressions import Not
from tilescale.compiler.ops.extern import Pointer
from tilescale.compiler.ops.mbarrier import barrier_of
from tilescale.errors import TileTypeError, TileValueError
from tilescale.language.dtypes import BITS

SIZES = (4, 8, 16)


def ptx_cp_async(dst_access_ptr: Any, src_access_ptr: Any, num_elems: int, predicate: Any = None) -> None:
    """Each thread begins to copy ``num_elems`` neighbours along the last axis from a tensor into shared
    memory: ``T.ptx_cp_async(T.access_ptr(tile[i, j], "w", 8), T.access_ptr(A[m, k], "r", 8), 8)``. Where the
    predicate does not hold it stores zeros. In T.Parallel, each iteration copies its own, at once.

    Raises:
        TileTypeError: what is no pointer to a tile of shared memory and one to a tensor, or two dtypes.
        TileValueError: not 4, 8 or 16 bytes.
    """
    loc = source.current()
    pointers = (dst_access_ptr, src_access_ptr)
    if not all(isinstance(p, Pointer) for p in pointers):
        raise TileTypeError(
            f"T.ptx_cp_async from {src_access_ptr} to {dst_access_ptr}",
            loc=loc,
            expected='T.access_ptr(tile[i, j], "w", n) and T.access_ptr(A[i, j], "r", n)',
        )
    to, frm = (p.region for p in pointers)
    if to.buffer.scope != "shared" or not frm.buffer.scope.startswith("global") or to.dtype != frm.dtype:
        raise TileTypeError(
            f"T.ptx_cp_async from {frm.name} of {frm.dtype} to {to.name} of {to.dtype}",
            loc=loc,
            expected="a tensor, and a tile of T.alloc_shared of its dtype",
        )
    count = constant(to_expr(num_elems))
    count = count if isinstance(count, int) else 0
    size = count * BITS[str(to.dtype)] // 8
    along = [constant(r.extents[-1]) for r in (to, frm)]
    if size not in SIZES or along != [count, count]:
        raise TileValueError(
            f"T.ptx_cp_async of {num_elems} elements of {to.dtype}, by pointers to {along[0]} and {along[1]}",
            loc=loc,
            expected="4, 8 or 16 bytes of a row, and so many elements behind each pointer",
        )
    inside = bool(of_iterations())

    def copy() -> None:
        if inside:
            _by_elements(to, count, lambda k: _neighbour(frm, k))
        else:
            emit("thread_copy", [to.ir(), frm.ir()])

    if predicate is None:
        copy()
        return
    holds = truth(predicate)
    only_if(holds, copy)
    only_if(Not(holds), lambda: _by_elements(to, count, lambda k: 0))


def _neighbour(of: Region, k: int) -> Any:
    return of.buffer[_place(of, k)]


def _by_elements(to: Region, count: int, value: Callable[[int], Any]) -> None:
    for k in range(count):
        to.buffer[_place(to, k)] = value(k)


def _place(of: Region, k: int) -> tuple[Any, ...]:
    """Where the k-th element behind a region's first one is."""
    return (*of.mins[:-1], binary("+", of.mins[-1], k))


def ptx_commit_group() -> None:
    """The copies that each thread has begun with T.ptx_cp_async since the last group are a group."""
    emit("thread_copies", [], {"pending": -1})


def ptx_wait_group(num: int = 0) -> None:
    """All but the last ``num`` groups of each thread's copies are complete, for that thread.

    Raises:
        TileTypeError: no constant.
    """
    pending = constant(to_expr(num))
    if not isinstance(pending, int) or isinstance(num, bool) or pending < 0:
        raise TileTypeError(f"T.ptx_wait_group({num})", loc=source.current(), expected="a number of groups")
    emit("thread_copies", [], {"pending": pending})


def cp_async_barrier_noinc(barrier: Any) -> None:
    """Each thread arrives at a barrier of T.alloc_barrier, which counts it, when its copies by T.ptx_cp_async
    are complete (PTX ISA 9.0, "cp.async.mbarrier.arrive", .noinc)."""
    emit("thread_copies_arrive", [barrier_of(barrier, "T.cp_async_barrier_noinc").ir()])


@register
class ThreadCopy(TileOp):
    """``ts.thread_copy(to, from)``."""

    name = "thread_copy"
    spelling = "ptx_cp_async"
    by_thread = True

    def effects(self, call: Any) -> list[Access]:
        return [Access(call.args[1], "read"), Access(call.args[0], "write")]

    def simulate(self, call: Any, cx: SimContext) -> Any:
        to, frm = (cx.view(r, call) for r in call.args)
        return lambda ex: to.write(ex, frm.read(ex))


@register
class ThreadCopyElement(TileOp):
    """``ts.thread_copy_element(to, from, condition)``, the only statement of a T.Parallel nest: as
    ``ts.cp_async_element`` (ops/cp_async.py), into a tile whose groups the author awaits."""

    name = "thread_copy_element"
    spelling = "Parallel"
    levels = ("scheduled",)
    attributes: ClassVar[tuple[str, ...]] = ("bytes",)
    in_lanes = True

    def effects(self, call: Any) -> list[Access]:
        when = call.args[2] if len(call.args) > 2 else None
        return [Access(call.args[0], "read", when=when), Access(call.args[1], "write")]

    def simulate(self, call: Any, cx: SimContext) -> Any:
        from tilescale.compiler.sim import nest

        src, dst = cx.view(call.args[0], call), cx.view(call.args[1], call)
        when = cx.scalar(call.args[2]) if len(call.args) > 2 else None
        return lambda ex: nest.moving(ex, src, dst, True if when is None else when(ex))()


@register
class ThreadCopies(TileOp):
    """``ts.thread_copies()``. pending: groups that may be under way behind it; -1: a group ends here."""

    name = "thread_copies"
    attributes: ClassVar[tuple[str, ...]] = ("pending",)
    by_thread = True

    def written(self, call: Any) -> str:
        return "T.ptx_commit_group" if int(call.attrs["pending"]) < 0 else "T.ptx_wait_group"

    def effects(self, call: Any) -> list[Access]:
        return []

    def simulate(self, call: Any, cx: SimContext) -> Any:
        return lambda ex: None


@register
class ThreadCopiesArrive(TileOp):
    """``ts.thread_copies_arrive(barrier)``."""

    name = "thread_copies_arrive"
    spelling = "cp_async_barrier_noinc"
    by_thread = waits = True

    def effects(self, call: Any) -> list[Access]:
        return [Access(call.args[0], "update")]

    def simulate(self, call: Any, cx: SimContext) -> Any:
        from tilescale.compiler.sim import mbarriers

        find, site = mbarriers.finder(call.args[0], cx), cx.site(call, "T.cp_async_barrier_noinc")
        threads = mbarriers.threads(call, cx)
        return lambda ex: mbarriers.arrive(ex, find(ex), threads, site)
