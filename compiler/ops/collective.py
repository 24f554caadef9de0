"""Collectives as tile operations: the same block of every rank (or all blocks of a cluster, or the lanes of
an executor) takes part.

At device scale they are made of remote copies between two barriers (``team_sync``), in
passes/expand_collectives.py. The first barrier says that every rank's source is written and its destination
free; the second that all parts have arrived. Reductions add in rank order, so that all ranks get the same
bits. Participants synchronize in any statement; what they must have alike goes with the barriers.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, ClassVar

from tilescale.compiler.builder import state as bld
from tilescale.compiler.builder.values import Buffer, Region, as_expr, index_expr
from tilescale.compiler.ir import source
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.operations import Access, TileOp, register
from tilescale.compiler.ir.regions import APART, MIXED, SAME, Regions
from tilescale.compiler.ir.scales import REACHES
from tilescale.compiler.ops import team
from tilescale.compiler.ops.base import emit, region, require_same_shape, show, squeeze
from tilescale.errors import TileSyntaxError, TileTypeError, TileValueError

REDUCTIONS = ("sum", "max", "min", "prod")


def _place(name: str) -> str:
    """At which scale the collective runs: device, cta_cluster, or an executor below the block.

    Raises:
        TileSyntaxError: no such scale is open.
    """
    b = bld.current()
    for frame in b.frames:
        if frame.kind in ("parallel", "vectorized"):
            raise TileSyntaxError(
                f"T.{name} stands in a T.{frame.kind.capitalize()} loop",
                loc=source.current(),
                hint="move it out",
            )
    if b.reach in ("device", "cta_cluster"):
        return b.reach
    if b.executor != "block":
        return b.executor
    raise TileSyntaxError(
        f"T.{name} has no one to meet",
        loc=source.current(),
        hint='with T.Scale("device") as (rank, n): (or "cta_cluster", "warp")',
    )


def _symmetric(r: Region, what: str, place: str) -> None:
    want = "global.symm" if place == "device" else "shared"
    if place in ("device", "cta_cluster") and r.buffer.scope != want:
        hint = f"{r.name}: T.SymmTensor(shape, dtype)" if place == "device" else "T.alloc_shared"
        raise TileTypeError(
            f"{what} {r.name} cannot be reached by the others", loc=source.current(), hint=hint
        )


def _pair(name: str, src: Any, dst: Any) -> tuple[Region, Region, str]:
    place = _place(name)
    a, b = region(src, f"the source of T.{name}", ()), region(dst, f"the destination of T.{name}", ())
    if a.dtype != b.dtype:
        raise TileTypeError(
            f"T.{name} of {a.dtype} into {b.dtype}", loc=source.current(), expected="one dtype"
        )
    return a, b, place


def _parts(name: str, whole: Region, part: Region, place: str) -> None:
    """``whole`` has one leading axis more than ``part``, as long as there are participants."""
    inner = squeeze(whole.shape[1:])
    want = squeeze(part.shape)
    if (
        len(whole.shape) < 1
        or len(inner) != len(want)
        or any(str(x) != str(y) for x, y in zip(inner, want, strict=True))
    ):
        raise TileValueError(
            f"T.{name}: {whole.name} is {show(whole.shape)} and a part, {part.name}, is {show(part.shape)}",
            loc=source.current(),
            expected=f"{whole.name} of shape (number of ranks, {', '.join(map(str, part.shape))})",
        )
    _one_each(name, whole, place)


def _one_each(name: str, whole: Region, place: str) -> None:
    """In a cluster, whose size is known: the leading axis is as long. Of ranks the launch knows how many
    there are (ops/participants.py)."""
    launch = bld.current().launch
    size = prod(launch.cluster) if place == "cta_cluster" and launch is not None else None
    if size is not None and whole.shape and constant(whole.shape[0]) != size:
        raise TileValueError(
            f"T.{name}: {size} blocks of the cluster take part, and {whole.name} has {whole.shape[0]} parts",
            loc=source.current(),
            hint=f"a leading axis of {size}, one for each who takes part",
        )


def _reduction(op: str, name: str) -> str:
    if op not in REDUCTIONS:
        raise TileValueError(
            f"T.{name} with op={op!r}", loc=source.current(), expected="one of " + ", ".join(REDUCTIONS)
        )
    return op


def all_gather(src: Any, dst: Any) -> None:
    """Everyone's ``src`` to everyone: ``dst[r]`` becomes rank r's ``src``.

    Args:
        src: a tile of shape S. dst: (number of ranks, *S), symmetric (shared memory in a cluster).
    """
    a, b, place = _pair("all_gather", src, dst)
    _parts("all_gather", b, a, place)
    _symmetric(b, "the destination", place)
    _emit("all_gather", a, b, {"place": place})


def all_to_all(src: Any, dst: Any) -> None:
    """``dst[r]`` becomes rank r's ``src[own rank]``. Both are (number of ranks, *S); ``dst`` is symmetric."""
    a, b, place = _pair("all_to_all", src, dst)
    require_same_shape(a, b, "T.all_to_all")
    _one_each("all_to_all", b, place)
    _symmetric(b, "the destination", place)
    _emit("all_to_all", a, b, {"place": place})


def broadcast(src: Any, dst: Any, root: Any = 0) -> None:
    """``dst`` becomes rank ``root``'s ``src`` on every rank. Both have one shape; ``dst`` is symmetric."""
    a, b, place = _pair("broadcast", src, dst)
    require_same_shape(a, b, "T.broadcast")
    _symmetric(b, "the destination", place)
    known = constant(index_expr(root))
    if known is not None and known < 0:
        raise TileValueError(
            f"root={known} is no rank", loc=source.current(), expected="0 ≤ root < world size"
        )
    launch = bld.current().launch
    if known is not None and place == "cta_cluster" and launch is not None and known >= prod(launch.cluster):
        raise TileValueError(
            f"root={known} is no block of the cluster",
            loc=source.current(),
            expected=f"0 ≤ root < {prod(launch.cluster)}",
        )
    _emit("broadcast", a, b, {"place": place}, index_expr(root))


def reduce_scatter(src: Any, dst: Any, op: str = "sum") -> None:
    """``dst`` becomes the reduction over all ranks r of r's ``src[own rank]``, in rank order.

    Args:
        src: (number of ranks, *S), symmetric. dst: a tile of shape S. op: sum, max, min, prod.
    """
    a, b, place = _pair("reduce_scatter", src, dst)
    _parts("reduce_scatter", a, b, place)
    _symmetric(a, "the source", place)
    _emit("reduce_scatter", a, b, {"place": place, "op": _reduction(op, "reduce_scatter")})


def all_reduce(src: Any, dst: Any = None, op: str = "sum") -> None:
    """``dst`` becomes the reduction of everyone's ``src``, in rank order, the same bits on all ranks.

    Args:
        src: a tile of shape S, symmetric (at warp, warpgroup or thread scale: (lanes, *S)). dst: of shape S;
            ``src`` itself without.
        op: sum, max, min, prod.
    """
    a, b, place = _pair("all_reduce", src, src if dst is None else dst)
    if place in ("device", "cta_cluster"):
        require_same_shape(a, b, "T.all_reduce")
    _symmetric(a, "the source", place)
    _emit(
        "all_reduce", a, b, {"place": place, "op": _reduction(op, "all_reduce"), "in_place": int(dst is None)}
    )


def _emit(name: str, src: Region, dst: Region, attrs: dict[str, Any], *more: Any) -> None:
    """Adds the call; which axes a scalar index dropped is kept, since the expansion has to find the leading
    axis again."""
    dropped = {"src_dropped": [int(d) for d in src.dropped], "dst_dropped": [int(d) for d in dst.dropped]}
    operands, among = team.member_operands(bld.current().team if attrs["place"] == "device" else None)
    emit(name, [src.ir(), dst.ir(), *more, *operands], {**attrs, **dropped, **among})


class _Collective(TileOp):
    """Shared by the five: seen from outside they read the source and write the destination, everyone's."""

    levels = ("tile",)
    attributes: ClassVar[tuple[str, ...]] = ("place", "src_dropped", "dst_dropped", "team?", "team_operands?")
    #: the side that others reach; whether its leading axis is as long as there are participants
    reaches: ClassVar[str] = "dst"
    parted: ClassVar[bool] = False

    def synchronizes(self, call: Any) -> str:
        return str(call.attrs["place"]) if str(call.attrs["place"]) in REACHES else ""

    def effects(self, call: Any) -> list[Access]:
        return [Access(call.args[0], "read"), Access(call.args[1], "write")]

    def expand(self, call: Any, src: Region, dst: Region, regions: Regions) -> None:
        """The operation in smaller ones, traced with the scales of the call open: what it moves, between two
        barriers."""
        place = str(call.attrs["place"])
        me, count = _who(place)
        lie = self.lie(src, dst, me, regions)
        moved = self.staged(call, src, me) if self.reaches == "dst" and lie == MIXED else src
        _barrier(place, self.agreed(call, src, dst))
        self.move(call, moved, dst, me, count, lie)
        _barrier(place, [("collective", f"the end of T.{self.name}")])

    def lie(self, src: Region, dst: Region, me: Any, regions: Regions) -> str:
        """How what is read of a participant's memory lies to what is written there: APART, SAME (in place:
        each element where it was read, so that the one who writes it has it already), MIXED."""
        return regions.relation(src, dst)

    def staged(self, call: Any, src: Region, me: Any) -> Region:
        """A copy of the own source, made before the first barrier: behind that the others write into this
        memory."""
        from tilescale.compiler.ops.copy import copy

        tile = _tile(src.shape, str(src.dtype), f"T.{self.name} of a tensor into itself")
        self.reading(call, me, lambda: copy(src, tile))
        return tile.whole()

    def reading(self, call: Any, me: Any, body: Callable[[], None]) -> None:
        """``body()`` for those whose source is read."""
        body()

    def agreed(self, call: Any, src: Region, dst: Region) -> list[tuple[str, Any]]:
        """What all participants must have alike, by name; ``parts``: as many as there are participants."""
        reached = src if self.reaches == "src" else dst
        out: list[tuple[str, Any]] = [("collective", f"T.{self.name}"), ("symmetric tensor", reached.name)]
        if "op" in call.attrs:
            out.append(("op", str(call.attrs["op"])))
        lead = reached.axes[:1] if self.parted else []
        for k, (low, extent) in enumerate(zip(reached.mins, reached.extents, strict=True)):
            out += [
                (f"first index of axis {k}", index_expr(low)),
                ("parts" if k in lead else f"extent of axis {k}", index_expr(extent)),
            ]
        if self.name == "all_to_all":
            first = src.axes[0]
            out.append(("parts of the source", index_expr(src.extents[first])))
        return out

    def move(self, call: Any, src: Region, dst: Region, me: Any, count: Any, lie: str) -> None:
        """What happens between the barriers; ``me`` of ``count`` participants. lie: how source and
        destination do."""
        raise NotImplementedError

    def put_reduced(self, call: Any, total: Buffer, dst: Region, lie: str) -> None:
        """What was read of all sources goes to the destination; where that may be (part of) a source, when
        everyone has read."""
        from tilescale.compiler.ops.copy import copy

        if lie != APART:
            _barrier(
                str(call.attrs["place"]),
                [("collective", f"T.{self.name} in place, between reading and writing")],
            )
        copy(total, dst)


def _index(buffer: Region, lead: Any) -> Region:
    """``buffer[lead]``: one part of a region along its leading axis."""
    first = buffer.axes[0]
    mins, extents, dropped = list(buffer.mins), list(buffer.extents), list(buffer.dropped)
    mins[first] = mins[first] + index_expr(lead)
    extents[first], dropped[first] = 1, True
    return Region(buffer.buffer, tuple(mins), tuple(extents), tuple(dropped))


def _tile(shape: tuple[Any, ...], dtype: str, what: str = "a collective") -> Buffer:
    from tilescale.compiler.ops.alloc import alloc_shared

    sizes = [constant(e) for e in shape]
    if None in sizes:
        raise TileTypeError(
            f"{what} over a region whose extents are not constants",
            loc=source.current(),
            expected="constant extents",
        )
    return alloc_shared(tuple(sizes) or (1,), dtype)


def _barrier(place: str, agreed: list[tuple[str, Any]]) -> None:
    from tilescale.compiler.ops.sync import collective_barrier

    collective_barrier(place, agreed)


def _who(place: str) -> tuple[Any, Any]:
    """The own index and the count of participants."""
    from tilescale.compiler.tvm_compat import ir

    if place == "device" and (among := bld.current().team) is not None:
        return team.bound("member", among.index()), among.count
    return tuple(
        ir.Call(op, [ir.StringImm(place)], ret_ty=ir.PrimType("int32"))
        for op in ("ts.scale_index", "ts.scale_count")
    )


def _for_each(count: Any, body: Any) -> None:
    """``for r in T.serial(count): body(r)``, built by hand since this is no rewritten function."""
    from tilescale.compiler.ops.loops import serial

    for r in serial(count).trace(("r",)):
        body(r)


def _reduce(op: str, part: Any, shape: tuple[Any, ...], dtype: str, count: Any) -> Buffer:
    """The reduction over r of ``part(r)`` read from r, in rank order, in a new tile of float32 for the small
    floats."""
    from tilescale.compiler.builder.values import binary
    from tilescale.compiler.ops.copy import copy
    from tilescale.compiler.ops.loops import Parallel

    wide = "float32" if dtype in ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2") else dtype
    sizes = squeeze(shape)
    total, piece = _tile(sizes, wide), _tile(sizes, dtype)
    copy(part(as_expr(0)), total, src=0)

    def more(r: Any) -> None:
        copy(part(r + 1), piece, src=r + 1)
        extents = [constant(e) for e in (sizes or (1,))]
        for ids in Parallel(*extents).trace(tuple(f"i{k}" for k in range(len(extents)))):
            at = tuple(ids) if isinstance(ids, (list, tuple)) else (ids,)
            symbol = {"sum": "+", "prod": "*", "max": "max", "min": "min"}[op]
            from tilescale.compiler.builder.values import convert

            total.store(at, binary(symbol, total[at], convert(piece[at], wide)))

    _for_each(count - 1, more)
    return total


def _others(count: Any, lie: str, body: Any) -> None:
    """``body(k)`` for the participants, the own one (0) first; without it where its part is in its place
    already. Each starts at itself, so that peers take turns."""
    if lie == SAME:
        _for_each(count - 1, lambda k: body(k + 1))
    else:
        _for_each(count, body)


@register
class AllGather(_Collective):
    name = "all_gather"
    parted = True

    def lie(self, src: Region, dst: Region, me: Any, regions: Regions) -> str:
        """In place where the source is the own part of the destination, which nobody else writes."""
        whole = regions.relation(src, dst)
        return (
            SAME
            if whole != APART and regions.relation(src, _index(dst, me)) == SAME
            else MIXED
            if whole != APART
            else APART
        )

    def move(self, call: Any, src: Region, dst: Region, me: Any, count: Any, lie: str) -> None:
        from tilescale.compiler.ops.copy import copy

        _others(count, lie, lambda k: copy(src, _index(dst, me), dst=(me + k) % count))


@register
class AllToAll(_Collective):
    name = "all_to_all"
    parted = True

    def lie(self, src: Region, dst: Region, me: Any, regions: Regions) -> str:
        """No part but the own is written where it is read."""
        return APART if regions.relation(src, dst) == APART else MIXED

    def move(self, call: Any, src: Region, dst: Region, me: Any, count: Any, lie: str) -> None:
        from tilescale.compiler.ops.copy import copy

        _others(
            count, lie, lambda k: copy(_index(src, (me + k) % count), _index(dst, me), dst=(me + k) % count)
        )


@register
class Broadcast(_Collective):
    name = "broadcast"

    def agreed(self, call: Any, src: Region, dst: Region) -> list[tuple[str, Any]]:
        return [*super().agreed(call, src, dst), ("root", call.args[2])]

    def reading(self, call: Any, me: Any, body: Callable[[], None]) -> None:
        """The root: the sources of the others need not be written."""
        from tilescale.compiler.builder.values import compare
        from tilescale.compiler.ops.choices import only_if

        only_if(compare("==", me, call.args[2]), body)

    def move(self, call: Any, src: Region, dst: Region, me: Any, count: Any, lie: str) -> None:
        from tilescale.compiler.ops.copy import copy

        self.reading(call, me, lambda: _others(count, lie, lambda k: copy(src, dst, dst=(me + k) % count)))


@register
class ReduceScatter(_Collective):
    name = "reduce_scatter"
    attributes = (*_Collective.attributes, "op")
    reaches, parted = "src", True

    def move(self, call: Any, src: Region, dst: Region, me: Any, count: Any, lie: str) -> None:
        total = _reduce(str(call.attrs["op"]), lambda r: _index(src, me), dst.shape, str(src.dtype), count)
        self.put_reduced(call, total, dst, lie)


@register
class AllReduce(_Collective):
    name = "all_reduce"
    attributes = (*_Collective.attributes, "op", "in_place")
    reaches = "src"

    def expand(self, call: Any, src: Region, dst: Region, regions: Regions) -> None:
        if str(call.attrs["place"]) in ("device", "cta_cluster"):
            super().expand(call, src, dst, regions)
        else:
            _lanes(call, src, dst, regions)

    def move(self, call: Any, src: Region, dst: Region, me: Any, count: Any, lie: str) -> None:
        total = _reduce(str(call.attrs["op"]), lambda r: src, src.shape, str(src.dtype), count)
        self.put_reduced(call, total, dst, lie)


def _lanes(call: Any, src: Region, dst: Region, regions: Regions) -> None:
    """Below the block: the leading axis of ``src`` is the executor's lanes, and one executor holds them all.
    Where the result lies among them it goes by way of a tile."""
    from tilescale.compiler.ops.copy import copy
    from tilescale.compiler.ops.reduce import fold_tile

    if regions.relation(src, dst) == APART:
        fold_tile(src, dst, str(call.attrs["op"]), 0)
        return
    tile = _tile(squeeze(src.shape[1:]), str(src.dtype))
    fold_tile(src, tile, str(call.attrs["op"]), 0)
    for part in (
        [_index(src, lane) for lane in range(constant(src.shape[0]) or 0)]
        if int(call.attrs["in_place"])
        else [dst]
    ):
        copy(tile, part)
