"""A fragment that follows a loop through an index of mixed digits: ``words[i, p % 4 * 4 + p // 16]``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tilescale.compiler.ir import numeric
from tilescale.compiler.layout.fragment import Fragment
from tilescale.compiler.layout.match import Loop
from tilescale.compiler.layout.pieces import Piece
from tilescale.errors import TileValueError

#: iterations for which an index is evaluated
MOST = 1 << 16


@dataclass(frozen=True)
class _Digit:
    """A digit of a loop's variable: its piece of the loop, cut into prime factors, and how far its steps move each index."""

    piece: Piece
    steps: tuple[int, ...]


def from_mixed(loop: Loop, indices: Sequence[Any], shape: Sequence[int], writes: bool) -> Fragment | None:
    """The fragment of extents ``shape`` whose element ``indices`` lies where its iteration runs. Each digit of the loop's variables may
    move one index, by any step; those that move none are copies, or a slot's values, read again. Slots are numbered along the last axis,
    so that neighbours in memory are a thread's neighbours. None where an index is no such sum of digits, or names no whole tile."""
    if any(loop.shifts) or tuple(loop.extents) != loop.fragment.shape or int(np.prod(loop.extents)) > MOST:
        return None
    digits = _digits(loop, indices)
    if digits is None:
        return None
    pieces: list[Piece] = []
    for d in digits:
        moved = [axis for axis, step in enumerate(d.steps) if step]
        if len(moved) > 1 or not moved and writes:
            return None
        if moved:
            pieces.append(replace(d.piece, axis=moved[0], unit=d.steps[moved[0]]))
        elif d.piece.to == "thread":
            pieces.append(replace(d.piece, axis=None, unit=0))
    pieces += [p for p in loop.fragment.pieces if p.axis is None]
    slot = 1
    for k in sorted((k for k, p in enumerate(pieces) if p.to == "slot"), key=lambda k: (-(pieces[k].axis or 0), pieces[k].unit)):
        pieces[k] = replace(pieces[k], stride=slot)
        slot *= pieces[k].extent
    try:
        return Fragment(tuple(shape), tuple(pieces), loop.fragment.threads)
    except TileValueError:  # digits with gaps between them
        return None


def _digits(loop: Loop, indices: Sequence[Any]) -> list[_Digit] | None:
    """The loop's digits with their steps; None where an index is not their sum, from zero on."""
    grid = [np.ravel(g) for g in np.indices(loop.extents)]
    try:
        values = [np.broadcast_to(np.asarray(numeric.evaluate(e, dict(zip(loop.vars, grid, strict=True)))), grid[0].shape) for e in indices]
    except numeric.Unknown:
        return None
    cut = [q for p in loop.fragment.pieces if p.axis is not None for q in _primes(p)]
    found = []
    for q in cut:
        at = int(np.ravel_multi_index([q.unit if k == q.axis else 0 for k in range(len(grid))], loop.extents))
        found.append(_Digit(q, tuple(int(v[at]) for v in values)))
    for axis, v in enumerate(values):
        made = np.zeros_like(v)
        for d in found:
            made = made + grid[d.piece.axis or 0] // d.piece.unit % d.piece.extent * d.steps[axis]
        if not (made == v).all():
            return None
    return found


def _primes(piece: Piece) -> list[Piece]:
    """A piece as digits of two, three, … values each."""
    made, rest = [], piece
    for factor in range(2, piece.extent + 1):
        while rest.extent > factor and rest.extent % factor == 0:
            low, rest = rest.split(factor)
            made.append(low)
    return [*made, rest]
