"""Views of tiles in registers (T.view): the same bits as elements of another width, or as others of the same
width.

Only the last axis changes its extent. A wider element takes the place of neighbours that lie side by side in
one thread's slots, the first of which has an even place among them; then the thread's registers can be read
either way, and no data moves.
"""

from __future__ import annotations

from dataclasses import replace

from tilescale.compiler.layout.fragment import Fragment
from tilescale.compiler.layout.pieces import Piece


def viewed(held: Fragment, bits: int, wanted: int) -> Fragment | None:
    """The fragment of a view with elements of ``wanted`` bits, of a tile of ``bits``; None where no layout
    says it."""
    if wanted == bits:
        return held
    return _wider(held, wanted // bits) if wanted > bits else _narrower(held, bits // wanted)


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
