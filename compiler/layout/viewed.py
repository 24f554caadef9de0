"""Views of tiles (T.view): the same bits as elements of another width, or as others of the same width.

Elements of the same width may have any axes: digits of the old ones become digits of the new ones, where
each begins and ends at an end of the other's. Of elements of another width only the last axis changes its
extent: a wider element takes the place of neighbours that lie side by side in one thread's slots, the first
of which has an even place among them. Then the thread's registers can be read either way, and no data moves.

In shared memory a view leads to the same bytes: the tile's digits become digits of its row-major index, those
elements of the other width, and those digits of the view's axes. Swizzles move chunks of 16 bytes, which no
element crosses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from tilescale.compiler.layout.fragment import Fragment
from tilescale.compiler.layout.loops import bits_of
from tilescale.compiler.layout.pieces import Piece
from tilescale.compiler.layout.shared import Shared


def viewed(
    held: Fragment, bits: int, wanted: int, tile: tuple[int, ...] = (), shape: tuple[int, ...] = ()
) -> Fragment | None:
    """The fragment of a view of ``shape`` with elements of ``wanted`` bits, of a tile of shape ``tile`` and
    ``bits``; None where no layout says it. The tile's fragment may be larger. Where no shapes are given the
    axes stay what they are, but for the last one."""
    if tile[:-1] == shape[:-1]:
        if wanted == bits:
            return held
        return _wider(held, wanted // bits) if wanted > bits else _narrower(held, bits // wanted)
    whole, inner = prod(held.shape), prod(shape[1:])
    if wanted != bits or tile[1:] != held.shape[1:] or whole % inner:
        return None
    return _reshaped(held, (whole // inner, *shape[1:]))  # padding lies behind the first axis


def _reshaped(held: Fragment, shape: tuple[int, ...]) -> Fragment | None:
    pieces = _other_axes(held.pieces, held.shape, shape)
    return None if pieces is None else Fragment(shape, pieces, held.threads, held.first_thread)


def reshaped(held: Shared, shape: tuple[int, ...], bits: int) -> Shared | None:
    """The layout of a view of a tile in shared memory, of ``shape`` and elements of ``bits``; None where no
    layout says it."""
    if prod(held.shape) * held.bits != prod(shape) * bits:
        return None
    if bits == held.bits:
        pieces = _other_axes(held.pieces, held.shape, shape)
    else:
        flat = _other_axes(held.pieces, held.shape, (prod(held.shape),))
        other = None if flat is None else _of_width(flat, held.bits, bits)
        pieces = None if other is None else _other_axes(other, (prod(shape),), shape)
    return None if pieces is None else Shared(shape, pieces, bits, held.swizzle)


def _of_width(digits: Sequence[Piece], bits: int, wanted: int) -> tuple[Piece, ...] | None:
    """Digits of a row-major index of elements of ``bits`` as those of elements of ``wanted``; None where
    neighbours that become one do not lie side by side."""
    if wanted < bits:
        times = bits // wanted
        wide = (replace(p, unit=p.unit * times, stride=p.stride * times) for p in digits)
        return (Piece(0, 1, times, "offset", 1), *wide)
    times, made = wanted // bits, []
    for p in digits:
        if p.unit == 1 and p.stride == 1 and p.extent % times == 0:
            made.append(replace(p, extent=p.extent // times))
        elif p.unit % times or p.stride % times:
            return None
        else:
            made.append(replace(p, unit=p.unit // times, stride=p.stride // times))
    return tuple(made)


def carries(layout: Shared, held: Any, over: Mapping[Any, Sequence[Any]]) -> bool:
    """Whether every view of a tile that has this layout has one that leads to the same bytes. ``over``: the
    views of each tile, and of each view."""
    for view in over.get(held, ()):
        made = reshaped(layout, tuple(int(e) for e in view.ty.shape), bits_of(view))
        if made is None or not carries(made, view, over):
            return False
    return True


def _other_axes(
    digits: Sequence[Piece], of: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[Piece, ...] | None:
    """Digits of the axes as digits of the row-major index, and those as digits of other axes."""
    pieces = []
    inner = [prod(of[k + 1 :]) for k in range(len(of))]
    ends = [(prod(shape[k + 1 :]), prod(shape[k:])) for k in range(len(shape))]
    for p in digits:
        if p.axis is None:
            pieces.append(p)
            continue
        if of[p.axis] % (p.unit * p.extent):  # it goes on behind the axis' end
            return None
        low, high = inner[p.axis] * p.unit, inner[p.axis] * p.unit * p.extent
        for axis, (unit, end) in enumerate(ends):
            first, last = max(low, unit), min(high, end)
            if first >= last:
                continue
            if first % unit or first % low or last % first:
                return None
            pieces.append(Piece(axis, first // unit, last // first, p.to, p.stride * (first // low)))
    return tuple(pieces)


def _wider(held: Fragment, times: int) -> Fragment | None:
    last, pieces = len(held.shape) - 1, []
    for p in held.pieces:
        if p.axis == last and p.unit == 1:
            if p.to != "slot" or p.stride != 1 or p.extent % times:
                return None
            if p.extent > times:
                pieces.append(Piece(last, 1, p.extent // times, "slot", 1))
            continue
        if p.axis == last and p.unit % times or p.to == "slot" and p.stride % times:
            return None
        stride = p.stride // times if p.to == "slot" else p.stride
        pieces.append(replace(p, unit=p.unit // times if p.axis == last else p.unit, stride=stride))
    return Fragment(
        (*held.shape[:-1], held.shape[-1] // times), tuple(pieces), held.threads, held.first_thread
    )


def _narrower(held: Fragment, times: int) -> Fragment:
    last = len(held.shape) - 1
    pieces = [
        replace(
            p,
            unit=p.unit * times if p.axis == last else p.unit,
            stride=p.stride * times if p.to == "slot" else p.stride,
        )
        for p in held.pieces
    ]
    shape, pieces = (*held.shape[:-1], held.shape[-1] * times), [*pieces, Piece(last, 1, times, "slot", 1)]
    return Fragment(shape, tuple(pieces), held.threads, held.first_thread)
