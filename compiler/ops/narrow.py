"""T.copy from and to tensors of 4-bit numbers: their bytes go through a tile of bytes in shared memory, which
copies of any kind fill, and threads take it apart or put it together. No operation of the IR."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.builder import state as bld
from tilescale.compiler.builder.constructs import LoopNest
from tilescale.compiler.builder.narrow import decoded, dtype_of_tensor, encoded, halved, rounded
from tilescale.compiler.builder.values import Buffer, Region, as_expr, binary, const
from tilescale.compiler.ir import source
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ops import placed
from tilescale.compiler.ops.alloc import alloc_shared
from tilescale.compiler.ops.base import emit, require_same_shape
from tilescale.compiler.tvm_compat import ir, tirx
from tilescale.errors import TileTypeError


def copy(frm: Region, to: Region, words: dict[str, Any]) -> None:
    """``words``: what the author says of how threads copy, for the bytes.

    Raises:
        TileTypeError: a copy between tensors of different dtypes, one to a tensor that is not of tiles.
    """
    require_same_shape(frm, to, "T.copy")
    words = {k: v for k, v in words.items() if k == "by_threads"}
    if not frm.buffer.packed and not to.buffer.packed:
        _round(frm, to)
    elif frm.buffer.packed and to.buffer.packed:
        if frm.dtype != to.dtype:
            raise TileTypeError(f"T.copy of {frm.dtype} to {to.dtype} without a tile", loc=source.current())
        emit("copy", [_bytes(frm), _bytes(to)], words)
    elif frm.buffer.packed:
        _take_apart(frm, to, words)
    else:
        _put_together(frm, to, words)


def _round(frm: Region, to: Region) -> None:
    """Between tiles, and from a tensor of another dtype, which a copy to a tile of its own bounds."""
    if frm.buffer.scope.startswith("global"):
        between = alloc_shared(tuple(e for e in frm.extents if constant(e) != 1) or (1,), frm.dtype)
        bld.current().give_name(between, f"{frm.name}_values")
        emit("copy", [frm.ir(), between.whole().ir()], {})
        frm = between.whole()
    placed.by_element(to, frm, lambda i, j: to.buffer.store(i, frm.buffer[j]))


def _bytes(r: Region) -> Any:
    """The bytes of a part of a tensor."""
    low = [*r.mins[:-1], halved(r.mins[-1], f"the first column of {r}")]
    extents = [*r.extents[:-1], halved(r.extents[-1], f"the number of columns of {r}")]
    ranges = [ir.Range.from_min_extent(as_expr(m), as_expr(e)) for m, e in zip(low, extents, strict=True)]
    return tirx.BufferRegion(r.buffer.var, ranges)


def _staged(r: Region) -> tuple[Buffer, list[int]]:
    """A tile for the bytes of a part of a tensor, and the part's axes that it has: those longer than one."""
    axes = [k for k, e in enumerate(r.extents) if constant(e) != 1]
    shape = [*(r.extents[k] for k in axes[:-1]), halved(r.extents[-1], f"the number of columns of {r}")]
    made = alloc_shared(tuple(shape), dtype_of_tensor(r.buffer).packed)
    bld.current().give_name(made, f"{r.name}_bytes")
    return made, axes


def _take_apart(frm: Region, to: Region, words: dict[str, Any]) -> None:
    (staged, axes), dt = _staged(frm), dtype_of_tensor(frm.buffer)
    emit("copy", [_bytes(frm), staged.whole().ir()], words)
    for at in _each([frm.extents[k] for k in axes]):
        *outer, column = at
        place = (*outer, tirx.floordiv(column, const(2, "int32")))
        byte = staged[place]
        value = decoded(byte, tirx.floormod(column, const(2, "int32")), dt)
        to.buffer.store(_places(to, at), value, exact=to.dtype == dt)


def _put_together(frm: Region, to: Region, words: dict[str, Any]) -> None:
    dt = dtype_of_tensor(to.buffer)
    if frm.buffer.scope.startswith("local"):  # two neighbours of a fragment may be of two threads
        held = alloc_shared(tuple(e for e in frm.extents if constant(e) != 1), dt)
        bld.current().give_name(held, f"{to.name}_values")
        for at in _each(held.shape):
            held.store(tuple(at), frm.buffer[_places(frm, at)])
        frm = held.whole()
    staged, axes = _staged(to)
    for at in _each([*(to.extents[k] for k in axes[:-1]), staged.shape[-1]]):
        *outer, pair = at
        first = binary("*", pair, 2)
        low, high = (
            encoded(rounded(frm.buffer[_places(frm, [*outer, column])], dt), dt)
            for column in (first, binary("+", first, 1))
        )
        byte = tirx.bitwise_or(low, tirx.shift_left(high, const(4, "int32")))
        staged.store((*outer, pair), tirx.Cast(str(dt.packed), byte))
    emit("copy", [staged.whole().ir(), _bytes(to)], words)


def _each(extents: Any) -> Any:
    """The indices of a T.Parallel nest, as a list."""
    nest = LoopNest("parallel", [(0, e, 1) for e in extents])
    for found in nest.trace(tuple("ijklmnpq"[: len(extents)])):
        yield list(found) if isinstance(found, tuple) else [found]


def _places(r: Region, at: Any) -> tuple[Any, ...]:
    """Where the element ``at`` of a part lies, counted along its axes longer than one."""
    left = iter(at)
    return tuple(
        as_expr(low) if constant(e) == 1 else binary("+", as_expr(low), next(left))
        for low, e in zip(r.mins, r.extents, strict=True)
    )
