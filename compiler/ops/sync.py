"""Barriers, signals and waits: who synchronizes with whom, and what is ordered before what.

Order (docs/LANGUAGE.md): a signal follows the completion of all earlier accesses of its executor; a wait
precedes the issue of all later ones. Signals release and waits acquire at exactly the scope of the reach.
"""

from __future__ import annotations

from typing import Any

from tilescale.compiler.builder import state as bld
from tilescale.compiler.builder.values import Buffer, Region, as_expr, binary, convert
from tilescale.compiler.ir import source
from tilescale.compiler.ir.contexts import SimContext
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.operations import Access, TileOp, register
from tilescale.compiler.ir.scales import REACHES
from tilescale.compiler.ir.signals import COMPARISONS, OPS
from tilescale.compiler.ops import team
from tilescale.compiler.ops.base import element, emit, is_tile, region
from tilescale.errors import TileSyntaxError, TileTypeError, TileValueError

#: the runtime's numbers for the scales that a barrier may span
SCALE_CODES = {"cta_cluster": 4, "grid": 5, "device": 6}
_HOMES = {
    "block": "shared.signal",
    "cta_cluster": "shared.signal",
    "grid": "global.signal",
    "device": "global.signal",
}


def counter(value: Any, what: str) -> Region:
    """The counter that ``T.signal`` and ``T.wait`` name: one element of a T.Signal parameter or a
    T.alloc_signal.

    Raises:
        TileTypeError: no signal, or one that lives at another scale than the one that is open.
    """
    b = bld.current()
    if not is_tile(value):
        raise TileTypeError(
            f"{what} is given {value!r}",
            loc=source.current(),
            expected="a counter s[i] of a T.Signal parameter or T.alloc_signal",
        )
    made = element(value, what)
    buffer = made.buffer
    if buffer.kind != "signal":
        raise TileTypeError(
            f"{buffer.name} is a {buffer.dtype} tensor and no signal",
            loc=source.current(),
            expected=f"{buffer.name}: T.Signal(shape)",
        )
    home = _HOMES[b.reach]
    if buffer.scope != home:
        where = (
            'T.Scale("device") or T.Scale("grid")'
            if buffer.scope == "global.signal"
            else 'T.Scale("cta_cluster") or no scale'
        )
        raise TileTypeError(
            f"{buffer.name} is signalled at the scale of the {b.reach}",
            loc=source.current(),
            hint=f"inside {where}",
        )
    return made


def not_in_parallel(what: str) -> None:
    for frame in bld.current().frames:
        if frame.kind in ("parallel", "vectorized"):
            raise TileSyntaxError(
                f"{what} stands in T.{frame.kind.capitalize()}",
                loc=source.current(),
                hint="move it out of the loop, or use T.serial",
            )


def barrier() -> None:
    """Everyone at the open scale synchronizes: the executor's threads, the cluster's blocks, the grid, or all
    blocks of all ranks.

    What was written before it, remote memory included, may be read by all of them after it.
    """
    not_in_parallel("T.barrier")
    b = bld.current()
    operands, attrs = team.member_operands(b.team if b.reach == "device" else None)
    emit("barrier", operands, attrs)


def collective_barrier(place: str, agreed: list[tuple[str, Any]]) -> None:
    """One barrier of a collective at the scale ``place``: at device scale this block and the same block of
    every rank of the open team, else everyone at the open scale.

    Args:
        agreed: name → integer expression or text, what all participants must have alike; the simulator
            compares it.
    """
    not_in_parallel("a collective")
    given = [(name, value) for name, value in agreed if not isinstance(value, str)]
    attrs: dict[str, Any] = {
        "agreed": [f"{name}: {value}" for name, value in agreed if isinstance(value, str)],
        "names": [name for name, _ in given],
    }
    operands: list[Any] = []
    if place == "device":
        operands, more = team.member_operands(bld.current().team)
        attrs.update(more, reach="device")
    emit(
        "team_sync" if place == "device" else "barrier",
        [*(as_expr(value) for _, value in given), *operands],
        attrs,
    )


def _agreement(call: Any, cx: SimContext) -> Any:
    """What a participant of a barrier believes that it is, by name; nothing where it is no collective's."""
    if call.attrs is None or "agreed" not in call.attrs:
        return lambda ex: {}
    texts = dict(str(text).split(": ", 1) for text in call.attrs["agreed"])
    _, given = team.team_of_call(call)
    order = team.ranks_of(call, cx, in_order=True)
    values = [(str(name), cx.scalar(e)) for name, e in zip(call.attrs["names"], given, strict=True)]

    def agreed(ex: Any) -> dict[str, Any]:
        among = order(ex)
        theirs = {} if among is None else {"ranks of the team": ", ".join(map(str, among))}
        return {**texts, **{name: int(value(ex)) for name, value in values}, **theirs}

    return agreed


def sync_grid() -> None:
    """All blocks of this rank synchronize."""
    not_in_parallel("T.sync_grid")
    emit("barrier", [], {"reach": "grid"})


def sync_global() -> None:
    """The same as `sync_grid`, by TileLang's name."""
    not_in_parallel("T.sync_global")
    emit("barrier", [], {"reach": "grid"})


def cluster_sync() -> None:
    """All blocks of the cluster synchronize: ``T.barrier()`` in ``T.Scale("cta_cluster")``."""
    not_in_parallel("T.cluster_sync")
    emit("barrier", [], {"reach": "cta_cluster"})


def signal(counter_: Any, value: Any = 1, op: str = "add", dst: Any = None) -> None:
    """Adds ``value`` to a counter, once for each executor, after all its earlier accesses.

    Args:
        op: "add"; "set" stores the value; "max" and "min" leave the greater or the lesser of the two.
        dst: the rank (block, inside ``T.Scale("cta_cluster")``) whose counter it is; the own one without.
    """
    from tilescale.compiler.ops.copy import check_peer

    not_in_parallel("T.signal")
    target = counter(counter_, "T.signal")
    if op not in OPS:
        raise TileValueError(
            f"T.signal with op={op!r}", loc=source.current(), expected="one of " + ", ".join(OPS)
        )
    peer = [] if dst is None else [check_peer(dst, target, "dst")]
    emit("signal", [target.ir(), convert(value, "int64"), *peer], {"op": op})


def wait(counter_: Any, value: Any = 1, cmp: str = "ge") -> None:
    """Waits until an own counter compares with ``value`` (ge, eq, gt, ne, le, lt), of ``s[a:b]`` each; later
    accesses come after it."""
    from tilescale.compiler.ops.loops import serial

    not_in_parallel("T.wait")
    if cmp not in COMPARISONS:
        raise TileValueError(
            f"T.wait with cmp={cmp!r}", loc=source.current(), expected="one of " + ", ".join(COMPARISONS)
        )
    several = region(counter_, "T.wait", ()) if isinstance(counter_, (Buffer, Region)) else None
    axis = (
        next((k for k, e in enumerate(several.extents) if constant(e) != 1), None)
        if several is not None
        else None
    )
    if several is None or axis is None:
        emit("wait", [counter(counter_, "T.wait").ir(), convert(value, "int64")], {"cmp": cmp})
        return
    for i in serial(several.extents[axis]).trace(("i",)):
        mins, extents = list(several.mins), list(several.extents)
        mins[axis], extents[axis] = binary("+", mins[axis], i), 1
        wait(Region(several.buffer, tuple(mins), tuple(extents), several.dropped), value, cmp)


def is_global(region: Any) -> bool:
    """Whether a counter lies in symmetric memory, and not in a block's own."""
    return str(region.source.ty.storage_scope) == "global.signal"


@register
class Barrier(TileOp):
    name = "barrier"
    attributes = ("names?", "agreed?", "team?", "team_operands?")
    waits = True

    def synchronizes(self, call: Any) -> str:
        return str(call.attrs["reach"]) if str(call.attrs["reach"]) in REACHES else ""

    def effects(self, call: Any) -> list[Access]:
        return []

    def order(self, call: Any) -> tuple[bool, bool]:
        outward = str(call.attrs["reach"]) in ("grid", "device")
        return outward, outward

    def simulate(self, call: Any, cx: SimContext) -> Any:
        reach, site, each = str(call.attrs["reach"]), cx.site(call, "T.barrier"), cx.executor_count()
        agreed, ranks = _agreement(call, cx), team.ranks_of(call, cx)
        return lambda ex: ex.machine.barrier(ex, reach, each, site, agreed(ex), ranks(ex))


@register
class TeamSync(TileOp):
    name = "team_sync"
    attributes = ("names?", "agreed?", "team?", "team_operands?")
    waits = True

    def written(self, call: Any) -> str:
        return "the collective"

    def synchronizes(self, call: Any) -> str:
        return "device"

    def effects(self, call: Any) -> list[Access]:
        return []

    def order(self, call: Any) -> tuple[bool, bool]:
        return True, True

    def simulate(self, call: Any, cx: SimContext) -> Any:
        site, agreed, ranks = cx.site(call, "the collective"), _agreement(call, cx), team.ranks_of(call, cx)

        def run(ex: Any) -> Any:
            among = ranks(ex)
            # the same block of every rank; below the block the same executor of it
            each = 1 if among is not None else len(ex.machine.ranks)
            return ex.machine.meet(ex, ("team", ex.block.number, ex.path), each, site, agreed(ex), among)

        return run


@register
class Signal(TileOp):
    name = "signal"
    attributes = ("op",)

    def effects(self, call: Any) -> list[Access]:
        return [Access(call.args[0], "update", call.args[2] if len(call.args) > 2 else None)]

    def order(self, call: Any) -> tuple[bool, bool]:
        return True, False

    def signals(self, call: Any) -> bool:
        return True

    def simulate(self, call: Any, cx: SimContext) -> Any:
        peer = cx.scalar(call.args[2]) if len(call.args) > 2 else None
        signal = cx.signalling(call, call.args[0], call.args[1], str(call.attrs["op"]), peer)
        return lambda ex: signal(ex, None if peer is None else peer(ex))


@register
class Wait(TileOp):
    name = "wait"
    attributes = ("cmp",)
    waits = True

    def acquires(self, call: Any) -> bool:
        return True

    def effects(self, call: Any) -> list[Access]:
        return [Access(call.args[0], "read")]

    def order(self, call: Any) -> tuple[bool, bool]:
        return False, True

    def simulate(self, call: Any, cx: SimContext) -> Any:
        flag, value, cmp = cx.view(call.args[0], call), cx.scalar(call.args[1]), str(call.attrs["cmp"])
        site, reach = cx.awaiting(call.args[0], call), str(call.attrs["reach"])

        def run(ex: Any) -> Any:
            counter = flag.counter(ex)
            return None if counter is None else ex.machine.wait(ex, counter, cmp, value(ex), site, reach)

        return run
