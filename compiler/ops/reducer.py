"""Accumulators that a T.Parallel nest adds to along some of its axes (``r[i] += x`` in ``T.Parallel(M, N)``),
or of which it takes the maximum, and the like. No operation of the IR: the nest leaves what it adds in a
fragment of its own, and behind it T.reduce adds that to the accumulator, in its fixed order."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from math import prod
from typing import Any

from tilescale.compiler.builder import state as bld
from tilescale.compiler.builder.values import Buffer, as_expr, binary
from tilescale.compiler.ir import source
from tilescale.compiler.ir.folds import identity
from tilescale.compiler.ir.multiples import spelt_out
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.walks import mentions
from tilescale.compiler.ops import loops, math
from tilescale.compiler.ops.alloc import alloc_fragment
from tilescale.compiler.ops.base import same_extent
from tilescale.compiler.ops.copy import copy
from tilescale.compiler.ops.fill import fill
from tilescale.compiler.ops.reduce import fold_tile, together
from tilescale.compiler.tvm_compat import ir, structural_map, structural_walk, tirx
from tilescale.errors import TileSyntaxError, TileTypeError, TileValueError
from tilescale.language.dtypes import held

SUM = "sum"
#: elements that each thread holds, at most, of what a nest leaves for a plain fragment
_MOST = 128
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


#: op → the expression that ``r[i] = T.max(r[i], x)`` and its like are
_EXPRESSIONS: dict[str, Any] = {SUM: tirx.Add, "max": tirx.Max, "min": tirx.Min, "prod": tirx.Mul}


def added(target: Buffer, index: Any, value: Any, kind: str) -> Any:
    """``x`` of ``r[i] = T.max(r[i], x)`` in T.Parallel, of an accumulator ``r`` of that op; None of any other
    assignment."""
    if not isinstance(value, _EXPRESSIONS.get(kind, ())):
        return None
    if not any(f.kind == "parallel" for f in bld.current().frames):
        return None
    items = [as_expr(i) for i in (index if isinstance(index, tuple) else (index,))]
    sides = [value.a, value.b]
    for own, other in (sides, sides[::-1]):
        if isinstance(own, ir.TensorLoad) and own.source.same_as(target.var):
            if len(items) == len(own.indices) and all(map(same_extent, own.indices, items)):
                return other
    return None


def implied(target: Buffer, index: Any, value: Any, op: str | None = None) -> bool:
    """Whether ``s[i] += a[i, j]`` of a plain fragment in ``T.Parallel(M, N)`` was done as an accumulator's:
    iterations that the index does not tell apart add to one element. The same of ``s[i] = T.max(s[i], x)``.
    Who else touches the element in the nest is refused when that ends."""
    b = bld.current()
    first = next((f for f in b.frames if f.kind == "parallel"), None)
    if (
        first is None
        or b.launch is None
        or target.scope != "local.fragment"
        or target.flat is not None
        or b.executor != "block"
    ):
        return False
    kind = next((k for k, expression in _EXPRESSIONS.items() if isinstance(value, expression)), None)
    if op is not None:
        kind = next((k for k, sign in OPS.items() if sign == op), None)
    elif kind is not None:
        value = added(target, index, value, kind)
    items = [as_expr(i) for i in (index if isinstance(index, tuple) else (index,))]
    if kind is None or value is None or len(items) != target.ndim or _reads(value, target):
        return False
    nest = _Nest(b, source.current())
    made = nest.made()
    spelt = [spelt_out(i, {v: e for v, e in b.definitions.items() if v in made}) for i in items]
    if nest.odd or prod(map(int, nest.extents)) > _MOST * b.launch.threads or nest.undecided(spelt, made):
        return False
    named = nest.named(spelt)
    if all(k in named or extent == 1 for k, extent in enumerate(nest.extents)):
        return False
    alone = next((a for a in first.after if isinstance(a, _Alone) and a.target is target), None)
    if alone is None:
        first.after.append(alone := _Alone(b, target, kind, source.current()))
    alone.kinds.add(kind)
    b.folded[target.var] = source.current()
    _update(nest, target, index, kind, value)
    return True


def require_apart(what: str, value: Any) -> None:
    """
    Raises:
        TileTypeError: threads are to combine a fragment that has their sum already, by `implied`. TileLang's
            has each thread's own part.
    """
    b, found = bld.current(), []
    structural_walk(as_expr(value), (ir.TensorLoad, lambda e: found.append(e.source)))
    for memory in found:
        if memory in b.folded:
            name, line = b.buffers[memory].name, b.folded[memory].line
            raise TileTypeError(
                f"{what} of {name}, which has what all threads added in line {line}",
                loc=source.current(),
                expected="each thread's own part",
                hint=f"leave {what} out, or T.alloc_local and T.serial for each thread's own part",
            )


def _reads(e: Any, target: Buffer) -> bool:
    found: list[Any] = []
    structural_walk(as_expr(e), (ir.TensorLoad, lambda x: found.append(x.source)))
    return any(x.same_as(target.var) for x in found)


class _Alone:
    """Looks, when a nest has ended, whether it touches a fragment that it folds into in another way."""

    def __init__(self, b: bld.Builder, target: Buffer, kind: str, loc: Any):
        self.b, self.target, self.kinds, self.loc = b, target, {kind}, loc

    def __call__(self) -> None:
        """
        Raises:
            TileSyntaxError: it does.
        """
        nest = next(s for s in reversed(self.b.bodies[-1]) if isinstance(s, tirx.For))
        found: list[Any] = []

        def touch(memory: Any, at: Any) -> None:
            if memory.same_as(self.target.var):
                found.append(at)

        structural_walk(nest, (ir.TensorLoad, lambda e: touch(e.source, e)))
        structural_walk(nest, (ir.TensorRegion, lambda r: touch(r.source, r)))
        structural_walk(nest, (tirx.BufferStore, lambda s: touch(s.buffer, s)))
        if found or len(self.kinds) > 1:
            raise TileSyntaxError(
                f"iterations of this T.Parallel add to one element of {self.target.name}, which it touches "
                "in another way, too",
                loc=self.loc,
                expected="in one nest what it adds, or its greatest or least, alone",
                hint=f"another T.Parallel for what else there is of {self.target.name}; T.serial where each "
                "iteration goes on from the one before",
            )


def update(target: Buffer, index: Any, op: str, value: Any) -> None:
    """``target[index] += value`` of an accumulator.

    Raises:
        TileSyntaxError: outside of T.Parallel. TileTypeError: another update, or an index that the nest's own
            loops and what is outside of it do not decide.
    """
    b, loc, kind = bld.current(), source.current(), target.reducer
    if op != OPS[kind]:
        usual = "T.reducer_update(…)" if len(OPS[kind]) > 1 else f"{target.name}[…] {OPS[kind]}= …"
        raise TileTypeError(f"{target.name} {op}= …, which is a {kind}", loc=loc, expected=usual)
    if not any(f.kind == "parallel" for f in b.frames):
        raise TileSyntaxError(
            f"{target.name} is added to outside of T.Parallel",
            loc=loc,
            expected="an addition in T.Parallel, by its iterations",
            hint=f"for i in T.Parallel(…): around it, or {target.name} of T.alloc_fragment",
        )
    nest = _Nest(b, loc)
    if nest.odd:
        raise TileTypeError(
            f"{target.name} is added to in T.Parallel over {', '.join(map(str, nest.extents))}",
            loc=loc,
            expected="constant extents, from 0 in steps of 1",
        )
    _update(nest, target, index, kind, value)


def _update(nest: _Nest, target: Buffer, index: Any, kind: str, value: Any) -> None:
    b, loc = nest.b, nest.loc
    items = [as_expr(i) for i in (index if isinstance(index, tuple) else (index,))]
    if len(items) != target.ndim:
        raise TileTypeError(
            f"{target.name} of {target.shape} is added to at {', '.join(map(str, items))}",
            loc=loc,
            expected=f"an index of each of its {target.ndim} axes",
        )
    made = nest.made()
    spelt = [spelt_out(i, {v: e for v, e in b.definitions.items() if v in made}) for i in items]
    axes = nest.whole_axes(target, spelt)
    if axes is None:
        nest.require(target, items, spelt, made)
    if axes is not None and not nest.apart and len(axes) == len(nest.extents):
        at = tuple(index) if isinstance(index, tuple) else index  # each iteration has an element of its own
        target[at] = _folded(kind, target[at], value)
        return
    nothing = identity(kind, str(held(target.dtype)))
    parts = nest.outside(lambda: _parts(b, nest, target, nothing))
    at = tuple(nest.variables)
    parts[at] = _folded(kind, parts[at], value) if nest.apart else value
    nest.frame.after.append(
        lambda: (
            _fold(b, parts, target, kind, [k for k in range(len(nest.extents)) if k not in axes])
            if axes is not None
            else _scatter(b, nest, parts, target, kind, spelt)
        )
    )


def _folded(kind: str, before: Any, value: Any) -> Any:
    extreme = {"max": math.max, "min": math.min}.get(kind)
    return extreme(before, value) if extreme else binary(OPS[kind], before, value)


class _Nest:
    """The T.Parallel nest around an update. ``apart``: other loops or conditions of the nest are around it,
    so that an iteration may come to it several times, or not at all. ``odd``: its ranges are no constants
    from 0 in steps of 1."""

    def __init__(self, b: bld.Builder, loc: Any):
        first = next(k for k, f in enumerate(b.frames) if f.kind == "parallel")
        self.b, self.first, self.loc = b, first, loc
        self.frame = b.frames[first]
        inner = b.frames[first:]
        self.apart = any(f.kind != "parallel" for f in inner)
        nests = [f.nest for f in inner if f.kind == "parallel"]
        self.variables = [v for variables, _ in nests for v in variables]
        ranges = [r for _, several in nests for r in several]
        self.extents = [high for _, high, _ in ranges]
        self.odd = any(low != 0 or step != 1 or constant(high) is None for low, high, step in ranges)

    def whole_axes(self, target: Buffer, items: list[Any]) -> list[int] | None:
        """The nest's axes that the indices are, over whole axes of the accumulator and in the nest's order;
        None where they are something else. An axis of one at 0 is left out."""
        axes = []
        for i, extent in zip(items, target.shape, strict=True):
            axis = self.axis(i)
            if axis is not None and self.extents[axis] == extent:
                axes.append(axis)
            elif axis is not None or constant(i) != 0 or extent != 1:
                return None
        return axes if axes == sorted(set(axes)) else None

    def axis(self, i: Any) -> int | None:
        return next((k for k, v in enumerate(self.variables) if isinstance(i, ir.Var) and v.same_as(i)), None)

    def named(self, items: list[Any]) -> list[int]:
        """The axes whose loops the indices name."""
        return [k for k, v in enumerate(self.variables) if any(mentions(i, v) for i in items)]

    def require(self, target: Buffer, items: list[Any], spelt: list[Any], made: set[Any]) -> None:
        """
        Raises:
            TileTypeError: an index reads memory, or names what the nest's body has made or counts.
        """
        if self.undecided(spelt, made):
            raise TileTypeError(
                f"{target.name} of {target.shape} is added to at {', '.join(map(str, items))}",
                loc=self.loc,
                expected="indices of the loops of T.Parallel and of what is outside of it",
                hint="T.atomic_add of a T.alloc_shared tile",
            )

    @staticmethod
    def undecided(spelt: list[Any], made: set[Any]) -> bool:
        """Whether an index reads memory, or names what the nest's body has made or counts."""
        found: list[Any] = []
        for i in spelt:
            structural_walk(i, ((ir.TensorLoad, ir.Call), found.append))
            structural_walk(i, (ir.Var, lambda v: found.append(v) if v in made else None))
        return bool(found)

    def made(self) -> set[Any]:
        """The names that are made within the nest, but for its own loops'."""
        found = {v for f in self.b.frames[self.first :] if f.kind != "parallel" for v in f.counts}
        for s in itertools.chain(*self.b.bodies[self.frame.outside :]):
            structural_walk(s, (tirx.Bind, lambda bound: found.add(bound.var)))
        return found

    def outside(self, act: Callable[[], Any]) -> Any:
        """What ``act`` makes, in front of the nest."""
        b, at = self.b, self.frame.outside
        frames, bodies = b.frames[self.first :], b.bodies[at:]
        del b.frames[self.first :], b.bodies[at:]
        made = act()
        b.frames.extend(frames)
        b.bodies.extend(bodies)
        return made


def _parts(b: bld.Builder, nest: _Nest, target: Buffer, nothing: Any) -> Buffer:
    """A fragment of the nest's extents, in front of it, for what each iteration adds."""
    made = _summed(b, nest.extents, target)
    if nest.apart:
        fill(made, nothing)
    return made


def _fold(b: bld.Builder, parts: Buffer, target: Buffer, kind: str, left: list[int]) -> None:
    """Adds what a nest left to the accumulator, along the axes ``left``."""
    source_tile, shape = parts, list(parts.shape)
    if not left:  # each element is one iteration's
        for at in loops.Parallel(*shape).trace(()):
            target[at] = _folded(kind, target[at], parts[at])
        return
    for n, axis in enumerate(reversed(left)):
        last = n == len(left) - 1
        del shape[axis]
        into = target if last else _summed(b, shape, target)
        fold_tile(source_tile, into, kind, axis, clear=not last)
        source_tile = into


def _summed(b: bld.Builder, shape: list[Any], target: Buffer) -> Buffer:
    made = alloc_fragment(tuple(shape) or (1,), str(target.dtype))
    b.give_name(made, "added")
    return made


def _scatter(b: bld.Builder, nest: _Nest, parts: Buffer, target: Buffer, kind: str, items: list[Any]) -> None:
    """Adds what a nest left to elements of the accumulator, along the loops that the indices do not name; one
    after the other where two iterations may have the same element."""
    kept = nest.named(items)
    left = [k for k in range(len(nest.extents)) if k not in kept]
    if left:
        shape = [nest.extents[k] for k in kept]
        whole = _summed(b, shape, target)
        fill(whole, identity(kind, str(held(target.dtype))))
        _fold(b, parts, whole, kind, left)
        parts = whole
    if not kept:
        at = tuple(items)
        target[at] = _folded(kind, target[at], parts[0])
        return
    over = [nest.extents[k] for k in kept]
    axes = [nest.axis(i) for i in items]
    injective = sorted(k for k in axes if k is not None) == kept
    for value in (loops.Parallel if injective else loops.grid)(*over).trace(()):
        at = value if isinstance(value, tuple) else (value,)
        now = {nest.variables[k]: v for k, v in zip(kept, at, strict=True)}
        place = tuple(structural_map(i, (ir.Var, lambda v: now.get(v, v))) for i in items)  # noqa: B023
        target[place] = _folded(kind, target[place], parts[at])
