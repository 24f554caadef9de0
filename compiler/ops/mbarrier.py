"""Expert: barriers in shared memory with arrivals, phases and bytes (PTX ISA, "mbarrier"), and copies by TMA
that complete on them.

A kernel written with them says by hand what T.Pipelined says in a word. A barrier's phase ends when so many
threads have arrived as it was allocated for and all bytes that were announced have come; waiting for a parity
returns when the phase of that parity is over, the one before the first counting as of parity 1. Arrivals
release, waits acquire, in each thread for itself; nothing else is ordered by the compiler where tiles are
filled by ``T.tma_copy``. Names are TileLang's.
"""

from __future__ import annotations

from math import prod
from typing import Any

from tilescale.compiler.builder import state as bld
from tilescale.compiler.builder.values import Region, as_expr, binary, compare, convert, index_expr
from tilescale.compiler.ir import source
from tilescale.compiler.ir.contexts import SimContext
from tilescale.compiler.ir.multicast import leading, mask_of
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.operations import Access, TileOp, register
from tilescale.compiler.ir.scales import WARP, WARPGROUP, WIDTHS
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.ops.base import element, emit, is_tile, region, require_same_shape
from tilescale.compiler.ops.cluster import block_rank_in_cluster
from tilescale.compiler.ops.expert import get_thread_binding
from tilescale.compiler.tvm_compat import tirx
from tilescale.errors import TileSyntaxError, TileTypeError, TileValueError
from tilescale.language.booleans import require_bools

SCOPE = "shared.barrier"
#: reduction → the dtypes that TMA has it for (PTX ISA, "cp.reduce.async.bulk"); float32's minimum is an
#: illegal instruction on an H200
_BOTH = ("uint32", "int32", "uint64", "float16", "bfloat16")
REDUCTIONS = {"add": (*_BOTH, "float32", "float64"), "min": (*_BOTH, "int64"), "max": (*_BOTH, "int64")}


def alloc_barrier(arrive_count: Any = 1) -> Any:
    """Barriers of a block; one, or with a list one for each count. ``arrive_count``: threads whose arrivals
    end a phase.

    Raises:
        TileValueError: a count that is no positive int. TileSyntaxError: inside T.Scale below the block.
    """
    return _alloc(arrive_count, "alloc_barrier")


def alloc_cluster_barrier(arrive_count: Any = 1) -> Any:
    """:func:`alloc_barrier`, at which threads of all blocks of the cluster may arrive: each block has its
    own, for which its threads wait.

    Raises:
        As `alloc_barrier`.
    """
    made = _alloc(arrive_count, "alloc_cluster_barrier", {"ts.cluster": True})
    made.among = True
    return made


def _alloc(arrive_count: Any, word: str, notes: dict[str, Any] | None = None) -> Any:
    from tilescale.compiler.ops.alloc import _allocate

    counts = list(arrive_count) if isinstance(arrive_count, (list, tuple)) else [arrive_count]
    if not counts or any(
        not isinstance(n, int) or isinstance(n, bool) or not 1 <= n < 1 << 20 for n in counts
    ):
        raise TileValueError(
            f"T.{word}({arrive_count!r})",
            loc=source.current(),
            expected="a number of threads, or a list of them",
        )
    b = bld.current()
    if b.launch is not None and b.executor != "block":
        raise TileSyntaxError(
            f"T.{word} inside T.Scale", loc=source.current(), hint="allocate it in front of T.Scale"
        )
    buffer = _allocate((len(counts),), "uint64", SCOPE, word)
    buffer.kind = "barrier"
    b.bodies[-1][-1] = tirx.AllocBuffer(buffer.var, {"ts.counts": counts, **(notes or {})}, b.span())
    return buffer


def barrier_of(value: Any, what: str) -> Region:
    """The barrier that an operand names.

    Raises:
        TileTypeError: it names something else.
    """
    made = element(value, what) if is_tile(value) else None
    if made is None or made.buffer.kind != "barrier":
        raise TileTypeError(
            f"{what} is given {value!r}", loc=source.current(), expected="a barrier b[i] of T.alloc_barrier"
        )
    return made


def _outside_parallel(what: str) -> None:
    from tilescale.compiler.ops.sync import not_in_parallel

    not_in_parallel(what)


def _either(barrier: Any, mbarrier: Any, what: str) -> Any:
    """The barrier by either of its names."""
    if (barrier is None) == (mbarrier is None):
        raise TileTypeError(
            f"{what} takes one barrier", loc=source.current(), expected="barrier= or TileLang's mbarrier="
        )
    return mbarrier if barrier is None else barrier


def mbarrier_arrive(barrier: Any = None, cta_id: Any = None, *, mbarrier: Any = None) -> None:
    """All threads of the executor arrive (release). ``cta_id``: at the barrier of that block of the cluster,
    by its rank, x first (`T.block_rank_in_cluster`). ``mbarrier`` is TileLang's word for ``barrier``.

    Raises:
        TileTypeError: another block's barrier that is none of T.alloc_cluster_barrier. TileValueError: a
            block that the cluster does not have.
    """
    barrier = _either(barrier, mbarrier, "T.mbarrier_arrive")
    _outside_parallel("T.mbarrier_arrive")
    at = barrier_of(barrier, "T.mbarrier_arrive")
    if cta_id is None:
        emit("mbarrier_arrive", [at.ir()])
        return
    if not at.buffer.among:
        raise TileTypeError(
            f"T.mbarrier_arrive at {at.name} of another block",
            loc=source.current(),
            expected="a barrier of T.alloc_cluster_barrier",
        )
    emit("mbarrier_arrive", [at.ir(), _block(cta_id)], {"reach": "cta_cluster"})


def _cluster_size() -> int:
    """The blocks of a cluster."""
    launch = bld.current().launch
    return 1 if launch is None else prod(launch.cluster)


def _block(cta_id: Any) -> Any:
    """The rank of a block of the cluster, as an operand.

    Raises:
        TileTypeError: no integer. TileValueError: a constant that is no rank.
    """
    e, count = index_expr(cta_id), _cluster_size()
    if (known := constant(e)) is not None and not 0 <= known < count:
        raise TileValueError(
            f"cta_id={known} of T.mbarrier_arrive, in a cluster of {count}",
            loc=source.current(),
            expected=f"0 ≤ cta_id < {count}" if count > 1 else "a launch with cluster_dims=",
        )
    return as_expr(e, "int32")


def mbarrier_expect_tx(barrier: Any, tx: Any) -> None:
    """The phase also waits for so many bytes, which copies will bring; said once for the executor, by a
    thread that arrives behind it."""
    _outside_parallel("T.mbarrier_expect_tx")
    emit("mbarrier_expect_tx", [barrier_of(barrier, "T.mbarrier_expect_tx").ir(), convert(tx, "int32")])


def mbarrier_arrive_expect_tx(mbarrier: Any, tx: Any) -> None:
    """``T.mbarrier_expect_tx`` and, behind it, ``T.mbarrier_arrive``."""
    mbarrier_expect_tx(mbarrier, tx)
    mbarrier_arrive(mbarrier)


def mbarrier_wait_parity(barrier: Any = None, parity: Any = 0, *, mbarrier: Any = None) -> None:
    """All threads of the executor wait until the phase of this parity is over (acquire). ``mbarrier`` is
    TileLang's
    word for ``barrier``."""
    barrier = _either(barrier, mbarrier, "T.mbarrier_wait_parity")
    _outside_parallel("T.mbarrier_wait_parity")
    emit(
        "mbarrier_wait_parity", [barrier_of(barrier, "T.mbarrier_wait_parity").ir(), convert(parity, "int32")]
    )


def barrier_arrive(barrier: Any) -> None:
    """The same as ``T.mbarrier_arrive``."""
    mbarrier_arrive(barrier)


def barrier_wait(barrier: Any, parity: Any = 0) -> None:
    """The same as ``T.mbarrier_wait_parity``."""
    mbarrier_wait_parity(barrier, parity)


def tma_copy(
    src: Any,
    dst: Any,
    barrier: Any = None,
    reduce: str = "",
    cluster_mask: int | None = None,
    leader_scope_threads: int | None = None,
) -> None:
    """A copy by TMA, issued once for the executor: a box of a tensor into a tile of shared memory, whose
    bytes complete on ``barrier``; or a tile into a tensor, added to what lies there (``reduce``: add, min,
    max) or instead of it, complete where ``T.tma_store_wait`` says so. A tile is a matrix of whole rows, some
    columns of one, a stage of several (``stages[k, :, :]``), or a row of multiples of 128 bytes
    (``rows[k, :]``). Where the kernel never says
    T.mbarrier_expect_tx of the barriers its copies announce their bytes themselves
    (frontend/conditions.py). What lies outside the tensor is read as zero and never written.

    Args:
        cluster_mask: a bit for each block of the cluster, by rank. The lowest of these blocks issues the copy
            into the tile of each, and the bytes complete on the barrier of each; the others of them issue
            nothing. Blocks that are not among them copy for themselves.
        leader_scope_threads: the first of each so many threads issues a copy, which its index may decide
            (``tile[warp, :]``), and not one thread of the executor; whole warps.

    Raises:
        TileTypeError: operands that TMA does not connect; a mask of a store. TileValueError: shapes that
            differ, an unknown reduction, blocks that the cluster does not have, threads that are no warps of
            the executor.
    """
    _outside_parallel("T.tma_copy")
    loc = source.current()
    like = None if not hasattr(src, "shape") else region(src, "the source").shape
    to = region(dst, "the destination", like or ())
    frm = region(src, "the source", to.shape)
    require_same_shape(frm, to, "T.tma_copy")
    loads = frm.buffer.scope == "global" and to.buffer.scope == "shared"
    if not loads and not (frm.buffer.scope == "shared" and to.buffer.scope == "global"):
        raise TileTypeError(
            f"T.tma_copy from {frm.name} to {to.name}",
            loc=loc,
            expected="a tensor and a tile of T.alloc_shared",
        )
    if loads != (barrier is not None):
        raise TileTypeError(
            "T.tma_copy into a tile without barrier=" if loads else "T.tma_copy into a tensor with barrier=",
            loc=loc,
            expected="barrier=b[i], on which the bytes complete"
            if loads
            else "T.tma_store_arrive and T.tma_store_wait behind it",
        )
    if reduce and (loads or reduce not in REDUCTIONS):
        raise TileValueError(
            f"T.tma_copy with reduce={reduce!r}",
            loc=loc,
            expected="into a tensor, one of " + ", ".join(REDUCTIONS),
        )
    if reduce and str(to.dtype) not in REDUCTIONS[reduce]:
        raise TileTypeError(
            f"T.tma_copy with reduce={reduce!r} of {to.dtype}",
            loc=loc,
            expected="one of " + ", ".join(REDUCTIONS[reduce]),
            hint="T.atomic_add, T.atomic_min or T.atomic_max",
        )
    if str(frm.dtype) != str(to.dtype):
        raise TileTypeError(
            f"T.tma_copy of {frm.dtype} into {to.dtype}", loc=loc, expected="one dtype: TMA converts nothing"
        )
    args = [frm.ir(), to.ir(), *([] if barrier is None else [barrier_of(barrier, "barrier=").ir()])]
    attrs: dict[str, Any] = {"reduce": reduce}
    if cluster_mask is not None and _blocks_of(cluster_mask, loads) > 1:
        attrs |= {"cluster_mask": cluster_mask, "reach": "cta_cluster"}
        args.append(block_rank_in_cluster())
    leader = None if leader_scope_threads is None else _leader(leader_scope_threads)
    if leader is None:
        emit("tma_copy", args, attrs)
        return
    b = bld.current()
    with b.body() as body:
        emit("tma_copy", args, {**attrs, "alone": True})
    b.emit(tirx.IfThenElse(leader, sequence(body), None, b.span()))


def _blocks_of(mask: Any, loads: bool) -> int:
    """How many blocks the cluster has, for a mask of some of them.

    Raises:
        TileTypeError: of a store. TileValueError: no mask of the cluster's blocks.
    """
    count = _cluster_size()
    if not loads:
        raise TileTypeError(
            "T.tma_copy into a tensor with cluster_mask=",
            loc=source.current(),
            expected="a copy into a tile, which blocks of the cluster share",
        )
    if not isinstance(mask, int) or isinstance(mask, bool) or not 0 < mask < 1 << count:
        raise TileValueError(
            f"cluster_mask={mask!r} of T.tma_copy, in a cluster of {count}",
            loc=source.current(),
            expected=f"a bit for each block that gets the tile, 1 to {(1 << count) - 1:#b}",
        )
    return count


def _leader(threads: Any) -> Any:
    """Whether a thread issues for so many; None where one of the executor does.

    Raises:
        TileValueError: another number than one of whole warps that divides the executor's.
    """
    b = bld.current()
    width = (
        WARPGROUP if b.by_hand else WIDTHS.get(b.executor, b.launch.threads if b.launch is not None else 1)
    )
    if b.executor == "thread":
        width = b.launch.threads if b.launch is not None else 1
    fits = isinstance(threads, int) and not isinstance(threads, bool) and threads > 0
    if not fits or threads % WARP or width % threads:
        raise TileValueError(
            f"leader_scope_threads={threads!r} of T.tma_copy, of {width} threads",
            loc=source.current(),
            expected=f"a multiple of {WARP} that divides them",
        )
    if threads == width and b.executor != "thread":
        return None
    if b.executor not in ("block", "thread"):
        raise TileSyntaxError(
            f"leader_scope_threads={threads} of T.tma_copy in a {b.executor}",
            loc=source.current(),
            hint='T.Scale("warp"), whose copies are issued once for each warp',
        )
    return compare("==", binary("%", get_thread_binding(), threads), 0)


def tma_store_arrive() -> None:
    """The stores that the executor issued so far are one group."""
    emit("tma_store_arrive", [])


def tma_store_wait(count: int = 0, read: bool = False) -> None:
    """All but the last ``count`` groups of stores are complete; with ``read`` they have read their tiles."""
    require_bools(read=read)
    emit("tma_store_wait", [], {"count": int(count), "read": int(bool(read))})


def issues(call: Any) -> Any:
    """Whether the block issues a copy; None where each does."""
    if not (mask := mask_of(call)):
        return None
    rank = call.args[3]
    others = tirx.EQ(tirx.bitwise_and(tirx.shift_right(as_expr(mask), rank), as_expr(1)), as_expr(0))
    return tirx.Or(tirx.EQ(rank, as_expr(leading(mask))), others)


# ---- operations


class _Expert(TileOp):
    """What a GPU alone does."""

    def effects(self, call: Any) -> list[Access]:
        return [Access(call.args[0], "update")] if call.args else []


@register
class MBarrierArrive(_Expert):
    name = "mbarrier_arrive"
    waits = True

    def effects(self, call: Any) -> list[Access]:
        return [Access(call.args[0], "update", call.args[1] if len(call.args) > 1 else None)]

    def simulate(self, call: Any, cx: SimContext) -> Any:
        from tilescale.compiler.sim import mbarriers

        find, site = mbarriers.finder(call.args[0], cx), cx.site(call, "T.mbarrier_arrive")
        threads = mbarriers.threads(call, cx)
        if len(call.args) == 1:
            return lambda ex: mbarriers.arrive(ex, find(ex), threads, site)
        block = cx.scalar(call.args[1])
        return lambda ex: mbarriers.arrive_elsewhere(ex, find, int(block(ex)), threads, site)


@register
class MBarrierExpectTx(_Expert):
    name = "mbarrier_expect_tx"

    def simulate(self, call: Any, cx: SimContext) -> Any:
        from tilescale.compiler.sim import mbarriers

        find, count = mbarriers.finder(call.args[0], cx), cx.scalar(call.args[1])
        return lambda ex: mbarriers.expect(ex, find(ex), int(count(ex)))


@register
class MBarrierWaitParity(_Expert):
    name = "mbarrier_wait_parity"
    waits = True

    def effects(self, call: Any) -> list[Access]:
        return [Access(call.args[0], "read")]

    def simulate(self, call: Any, cx: SimContext) -> Any:
        from tilescale.compiler.sim import mbarriers

        find, parity, site = (
            mbarriers.finder(call.args[0], cx),
            cx.scalar(call.args[1]),
            cx.site(call, "T.mbarrier_wait_parity"),
        )
        return lambda ex: mbarriers.wait(ex, find(ex), int(parity(ex)) & 1, site)


@register
class TmaCopy(_Expert):
    name = "tma_copy"
    #: cluster_mask: a call's last argument is the block's rank. alone: the thread that comes here issues it
    attributes = ("reduce", "cluster_mask?", "alone?")
    waits = True

    def effects(self, call: Any) -> list[Access]:
        src, dst = call.args[:2]
        mode, when = "update" if str(call.attrs["reduce"]) else "write", issues(call)
        read = Access(src, "read", when=when, proxy="async" if len(call.args) == 2 else "")
        return [read, Access(dst, mode, when=when), *(Access(r, "update") for r in call.args[2:3])]

    def simulate(self, call: Any, cx: SimContext) -> Any:
        from tilescale.compiler.sim import mbarriers

        return mbarriers.copy(call, cx)


@register
class TmaStoreArrive(_Expert):
    name = "tma_store_arrive"

    def simulate(self, call: Any, cx: SimContext) -> Any:
        from tilescale.compiler.sim import mbarriers

        return mbarriers.commit


@register
class TmaStoreWait(_Expert):
    name = "tma_store_wait"
    attributes = ("count", "read")

    def simulate(self, call: Any, cx: SimContext) -> Any:
        from tilescale.compiler.sim import mbarriers

        pending = int(call.attrs["count"])
        return lambda ex: mbarriers.await_stores(ex, pending)
