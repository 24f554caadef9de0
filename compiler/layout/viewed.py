"""Views of tiles (T.view): in registers the same bits as elements of another width, or as others of the same
width.

Elements of the same width may have any axes: digits of the old ones become digits of the new ones, where
each begins and ends at an end of the other's. Of elements of another width only the last axis changes its
extent: a wider element takes the place of neighbours that lie side by side in one thread's slots, the first
of which has an even place among them. Then the thread's registers can be read either way, and no data moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from tilescale.compiler.layout.fragment import Fragment
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


def reshaped(held: Shared, shape: tuple[int, ...]) -> Shared | None:
    """The layout of a view of a tile in shared memory under other axes, of the same elements; None where no
    layout says it."""
    pieces = _other_axes(held.pieces, held.shape, shape)
    return None if pieces is None else Shared(shape, pieces, held.bits, held.swizzle)


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
