"""Copies and fills of whole tiles: vectors along the contiguous axis, conversions on the way."""

from __future__ import annotations

from collections.abc import Callable

from tilescale.compiler.cpu import convert
from tilescale.compiler.cpu.codegen import host_cpu
from tilescale.compiler.cpu.expr import loop, seq, vector_loop
from tilescale.compiler.cpu.tile import Expr, Stmt, Tile
from tilescale.compiler.tvm_compat import tirx
from tilescale.errors import TileValueError


def emit_copy(src: Tile, dst: Tile) -> Stmt:
    """dst = src, element by element, converted by `convert.cast`; equal shapes of any rank, any strides.

    Raises:
        TileValueError: the shapes differ.
    """
    if src.shape != dst.shape:
        raise TileValueError(
            f"a copy of {list(src.shape)} into {list(dst.shape)}", expected="tiles of one shape"
        )
    plain = src.dtype == dst.dtype

    def element(ids: list[Expr]) -> Stmt:
        if plain:
            return tirx.BufferStore(dst.buf, tirx.BufferLoad(src.buf, [src.index(*ids)]), [dst.index(*ids)])
        value = convert.cast(convert.load(src.buf, src.index(*ids), src.dtype), src.dtype, dst.dtype)
        return convert.store(dst.buf, dst.index(*ids), value, dst.dtype)

    wide = (
        [convert.storage_dtype(dst.dtype)] if plain else [convert.compute_dtype(t.dtype) for t in (src, dst)]
    )
    return for_each(dst, element, min(lanes_of(d) for d in wide), [src])


def emit_fill(dst: Tile, value: Expr) -> Stmt:
    """Every element of dst = ``value``, a compute value of its dtype."""
    return for_each(
        dst, lambda ids: convert.store(dst.buf, dst.index(*ids), value, dst.dtype), lanes_of(dst.dtype)
    )


def lanes_of(dtype: str) -> int:
    """Lanes of a loop over ``dtype``: those of its compute dtype."""
    wide = convert.compute_dtype(dtype)
    return host_cpu().lanes("uint8" if wide == "bool" else wide)


def for_each(
    dst: Tile, element: Callable[[list[Expr]], Stmt], lanes: int, others: list[Tile] | None = None
) -> Stmt:
    """``element([i, j, …])`` for every index of dst, vectors along the axis on which most tiles are
    contiguous."""
    tiles = [dst, *(others or [])]
    rank = len(dst.shape)
    if rank == 0:
        return element([])
    inner = max(
        range(rank), key=lambda i: (sum(t.strides[i] == 1 for t in tiles) if dst.shape[i] > 1 else -1, i)
    )
    contiguous = any(t.strides[inner] == 1 for t in tiles)
    outer = [i for i in range(rank) if i != inner]

    def nest(position: int, ids: dict[int, Expr]) -> Stmt:
        if position < len(outer):
            axis = outer[position]
            return loop("i", dst.shape[axis], lambda v: nest(position + 1, {**ids, axis: v}))
        width = lanes if contiguous else 1
        return vector_loop(
            dst.shape[inner], width, lambda v: element([{**ids, inner: v}[i] for i in range(rank)])
        )

    return seq([nest(0, {})])
