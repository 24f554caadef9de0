"""Loops: how often their body runs, and what the compiler may do about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilescale import log
from tilescale.compiler.builder import state as builder
from tilescale.compiler.builder.constructs import LoopNest
from tilescale.compiler.builder.values import index_expr, to_expr
from tilescale.compiler.ir import source
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ops import by_hand, tile_orders
from tilescale.compiler.ops.base import unheeded
from tilescale.compiler.tvm_compat import is_expr
from tilescale.errors import TileSyntaxError, TileTypeError, TileValueError
from tilescale.language.booleans import require_bools


def _range(args: tuple[Any, ...], step: Any = None) -> tuple[Any, Any, Any]:
    if not 1 <= len(args) <= 3:
        raise TileTypeError(
            f"a loop over {len(args)} numbers",
            loc=source.current(),
            expected="(stop), (start, stop) or (start, stop, step)",
        )
    if len(args) == 1:
        low, high, by = 0, args[0], 1 if step is None else step
    else:
        low, high = args[0], args[1]
        by = args[2] if len(args) == 3 else 1 if step is None else step
    values = []
    for v in (low, high, by):
        e = to_expr(v, "a loop bound")
        values.append(e if isinstance(e, int) and not isinstance(e, bool) else index_expr(e))
    known = constant(values[2])
    if known is not None and known <= 0:
        raise TileValueError(f"a loop with step {known}", loc=source.current(), expected="a positive step")
    return (*(constant(v) if constant(v) is not None else v for v in values),)  # type: ignore[return-value]


def serial(*args: Any, step: Any = None, annotations: dict[str, Any] | None = None) -> LoopNest:
    """A plain loop on the device: ``for i in T.serial(n)``, ``T.serial(start, stop, step)``.

    Raises:
        TileValueError: annotations, of which a plain loop has none.
    """
    if annotations:
        raise TileValueError(
            f"annotations={annotations!r} of T.serial", loc=source.current(), expected="none",
            hint="T.Pipelined(n, order=[…], stage=[…]) for a schedule by hand",
        )  # fmt: skip
    return LoopNest("serial", [_range(args, step)])


def unroll(
    *args: Any, step: Any = None, explicit: bool = False, unroll_factor: int | None = None
) -> LoopNest:
    """A loop whose body the compiler lays out once an iteration where the count is known (``explicit`` or
    not), or, on GPUs, ``unroll_factor`` iterations at a time.

    Raises:
        TileValueError: a factor that is no positive number, or one together with ``explicit``.
    """
    require_bools(explicit=explicit)
    if unroll_factor is None:
        return LoopNest("unroll", [_range(args, step)])
    if not isinstance(unroll_factor, int) or unroll_factor < 1 or explicit:
        what = f"unroll_factor={unroll_factor!r}{', explicit=True' if explicit else ''}"
        raise TileValueError(
            what, loc=source.current(), expected="a positive number, or explicit=True for all iterations"
        )
    return LoopNest("unroll", [_range(args, step)], {"ts.unroll": unroll_factor})


def unroll_apart(count: int) -> LoopNest:
    """`unroll`, with the promise that no other round and no other thread touches what a round writes in
    shared memory. So nothing need order the rounds of a loop of the threads' own (frontend/own.py); the
    simulator judges the promise."""
    return LoopNest("unroll", [_range((count,), None)], {"ts.apart": True})


def vectorized(*args: Any) -> LoopNest:
    """A loop of independent iterations that run as lanes of a vector."""
    return LoopNest("vectorized", [_range(args)])


#: TileLang's annotation of a T.Parallel that copies, whose group and wait are the author's
BY_HAND = "parallel_async_without_async_commit_wait"


def Parallel(
    *extents: Any,
    coalesced_width: int | None = None,
    loop_layout: Any = None,
    prefer_async: bool = False,
    annotations: Any = None,
) -> LoopNest:
    """Independent iterations over a rectangle, cut among the executor's threads: ``for i, j in T.Parallel(M,
    N)``.

    Both words matter where threads share the iterations (GPUs), and change no result:

    Args:
        loop_layout: a `T.Fragment` of the loop's extents: which thread runs which iteration, and in which
            round. Without it the tiles that the loop touches decide.
        coalesced_width: the most neighbours, a power of two, that a thread reads or writes in one access to
            memory.
        prefer_async, annotations: TileLang's. With ``prefer_async`` and the annotation
            ``parallel_async_without_async_commit_wait`` a loop that copies may go by cp.async on a GPU: it is
            complete behind the author's T.ptx_wait_group of its group. Without, they decide nothing.

    Raises:
        TileTypeError: no extents, or a layout that is no fragment of them. TileValueError: a width that is
            none. Where layouts are chosen, a TileValueError shows both demands if tiles that the loop touches
            lie otherwise.
    """
    if not extents:
        raise TileTypeError("T.Parallel without extents", loc=source.current(), hint="T.Parallel(M, N)")
    require_bools(prefer_async=prefer_async)
    if annotations is not None and not isinstance(annotations, dict):
        raise TileTypeError(
            f"T.Parallel with annotations={annotations!r}", loc=source.current(), expected="a dict"
        )
    notes: dict[str, Any] = {}
    if prefer_async and (annotations or {}).get(BY_HAND):
        notes["ts.begun"] = 1
    elif prefer_async or annotations:
        log.say("info", "prefer_async and annotations of T.Parallel decide nothing here", once=True)
    ranges = [_range((e,)) for e in extents]
    if loop_layout is not None:
        if any(frame.kind == "parallel" for frame in builder.current().frames):
            raise TileSyntaxError(
                "loop_layout= of a T.Parallel inside another one, whose iterations run it whole",
                loc=source.current(),
                expected="it on the outermost loop",
                hint="one T.Parallel over all extents",
            )
        notes["ts.layout"] = by_hand.layout(loop_layout, [high for _, high, _ in ranges], "T.Parallel")
    if coalesced_width is not None:
        notes["ts.width"] = by_hand.width(coalesced_width)
    return LoopNest("parallel", ranges, notes)


def Pipelined(
    start: Any,
    stop: Any = None,
    num_stages: int | None = None,
    order: Any = None,
    stage: Any = None,
    sync: Any = None,
    group: Any = None,
    annotations: dict[str, Any] | None = None,
) -> LoopNest:
    """A loop whose copies run ahead of the computation through a ring of ``num_stages`` buffers (one), where
    the target has such rings.

    Args:
        order, stage: a schedule by hand, an entry for each statement of the body, names of values aside:
            copies of an earlier stage run ahead of those of the latest, by as many rounds as the stages lie
            apart at least; within a stage statements run in their order. -1 in both leaves a copy to the
            compiler. Without ``num_stages`` there is room for as many rounds as the stages need.
        group: the numbers of the statements that share an entry, a list for each entry.

    Raises:
        TileValueError: numbers that are none; what the schedule asks for and cannot be done
        (passes/manual_stages.py).
    """
    unheeded("Pipelined", annotations)
    if num_stages is not None and (not isinstance(num_stages, int) or num_stages < 0):
        raise TileValueError(f"num_stages={num_stages!r}", loc=source.current(), expected="an int ≥ 0")
    if sync:
        raise TileValueError(
            f"sync={sync!r}",
            loc=source.current(),
            expected="no sync=: what waits for what follows from what statements read and write",
            hint="order=… and stage=…",
        )
    args = (start,) if stop is None else (start, stop)
    notes: dict[str, Any] = {"ts.num_stages": 1 if num_stages is None else num_stages}
    if order or stage or group:
        notes = _by_hand(order, stage, group)
        stages = [s for s in stage if s >= 0] or [0]
        notes["ts.num_stages"] = 1 + max(stages) - min(stages) if num_stages is None else num_stages
        notes["ts.as_needed"] = num_stages is None
    return LoopNest("pipelined", [_range(args)], notes)


def _is_number(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _by_hand(order: Any, stage: Any, group: Any) -> dict[str, Any]:
    """A schedule by hand as annotations."""
    loc = source.current()
    given = {"order": order, "stage": stage}
    for name, entries in given.items():
        if not isinstance(entries, (list, tuple)) or not all(_is_number(x) and x >= -1 for x in entries):
            raise TileValueError(
                f"{name}={entries!r} of T.Pipelined",
                loc=loc,
                expected="order= and stage=, a list of numbers each, an entry a statement",
                hint="order=[0, 1, 2], stage=[0, 0, 1]",
            )
    if len(order) != len(stage) or any((o < 0) != (s < 0) for o, s in zip(order, stage, strict=True)):
        raise TileValueError(
            f"order={list(order)} and stage={list(stage)}",
            loc=loc,
            expected="as many entries in both, and -1 at the same places",
        )
    places = [o for o in order if o >= 0]
    if len(set(places)) != len(places):
        raise TileValueError(
            f"order={list(order)} has two statements in one place",
            loc=loc,
            expected="a place of its own for each",
        )
    groups = group or []
    if not isinstance(groups, (list, tuple)) or not all(
        isinstance(g, (list, tuple)) and g and all(map(_is_number, g)) for g in groups
    ):
        raise TileValueError(
            f"group={group!r}", loc=loc, expected="a list of statements' numbers for each entry"
        )
    return {"ts.order": list(order), "ts.stage": list(stage), "ts.group": [list(g) for g in groups]}


def Persistent(
    domain: Any, wave_size: Any, index: Any, group_size: int = 8, group: Any = None, rotate: Any = None
) -> LoopNest:
    """The tiles of ``domain`` (extents) that fall to block ``index`` of ``wave_size`` resident ones:
    ``for bm, bn in T.Persistent((M_tiles, N_tiles), blocks, block_id)``. Yields one index an axis.

    Tiles are numbered, in row-major order if nothing else is asked for, and a wave of blocks takes as many of
    them as it has blocks; block b takes the b-th.

    Args:
        group: two numbers: the last two axes are cut into groups of so many tiles, and the axes in front of
            them (the ranks that own the tiles, say) go round between groups: ``for owner, i, j in
            T.Persistent((n, rows, cols), blocks, b, group=(2, 8))`` visits a group of each owner, then the
            next group of each. Extents need be no multiples.
        rotate: by how many places a block's tile lies further in each wave than in the one before, round the
            wave: with a group's tiles a block comes to another owner in each wave.
        group_size: changes nothing.

    Raises:
        TileTypeError: ``group`` of a domain with one axis, or one that is not two numbers; a ``rotate`` that
            is no integer. TileValueError: a group without tiles, a wave turned backwards.
    """
    axes = [to_expr(e, "an extent") for e in (domain if isinstance(domain, (tuple, list)) else (domain,))]
    extents = [constant(e) if constant(e) is not None else e for e in axes]
    total = tile_orders.product(extents)
    groups = None if group is None else _group(group, len(extents))
    first: Any = index
    number: Callable[[Any], Any] = lambda counted: counted  # noqa: E731
    if rotate is not None:
        turn = to_expr(rotate, "rotate=")
        if isinstance(turn, (bool, float)) or (is_expr(turn) and "int" not in str(turn.ty)):
            raise TileTypeError(
                f"rotate={rotate} of T.Persistent", loc=source.current(), expected="an integer, 0 or more"
            )
        known = constant(turn)
        if known is not None and known < 0:
            raise TileValueError(
                f"rotate={known} of T.Persistent", loc=source.current(), expected="0 or more"
            )
        first, number = tile_orders.rotated(wave_size, index, total, turn if known is None else known)

    def coordinates(variables: list[Any]) -> Any:
        at = number(variables[0])
        out = (
            tile_orders.row_major(at, extents)
            if groups is None
            else tile_orders.in_groups(at, extents, groups)
        )
        return tuple(out) if len(out) > 1 else out[0]

    rounds = (first, total, wave_size)
    return LoopNest("persistent", [_range(rounds)], None, coordinates)


def _group(group: Any, axes: int) -> tuple[int, int]:
    """``group=`` of T.Persistent.

    Raises:
        TileTypeError, TileValueError.
    """
    loc = source.current()
    if axes < 2:
        raise TileTypeError(
            "group= of a domain with one axis", loc=loc, expected="two axes, or more with owners in front"
        )
    pair = tuple(group) if isinstance(group, (tuple, list)) else ()
    if len(pair) != 2 or any(isinstance(g, bool) or not isinstance(g, int) for g in pair):
        raise TileTypeError(f"group={group!r} of T.Persistent", loc=loc, expected="two numbers: group=(2, 8)")
    if min(pair) < 1:
        raise TileValueError(
            f"group={group!r} of T.Persistent", loc=loc, expected="1 or more along each axis"
        )
    return pair


def grid(*extents: Any) -> LoopNest:
    """Nested plain loops: ``for i, j in T.grid(M, N)``."""
    return LoopNest("serial", [_range((e,)) for e in extents])


Serial, Unroll, Vectorized, parallel = serial, unroll, vectorized, Parallel
