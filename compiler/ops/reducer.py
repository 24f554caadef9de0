"""Accumulators that a T.Parallel nest adds to along some of its axes (``r[i] += x`` in ``T.Parallel(M,
N)``). No
operation of the IR: the nest leaves what it adds in a fragment of its own, and behind it T.reduce_sum adds
that
to the accumulator, in its fixed order."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.builder import state as bld
from tilescale.compiler.builder.values import Buffer, as_expr
from tilescale.compiler.ir import source
from tilescale.compiler.ops.alloc import alloc_fragment
from tilescale.compiler.ops.reduce import reduce
from tilescale.compiler.tvm_compat import ir
from tilescale.errors import TileSyntaxError, TileTypeError, TileValueError

SUM = "sum"


def alloc_reducer(
    shape: Any, dtype: Any = "float32", op: str = SUM, replication: str | None = None
) -> Buffer:
    """A fragment to which T.Parallel nests add: ``r[i] += a[i, j] * x[j]`` in ``for i, j in T.Parallel(M,
    N)``.
    ``T.clear`` it first, and read it behind ``T.finalize_reducer``. The order of the sums is T.reduce_sum's.

    Args:
        op: "sum". replication: TileLang's word for who holds a part ("all", "none"); it decides nothing.

    Raises:
        TileValueError: another op, or another replication.
    """
    loc = source.current()
    if op != SUM:
        raise TileValueError(
            f"T.alloc_reducer with op={op!r}",
            loc=loc,
            expected='"sum"',
            hint="T.reduce_max or T.reduce_min of a tile",
        )
    if replication not in (None, "all", "none"):
        raise TileValueError(f"replication={replication!r}", loc=loc, expected='"all" or "none"')
    made = alloc_fragment(shape, dtype)
    made.reducer = op
    return made


def finalize_reducer(reducer: Buffer) -> None:
    """From here on the accumulator is a fragment like others.

    Raises:
        TileTypeError: no accumulator, or one that was finalized.
    """
    if not isinstance(reducer, Buffer) or not reducer.reducer:
        raise TileTypeError(
            f"T.finalize_reducer of {reducer!r}", loc=source.current(), expected="what T.alloc_reducer gave"
        )
    reducer.reducer = ""


def update(target: Buffer, index: Any, op: str, value: Any) -> None:
    """``target[index] += value`` of an accumulator.

    Raises:
        TileSyntaxError: outside of T.Parallel, or under a condition in it. TileTypeError: another update, or
            indices that are not the loop's.
    """
    b, loc = bld.current(), source.current()
    if op != "+":
        raise TileTypeError(
            f"{target.name} {op}= …, which is a sum", loc=loc, expected=f"{target.name}[…] += …"
        )
    nest = b.frames[-1].nest if b.frames and b.frames[-1].kind == "parallel" else None
    if nest is None:
        raise TileSyntaxError(
            f"{target.name} is added to outside of T.Parallel",
            loc=loc,
            expected="an addition in the body of T.Parallel itself, under no condition",
            hint="T.if_then_else(c, x, 0) for what is added",
        )
    variables, ranges = nest
    items = [as_expr(i) for i in (index if isinstance(index, tuple) else (index,))]
    axes = [
        next((k for k, v in enumerate(variables) if isinstance(i, ir.Var) and v.same_as(i)), -1)
        for i in items
    ]
    extents = [high for _, high, _ in ranges]
    fits = [extents[k] for k in axes] == list(target.shape) if min(axes, default=-1) >= 0 else False
    if not fits or axes != sorted(set(axes)) or any(low != 0 or step != 1 for low, _, step in ranges):
        raise TileTypeError(
            f"{target.name} of {target.shape} is added to at {', '.join(map(str, items))}",
            loc=loc,
            expected="indices of T.Parallel over whole axes, in the order of its loops",
        )
    inner = b.bodies.pop()  # what the nest leaves is allocated in front of it
    parts = b.give_name(alloc_of(extents, target, b), "added")
    b.bodies.append(inner)
    parts[tuple(variables)] = value
    left = [k for k in range(len(extents)) if k not in axes]

    def add() -> None:
        source_tile, shape = parts, list(extents)
        for n, axis in enumerate(reversed(left)):
            last = n == len(left) - 1
            del shape[axis]
            into = (
                target
                if last
                else b.give_name(alloc_fragment(tuple(shape) or (1,), str(target.dtype)), "added")
            )
            reduce(source_tile, into, "sum", axis, clear=not last)
            source_tile = into

    if not left:
        raise TileTypeError(
            f"{target.name} is added to along no axis",
            loc=loc,
            expected="a loop over more axes",
            hint="a fragment",
        )
    b.frames[-1].after.append(add)


def alloc_of(extents: list[Any], target: Buffer, b: bld.Builder) -> Buffer:
    """A fragment of the nest's extents, allocated where the body in front of the nest goes on."""
    frame = b.frames.pop()
    made = alloc_fragment(tuple(extents), str(target.dtype))
    b.frames.append(frame)
    return made
