"""Accumulators that a T.Parallel nest adds to along some of its axes (``r[i] += x`` in ``T.Parallel(M, N)``),
or of which it takes the maximum, and the like. No operation of the IR: the nest leaves what it adds in a
fragment of its own, and behind it T.reduce adds that to the accumulator, in its fixed order."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.builder import state as bld
from tilescale.compiler.builder.values import Buffer, as_expr, binary
from tilescale.compiler.ir import source
from tilescale.compiler.ir.folds import identity
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ops import math
from tilescale.compiler.ops.alloc import alloc_fragment
from tilescale.compiler.ops.copy import copy
from tilescale.compiler.ops.fill import fill
from tilescale.compiler.ops.reduce import fold_tile, together
from tilescale.compiler.tvm_compat import ir
from tilescale.errors import TileSyntaxError, TileTypeError, TileValueError
from tilescale.language.dtypes import held

SUM = "sum"
#: op → what an update does in an augmented assignment
OPS = {"sum": "+", "max": "max", "min": "min", "prod": "*", "bitand": "&", "bitor": "|", "bitxor": "^"}


def alloc_reducer(
    shape: Any, dtype: Any = "float32", op: str = SUM, replication: str | None = None
) -> Buffer:
    """A fragment to which T.Parallel nests add: ``r[i] += a[i, j] * x[j]``, or ``T.reducer_update(r[i], …)``,
    in ``for i, j in T.Parallel(M, N)``. ``T.reducer_init`` (of a sum ``T.clear``) it first, and read it
    behind ``T.finalize_reducer``. The order is T.reduce's.

    Args:
        op: sum, max, min, prod, bitand, bitor, bitxor. replication: TileLang's word for who holds a part
            ("all", "none"); it decides nothing.

    Raises:
        TileValueError: another op, or another replication.
    """
    loc = source.current()
    if op not in OPS:
        raise TileValueError(f"T.alloc_reducer with op={op!r}", loc=loc, expected=", ".join(OPS))
    if replication not in (None, "all", "none"):
        raise TileValueError(f"replication={replication!r}", loc=loc, expected='"all" or "none"')
    made = alloc_fragment(shape, dtype)
    made.reducer = op
    return made


def reducer_init(reducer: Buffer, init: Any = None) -> None:
    """The accumulator begins with what changes nothing, or with ``init``.

    Raises:
        TileTypeError: no accumulator, or one that was finalized.
    """
    _open(reducer, "T.reducer_init")
    if init is None:
        init = identity(reducer.reducer, str(held(reducer.dtype)))
    fill(reducer, init)


def reducer_update(target: Any, value: Any) -> None:
    """``r[i] += value`` of an accumulator ``r``, or what its op does: ``T.reducer_update(r[i], value)``.

    Raises:
        TileTypeError: no element of an accumulator. Else as `update`.
    """
    made = bld.current().buffers.get(target.source) if isinstance(target, ir.TensorLoad) else None
    if made is None or not made.reducer:
        expected = "an element r[i] of what T.alloc_reducer gave"
        raise _closed(made, "T.reducer_update", f"T.reducer_update of {target}", expected)
    update(made, tuple(target.indices), OPS[made.reducer], value)


def finalize_reducer(reducer: Buffer, dst: Any = None, batch: int = 1) -> None:
    """From here on the accumulator is a fragment like others; ``dst`` gets a copy of it. ``batch`` decides
    nothing, as in ``T.reduce_sum``.

    Raises:
        TileTypeError: no accumulator, or one that was finalized. TileValueError: a batch of none.
    """
    together("finalize_reducer", batch)
    _open(reducer, "T.finalize_reducer")
    reducer.reducer, reducer.finalized = "", source.current()
    if dst is not None:
        copy(reducer, dst)


def _open(reducer: Any, what: str) -> None:
    if not isinstance(reducer, Buffer) or not reducer.reducer:
        raise _closed(reducer, what, f"{what} of {reducer!r}", "what T.alloc_reducer gave")


def _closed(tile: Any, what: str, message: str, expected: str) -> TileTypeError:
    """The refusal of what is no accumulator, or none any more."""
    done = tile.finalized if isinstance(tile, Buffer) else None
    if done is None:
        return TileTypeError(message, loc=source.current(), expected=expected)
    return TileTypeError(
        f"{what} of {tile.name}, which line {done.line} has finalized",
        loc=source.current(),
        expected=f"one T.finalize_reducer of {tile.name}, behind all that is added to it",
        hint="leave this one out" if what == "T.finalize_reducer" else f"{what} in front of line {done.line}",
    )


def _nothing(kind: str, dtype: str) -> str:
    """How the number that changes nothing is written."""
    if kind in ("max", "min"):
        infinite = f'T.infinity("{dtype}")' if dtype.startswith(("float", "bfloat")) else ""
        if kind == "max":
            return f"-{infinite}" if infinite else f'T.min_value("{dtype}")'
        return infinite or f'T.max_value("{dtype}")'
    return {"prod": "1", "bitand": "-1"}.get(kind, "0")


def update(target: Buffer, index: Any, op: str, value: Any) -> None:
    """``target[index] += value`` of an accumulator.

    Raises:
        TileSyntaxError: outside of T.Parallel, or under a condition in it. TileTypeError: another update, or
            indices that are not the loop's.
    """
    b, loc, kind = bld.current(), source.current(), target.reducer
    if op != OPS[kind]:
        usual = "T.reducer_update(…)" if len(OPS[kind]) > 1 else f"{target.name}[…] {OPS[kind]}= …"
        raise TileTypeError(f"{target.name} {op}= …, which is a {kind}", loc=loc, expected=usual)
    nest = b.frames[-1].nest if b.frames and b.frames[-1].kind == "parallel" else None
    if nest is None:
        raise TileSyntaxError(
            f"{target.name} is added to outside of T.Parallel",
            loc=loc,
            expected="an addition in the body of T.Parallel itself, under no condition",
            hint=f"T.if_then_else(c, x, {_nothing(kind, str(held(target.dtype)))}) for what is added",
        )
    variables, ranges = nest
    items = [as_expr(i) for i in (index if isinstance(index, tuple) else (index,))]
    extents = [high for _, high, _ in ranges]
    axes, fits = [], all(low == 0 and step == 1 for low, _, step in ranges) and len(items) == target.ndim
    for i, extent in zip(items, target.shape):
        axis = next((k for k, v in enumerate(variables) if isinstance(i, ir.Var) and v.same_as(i)), None)
        if axis is not None:
            axes.append(axis)
        fits = fits and (constant(i) == 0 and extent == 1 if axis is None else extents[axis] == extent)
    if not fits or axes != sorted(set(axes)):
        raise TileTypeError(
            f"{target.name} of {target.shape} is added to at {', '.join(map(str, items))}",
            loc=loc,
            expected="indices of T.Parallel over whole axes, in the order of its loops; 0 of an axis of one",
        )
    left = [k for k in range(len(extents)) if k not in axes]
    if not left:  # each iteration has an element of its own
        at = tuple(index) if isinstance(index, tuple) else index
        before = target[at]
        extreme = {"max": math.max, "min": math.min}.get(kind)
        target[at] = extreme(before, value) if extreme else binary(op, before, value)
        return
    inner = b.bodies.pop()  # what the nest leaves is allocated in front of it
    parts = b.give_name(alloc_of(extents, target, b), "added")
    b.bodies.append(inner)
    parts[tuple(variables)] = value

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
            fold_tile(source_tile, into, kind, axis, clear=not last)
            source_tile = into

    b.frames[-1].after.append(add)


def alloc_of(extents: list[Any], target: Buffer, b: bld.Builder) -> Buffer:
    """A fragment of the nest's extents, allocated where the body in front of the nest goes on."""
    frame = b.frames.pop()
    made = alloc_fragment(tuple(extents), str(target.dtype))
    b.frames.append(frame)
    return made
