"""Threads of a warp that exchange values, and threads of a block that synchronize by number; inside
``T.Scale``, below the block.

A shuffle orders nothing but its own values (PTX ISA 9.0, "shfl.sync"); a barrier orders what its threads did
before it in front of what they do behind it (PTX ISA 9.0, "bar, barrier").
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from tilescale.compiler.builder import state as bld
from tilescale.compiler.builder.values import as_expr, dtype_of, index_expr
from tilescale.compiler.ir import source
from tilescale.compiler.ir.contexts import SimContext
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.operations import Access, TileOp, register
from tilescale.compiler.ir.scales import WARP, WIDTHS
from tilescale.compiler.ops.alloc import alloc_var
from tilescale.compiler.ops.base import emit
from tilescale.compiler.tvm_compat import tirx
from tilescale.errors import TileSyntaxError, TileTypeError, TileValueError

EVERYONE = 0xFFFFFFFF
#: barriers that a block has (PTX ISA, "bar, barrier"), and the number under which the runtime knows warps'
#: own
BARRIERS, OF_WARPS = 16, 16


# ---- shuffles


def shfl_xor(value: Any, offset: Any, width: int = WARP, mask: int = EVERYONE) -> Any:
    """What the lane has whose number differs from the own one in the bits of ``offset``.

    Args:
        value: a scalar; every lane of the mask gives its own, and they alone come here. width: lanes in
            groups of so many, a power of two. mask: the lanes that come, lane k as bit k; all of the warp's
            without. A lane that does not come has no value for others.

    Raises:
        TileSyntaxError: outside ``T.Scale("thread")``, or in T.Parallel. TileTypeError, TileValueError: a
            value that is no scalar, a width that is no power of two, a mask that is no constant.
    """
    return _shuffle("xor", value, offset, width, mask)


def shfl_up(value: Any, delta: Any, width: int = WARP, mask: int = EVERYONE) -> Any:
    """What the lane ``delta`` below has; the first ``delta`` lanes of a group keep their own. As
    :func:`shfl_xor`."""
    return _shuffle("up", value, delta, width, mask)


def shfl_down(value: Any, delta: Any, width: int = WARP, mask: int = EVERYONE) -> Any:
    """What the lane ``delta`` above has; the last ``delta`` lanes of a group keep their own. As
    :func:`shfl_xor`."""
    return _shuffle("down", value, delta, width, mask)


def shfl_sync(value: Any, srcLane: Any, width: int = WARP, mask: int = EVERYONE) -> Any:
    """What lane ``srcLane`` (counted in the group, modulo its width) has. As :func:`shfl_xor`."""
    return _shuffle("from", value, srcLane, width, mask)


def tvm_warp_shuffle(mask: int, value: Any, warp_id: Any, width: int, warp_size: int = WARP) -> Any:
    """`shfl_sync` by TVM's name: the value of lane ``warp_id`` of the group; ``warp_size`` is ``width``, or
    a whole warp's lanes."""
    _whole(width, warp_size, "T.tvm_warp_shuffle")
    return shfl_sync(value, warp_id, width, mask)


def tvm_warp_shuffle_up(mask: int, value: Any, offset: Any, width: int, warp_size: int = WARP) -> Any:
    """`shfl_up` by TVM's name. As :func:`tvm_warp_shuffle`."""
    _whole(width, warp_size, "T.tvm_warp_shuffle_up")
    return shfl_up(value, offset, width, mask)


def tvm_warp_shuffle_down(mask: int, value: Any, offset: Any, width: int, warp_size: int = WARP) -> Any:
    """`shfl_down` by TVM's name. As :func:`tvm_warp_shuffle`."""
    _whole(width, warp_size, "T.tvm_warp_shuffle_down")
    return shfl_down(value, offset, width, mask)


def _whole(width: int, warp_size: int, what: str) -> None:
    if warp_size not in (width, WARP):
        raise TileValueError(
            f"{what} in groups of {width} of a warp of {warp_size}",
            loc=source.current(),
            expected=f"a warp of {width} or {WARP} lanes",
        )


def lanes_of(what: str, mask: Any) -> dict[str, str]:
    """The attribute that names the lanes that come, where these are not all of the warp's.

    Raises:
        TileTypeError, TileValueError: a mask that is no constant, or has no lane.
    """
    known = mask if isinstance(mask, int) and not isinstance(mask, bool) else None
    if known is None and not isinstance(mask, (bool, float, str)):
        known = constant(as_expr(mask, "uint32"))
    if known is None:
        raise TileTypeError(
            f"{what} with mask={mask!r}", loc=source.current(), expected="a constant, lane k as bit k",
            hint="leave mask out where all lanes of the warp come",
        )  # fmt: skip
    if not known & EVERYONE or known >> WARP not in (0, -1):
        raise TileValueError(
            f"{what} with mask={mask!r}", loc=source.current(), expected=f"0 < mask ≤ {EVERYONE:#x}"
        )
    return {} if known & EVERYONE == EVERYONE else {"mask": str(known & EVERYONE)}


def mask_of(call: Any) -> int:
    """The lanes of each warp that come to an operation, as bits."""
    return int(str(call.attrs["mask"])) if "mask" in call.attrs else EVERYONE


def coming(call: Any, threads: int) -> int:
    """How many of a warp's lanes come, of a block of so many threads."""
    return (mask_of(call) & ((1 << min(WARP, threads)) - 1)).bit_count()


def is_named(call: Any, ex: Any, site: Any) -> bool:
    """Whether the mask names this lane; if not, the report says so."""
    from tilescale.compiler.findings import Finding

    mask, lane = mask_of(call), ex.linear % WARP
    if mask >> lane & 1:
        return True
    text = f"lane {lane} comes to {site.what}, whose mask {mask:#010x} does not name it"
    hint = "under a condition that holds on the lanes of the mask alone"
    ex.machine.report.add(Finding("mismatch", text, ex.where(site), hint=hint))
    return False


def _shuffle(kind: str, value: Any, by: Any, width: int, mask: int) -> Any:
    what, loc = f"T.shfl_{kind if kind != 'from' else 'sync'}", source.current()
    in_threads(what)
    named = lanes_of(what, mask)
    if not isinstance(width, int) or width not in (1, 2, 4, 8, 16, 32):
        raise TileValueError(f"{what} with width={width!r}", loc=loc, expected="1, 2, 4, 8, 16 or 32")
    dtype = dtype_of(value)
    number = index_expr(by)
    known = constant(number)
    if known is not None and not 0 <= known < WARP:
        raise TileValueError(f"{what} by {known} lanes", loc=loc, expected=f"0 ≤ lanes < {WARP}")
    held = alloc_var(dtype)
    bld.current().give_name(held.buffer, "got")
    lanes = number if str(number.ty) == "int32" else tirx.Cast("int32", number)
    emit(
        "shuffle",
        [held.buffer.whole().ir(), as_expr(value, str(dtype)), lanes],
        {"kind": kind, "width": width, **named},
    )
    return held.load()


def in_threads(what: str) -> None:
    b = bld.current()
    if b.executor != "thread" and (b.executor != "block" or b.launch is None):
        raise TileSyntaxError(
            f"{what} is a thread's",
            loc=source.current(),
            hint='inside with T.Scale("thread") as (tid, threads):',
        )
    if any(f.kind in ("parallel", "vectorized") for f in b.frames):
        raise TileSyntaxError(
            f"{what} stands in T.Parallel", loc=source.current(), hint="a loop over T.serial"
        )


def taken_from(kind: str, lane: Any, by: Any, width: int) -> Any:
    """The lane whose value a lane gets (numbers or arrays; PTX ISA 9.0, "shfl.sync")."""
    first = lane // width * width
    if kind == "from":
        return first + by % width
    there = {"xor": lane ^ by, "up": lane - by, "down": lane + by}[kind]
    inside = (there >= first) if kind == "up" else (there < first + width)
    return inside * there + (1 - inside) * lane


@register
class Shuffle(TileOp):
    """``shuffle(into, value, by)``."""

    name = "shuffle"
    attributes = ("kind", "width", "mask?")
    waits = by_thread = True

    def effects(self, call: Any) -> list[Access]:
        return [Access(call.args[0], "write")]

    def simulate(self, call: Any, cx: SimContext) -> Any:
        from tilescale.compiler.findings import Finding
        from tilescale.compiler.sim import numerics

        into, value, by = cx.view(call.args[0], call), cx.scalar(call.args[1]), cx.scalar(call.args[2])
        kind, width = str(call.attrs["kind"]), int(call.attrs["width"])
        site = cx.site(call, f"T.shfl_{kind if kind != 'from' else 'sync'}")
        lanes = coming(call, cx.program.launch.threads)

        def run(ex: Any) -> Generator[str, None, None]:
            mine, got = ex.linear % WARP, value(ex)
            if is_named(call, ex, site):
                values = yield from ex.machine.exchange(ex, ex.linear // WARP, mine, lanes, got, site)
                there = int(taken_from(kind, mine, int(by(ex)), width))
                if there in values:
                    got = values[there]
                else:
                    text = f"lane {mine} asks for the value of lane {there}, which is not in the mask"
                    ex.machine.report.add(Finding("mismatch", text, ex.where(site)))
            into.write(ex, numerics.encode(got, into.dtype))

        return run


# ---- barriers by number


def sync_threads(barrier_id: int | None = None, arrive_count: int | None = None) -> None:
    """The block's threads synchronize, also inside ``T.Scale``; by number so many of them:
    ``T.sync_threads(1, 256)`` in two warpgroups.

    Args:
        barrier_id: which of the block's barriers, 0 to 15 (0 is that of all threads).
        arrive_count: how many threads come to it, here or by `named_barrier_arrive`, a multiple of 32; all
            of the block's without.

    Raises:
        TileTypeError, TileValueError: no constants, a barrier that a block does not have, a count that is no
            multiple of 32 or more than the block has. TileSyntaxError: in T.Parallel.
    """
    b = bld.current()
    threads = b.launch.threads if b.launch is not None else 0
    number, count = 0 if barrier_id is None else barrier_id, threads if arrive_count is None else arrive_count
    number, count = _at_number("T.sync_threads", number, count, threads)
    if b.executor == "block":
        if count != threads and not _some_come(b):
            raise where_all_come(f"T.sync_threads of {count} threads", threads, source.current())
        if count == threads and (number == 0 or not _some_come(b)):
            emit("barrier", [], {"reach": "block"})
            return
    emit("sync_threads", [], {"barrier": number, "count": count})


def tvm_storage_sync(storage_scope: str) -> None:
    """TVM's name of `sync_threads` ("shared", "shared.dyn") and of `sync_warp` ("warp").

    Raises:
        TileValueError: another scope. TileSyntaxError: in T.Parallel; "warp" where `sync_warp` may not stand.
    """
    if storage_scope in ("shared", "shared.dyn"):
        sync_threads()
    elif storage_scope == "warp":
        sync_warp()
    else:
        raise TileValueError(
            f"T.tvm_storage_sync of {storage_scope!r}",
            loc=source.current(),
            expected='"shared", "shared.dyn" or "warp"',
            hint="T.sync_grid() for all blocks of the launch",
        )


def named_barrier_arrive(barrier_id: int, thread_count: int) -> None:
    """Comes to one of the block's barriers, and goes on. What a thread did before it is in front of what
    those do who wait there by `sync_threads` of the same number and count.

    Args:
        barrier_id: which of the block's barriers, 1 to 15.
        thread_count: how many threads come to it, those that wait included.

    Raises:
        TileTypeError, TileValueError: as of `sync_threads`; barrier 0, to which all come; all of the block's
            threads. TileSyntaxError: in T.Parallel.
    """
    what, b = "T.named_barrier_arrive", bld.current()
    threads = b.launch.threads if b.launch is not None else 0
    barrier_id, thread_count = _at_number(what, barrier_id, thread_count, threads, 1)
    if b.executor == "block" and not _some_come(b):
        raise where_all_come(what, threads, source.current())
    emit("arrive_threads", [], {"barrier": barrier_id, "count": thread_count})


def _some_come(b: Any) -> bool:
    """Whether a condition decides who comes here."""
    return any(f.kind == "if" and f.device for f in b.frames)


def where_all_come(what: str, threads: int, loc: Any) -> TileValueError:
    return TileValueError(
        f"{what} where all {threads} come", loc=loc,
        hint='under a condition on the thread\'s index, or inside T.Scale("warpgroup"), "warp" or '
        '"thread", in the branch that those threads take',
    )  # fmt: skip


def _at_number(what: str, number: Any, count: Any, threads: int, least: int = 0) -> tuple[int, int]:
    from tilescale.compiler.ops.sync import not_in_parallel

    not_in_parallel(what)
    loc = source.current()
    for name, given in (("barrier", number), ("number of threads", count)):
        if isinstance(given, bool) or not isinstance(constant(given), int):
            raise TileTypeError(f"{what} with the {name} {given}", loc=loc, expected="a constant")
    number, count = int(constant(number)), int(constant(count))  # type: ignore[arg-type]
    if not least <= number < BARRIERS:
        raise TileValueError(
            f"{what} at barrier {number}", loc=loc, expected=f"{least} ≤ barrier < {BARRIERS}"
        )
    all_come = number == 0 and count == threads  # also of a block that has a part of a warp
    if not all_come and (count % WARP or not 0 < count <= threads):
        raise TileValueError(
            f"{what} of {count} threads",
            loc=loc,
            expected=f"a multiple of {WARP}, at most the block's {threads}",
        )
    if number == 0 and count != threads:
        raise TileValueError(
            f"{what} of {count} threads at barrier 0",
            loc=loc,
            expected=f"all {threads} there",
            hint=f"{what}(1, {count})",
        )
    return number, count


def sync_warp(mask: int | None = None) -> None:
    """The threads of a warp synchronize, in ``T.Scale("thread")``; in ``T.Scale("warp")`` it is
    ``T.barrier()``.

    Raises:
        TileSyntaxError: elsewhere. TileTypeError, TileValueError: a mask that is no constant; some of the
            warp's lanes.
    """
    from tilescale.compiler.ops.sync import barrier

    if mask is not None and lanes_of("T.sync_warp", mask):
        raise TileValueError(
            f"T.sync_warp with mask={mask!r}",
            loc=source.current(),
            expected="all lanes of the warp: leave mask out",
        )
    if bld.current().executor == "warp":
        barrier()
        return
    in_threads("T.sync_warp")
    emit("sync_threads", [], {"barrier": OF_WARPS, "count": WARP})


@register
class SyncThreads(TileOp):
    """Executors of a block below it synchronize: ``count`` threads of them, at one of its barriers, or
    (`OF_WARPS`) those of each warp."""

    name = "sync_threads"
    attributes = ("barrier", "count")
    waits = by_thread = True

    def effects(self, call: Any) -> list[Access]:
        return []

    def simulate(self, call: Any, cx: SimContext) -> Any:
        number, count, wide = (
            int(call.attrs["barrier"]),
            int(call.attrs["count"]),
            WIDTHS[str(call.attrs["executor"])],
        )
        site = cx.site(call, "T.sync_warp" if number == OF_WARPS else "T.sync_threads")
        if number == OF_WARPS:
            lanes = min(WARP, cx.program.launch.threads)
            return lambda ex: ex.machine.meet(
                ex, ("warp", ex.block.number, ex.rank.number, ex.linear // WARP), lanes, site
            )
        return lambda ex: ex.machine.meet(
            ex, ("threads", ex.block.number, ex.rank.number, number, count), count // wide, site
        )


@register
class ArriveThreads(TileOp):
    """Executors of a block below it come to a barrier at which others, `SyncThreads`, wait."""

    name = "arrive_threads"
    attributes = ("barrier", "count")
    waits = by_thread = True

    def written(self, call: Any) -> str:
        return "T.named_barrier_arrive"

    def effects(self, call: Any) -> list[Access]:
        return []

    def simulate(self, call: Any, cx: SimContext) -> Any:
        number, count = int(call.attrs["barrier"]), int(call.attrs["count"])
        site, each = cx.site(call, self.written(call)), count // WIDTHS[str(call.attrs["executor"])]
        return lambda ex: ex.machine.arrive(
            ex, ("threads", ex.block.number, ex.rank.number, number, count), each, site
        )
