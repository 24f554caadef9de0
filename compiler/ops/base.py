"""What every operation is made of: a registered call in the IR, an effect table, lowerings by target."""

from __future__ import annotations

from typing import Any

from tilescale import log
from tilescale.compiler.builder import state as bld
from tilescale.compiler.builder.lanes import LanesOf, VectorTile
from tilescale.compiler.builder.narrow import Element
from tilescale.compiler.builder.poison import Poison
from tilescale.compiler.builder.values import Buffer, Region, Variable, difference
from tilescale.compiler.ir import source
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.operations import REGISTRY, VOID
from tilescale.compiler.tvm_compat import ir, tirx
from tilescale.errors import TileSyntaxError, TileTypeError, TileValueError
from tilescale.language.dtypes import Narrow


def of_iterations() -> str:
    """The innermost open loop whose iterations are of one element each: "T.Parallel", "T.vectorized", or ""
    where none is open."""
    names = {"parallel": "T.Parallel", "vectorized": "T.vectorized"}
    return next((names[frame.kind] for frame in reversed(bld.current().frames) if frame.kind in names), "")


def _refuse_tiles(call: Any) -> None:
    """An iteration of T.Parallel belongs to one thread (of a GPU) or lane, a tile operation to all of an
    executor's.

    Raises:
        TileSyntaxError: a tile operation in T.Parallel or T.vectorized.
    """
    loop, op = of_iterations(), REGISTRY[call.op.name]
    single = all(
        constant(r.extent) == 1 for a in call.args if isinstance(a, ir.TensorRegion) for r in a.region
    )
    if not loop or (op.in_iterations and single):
        return
    raise TileSyntaxError(
        f"{op.written(call)} of a tile in {loop}, whose iterations are of elements: one thread runs each",
        loc=source.current(),
        expected="elements (D[i, j] = A[i, j], T.atomic_add of one), T.print and T.device_assert",
        hint="for i in T.serial(n), where each round has a tile of its own, or one operation on the whole "
        "tile outside the loop",
    )


def emit(name: str, args: list[Any], attrs: dict[str, Any] | None = None) -> None:
    """Adds ``ts.<name>(args)`` to the trace, with the scales it acts at.

    Raises:
        TileSyntaxError: a tile operation in T.Parallel or T.vectorized.
    """
    b = bld.current()
    where = {"executor": b.executor, "reach": b.reach, **(attrs or {})}
    span = b.span()
    call = ir.Call(f"ts.{name}", args, attrs=where, ret_ty=VOID, span=span)
    _refuse_tiles(call)
    b.emit(tirx.Evaluate(call, span))


def unheeded(name: str, annotations: Any) -> None:
    """TileLang's notes for its own code of an operation, which the log says once decide nothing here.

    Raises:
        TileTypeError: no dict.
    """
    if annotations is None:
        return
    if not isinstance(annotations, dict):
        raise TileTypeError(
            f"T.{name} with annotations={annotations!r}", loc=source.current(), expected="a dict"
        )
    if annotations:
        log.say("info", f"annotations of T.{name} decide nothing here", once=True)


def is_tile(value: Any) -> bool:
    """Whether a value names memory: a buffer, a region, or an element that stands for the base of one."""
    if isinstance(value, (Buffer, Region, Variable, ir.TensorLoad, Element, LanesOf)):
        return True
    return isinstance(value, ir.Var) and value in bld.current().origins


def region(value: Any, what: str, like: tuple[Any, ...] | None = None, narrow: bool = False) -> Region:
    """The part of memory that an operand names. An element ``A[i, j]`` is the base of a tile shaped ``like``
    the other operand. ``narrow``: 4-bit numbers may be there.

    Raises:
        TileTypeError: the operand is no memory, or is of 4-bit numbers.
    """
    found = _region(value, what, like)
    if isinstance(found.buffer, VectorTile):
        raise TileTypeError(
            f"{what} is {found.name}, of {found.dtype}",
            loc=source.current(),
            expected="T.copy, T.fill and elements of tiles of vectors",
            hint=f"{found.buffer.of.dtype} with a last axis of {found.buffer.count}",
        )
    if isinstance(found.dtype, Narrow) and not narrow:
        raise TileTypeError(
            f"{what} is {found.name}, of {found.dtype}",
            loc=source.current(),
            expected="T.copy, T.fill, T.gemm's operands and T.Parallel for tiles of 4 bits",
            hint=f"T.copy({found.name}, tile) into a tile of T.{found.dtype.held} first",
        )
    return found


def _region(value: Any, what: str, like: tuple[Any, ...] | None) -> Region:
    b = bld.current()
    if isinstance(value, Poison):
        value.refuse()
    if isinstance(value, Region):
        return value
    if isinstance(value, Variable):
        return value.buffer.whole()
    if isinstance(value, Buffer):
        return value.whole()
    if isinstance(value, ir.Var) and value in b.origins:
        value = b.origins[value]
    if isinstance(value, (ir.TensorLoad, Element)):
        buffer = value.buffer if isinstance(value, Element) else b.buffers[value.source]
        indices = list(value.indices)
        tail = tuple(like or ())
        if len(tail) > len(indices):
            extra, tail = tail[: len(tail) - len(indices)], tail[len(tail) - len(indices) :]
            if any(constant(e) != 1 for e in extra):
                raise TileValueError(
                    f"{what}: {buffer.name} has {len(indices)} axes, too few for a tile of {show(like)}",
                    loc=source.current(),
                )
        extents = (1,) * (len(indices) - len(tail)) + tail
        dropped = tuple([True] * (len(indices) - len(tail)) + [False] * len(tail))
        made = Region(buffer, tuple(indices), extents, dropped)
        if buffer.scope.startswith(("shared", "local")):
            for axis, (m, e) in enumerate(zip(made.mins, made.extents, strict=True)):
                buffer._check_constant(axis, m, e)
        return made
    raise TileTypeError(
        f"{what} is {value!r} ({type(value).__name__})",
        loc=source.current(),
        expected="a tensor, an allocation, a slice A[i:i+m, j] or the first element A[i, j] of a tile",
    )


def element(value: Any, what: str) -> Region:
    """The single element that an operand names."""
    if isinstance(value, (Buffer, Variable)):
        buffer = value.buffer if isinstance(value, Variable) else value
        if all(constant(s) == 1 for s in buffer.shape):
            return buffer.whole()
    made = region(value, what, ())
    if any(constant(e) != 1 for e in made.extents):
        raise TileValueError(
            f"{what} is a tile of {show(made.shape)}",
            loc=source.current(),
            expected=f"one element, {made.name}[i]",
        )
    return made


def require_inside(of: Region) -> None:
    """Raises TileValueError where a constant index of an element lies outside a constant extent."""
    for axis, (low, extent) in enumerate(zip(of.mins, of.extents, strict=True)):
        of.buffer._check_constant(axis, low, extent)


def squeeze(shape: tuple[Any, ...]) -> tuple[Any, ...]:
    """A shape without its axes of extent one."""
    return tuple(e for e in shape if constant(e) != 1)


def same_extent(a: Any, b: Any) -> bool:
    x, y = constant(a), constant(b)
    if x is not None and y is not None:
        return x == y
    return constant(difference(a, b)) == 0


def require_same_shape(a: Region, b: Region, what: str) -> None:
    """Both regions have one shape, axes of extent one aside.

    Raises:
        TileValueError: they differ; the text shows both.
    """
    x, y = squeeze(a.shape), squeeze(b.shape)
    if len(x) != len(y) or not all(same_extent(p, q) for p, q in zip(x, y, strict=True)):
        raise TileValueError(
            f"{what}: {a.name} has a tile of {show(a.shape)} and {b.name} one of {show(b.shape)}",
            loc=source.current(),
            expected="the same shape on both sides",
        )


def show(shape: Any) -> str:
    return (
        "(" + ", ".join(map(str, shape or ())) + ("," if shape is not None and len(shape) == 1 else "") + ")"
    )
