"""Loops: how often their body runs, and what the compiler may do about it."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.frontend import source
from tilescale.compiler.frontend.hooks import LoopNest
from tilescale.compiler.frontend.values import binary, constant, index_expr, to_expr
from tilescale.errors import TileTypeError, TileValueError


def _range(args: tuple[Any, ...], step: Any = None) -> tuple[Any, Any, Any]:
    if not 1 <= len(args) <= 3:
        raise TileTypeError(
            f"a loop over {len(args)} numbers", loc=source.current(), expected="(stop), (start, stop) or (start, stop, step)"
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
    """A plain loop on the device: ``for i in T.serial(n)``, ``T.serial(start, stop, step)``."""
    return LoopNest("serial", [_range(args, step)])


def unroll(*args: Any, step: Any = None, explicit: bool = False, unroll_factor: int | None = None) -> LoopNest:
    """A loop whose body the compiler lays out once an iteration where the count is known."""
    return LoopNest("unroll", [_range(args, step)])


def vectorized(*args: Any) -> LoopNest:
    """A loop of independent iterations that run as lanes of a vector."""
    return LoopNest("vectorized", [_range(args)])


def Parallel(*extents: Any, coalesced_width: int | None = None, loop_layout: Any = None) -> LoopNest:
    """Independent iterations over a rectangle, cut among the executor's threads: ``for i, j in T.Parallel(M, N)``."""
    if not extents:
        raise TileTypeError("T.Parallel without extents", loc=source.current(), hint="T.Parallel(M, N)")
    return LoopNest("parallel", [_range((e,)) for e in extents])


def Pipelined(
    start: Any, stop: Any = None, num_stages: int = 1, order: Any = None, stage: Any = None, sync: Any = None, group: Any = None
) -> LoopNest:
    """A loop whose copies run ahead of the computation through a ring of ``num_stages`` buffers, where the target has such rings."""
    if not isinstance(num_stages, int) or num_stages < 0:
        raise TileValueError(f"num_stages={num_stages!r}", loc=source.current(), expected="an int ≥ 0")
    args = (start,) if stop is None else (start, stop)
    return LoopNest("pipelined", [_range(args)], {"ts.num_stages": num_stages})


def Persistent(domain: Any, wave_size: Any, index: Any, group_size: int = 8) -> LoopNest:
    """The tiles of ``domain`` (extents) that fall to block ``index`` of ``wave_size`` resident ones, in row-major order:
    ``for bm, bn in T.Persistent((M_tiles, N_tiles), blocks, block_id)``. Yields one index an axis."""
    extents = [to_expr(e, "an extent") for e in (domain if isinstance(domain, (tuple, list)) else (domain,))]
    total: Any = 1
    for e in extents:
        total = binary("*", total, e)

    def coordinates(variables: list[Any]) -> Any:
        flat, out = variables[0], []
        for e in reversed(extents[1:]):
            out.append(binary("%", flat, e))
            flat = binary("//", flat, e)
        # The outermost needs no remainder: between numbers it says that the tile lies inside, elsewhere it costs TVM minutes.
        out.append(flat if constant(extents[0]) is None else binary("%", flat, extents[0]))
        out.reverse()
        return tuple(out) if len(out) > 1 else out[0]

    rounds = (index, total, wave_size)
    return LoopNest("persistent", [_range(rounds)], None, coordinates)


def grid(*extents: Any) -> LoopNest:
    """Nested plain loops: ``for i, j in T.grid(M, N)``."""
    return LoopNest("serial", [_range((e,)) for e in extents])


Serial, Unroll, Vectorized = serial, unroll, vectorized
