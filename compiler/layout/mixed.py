"""Loops and fragments that follow each other through an index of mixed digits: ``words[i, p % 4 * 4 + p //
16]``, ``pairs[i, 2 * j + 1]``, ``both[i, q * 16 + c]``."""

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
    """A digit of a loop's variable: its piece of the loop, cut into prime factors, and how far its steps move
    each index."""

    piece: Piece
    steps: tuple[int, ...]


def from_mixed(loop: Loop, indices: Sequence[Any], shape: Sequence[int], writes: bool) -> Fragment | None:
    """The fragment of extents ``shape`` whose element ``indices`` lies where its iteration runs. Each digit
    of the loop's variables may move one index, by any step; those that move none are copies, or a slot's
    values, read again. What is left out between the digits lies in further slots of the same threads. Slots
    are numbered along the last axis, so that neighbours in memory are a thread's neighbours. None where an
    index is no sum of digits, or several iterations write one element."""
    if any(loop.shifts) or tuple(loop.extents) != loop.fragment.shape:
        return None
    found = _digits(loop.vars, loop.extents, loop.fragment.pieces, indices)
    if found is None:
        return None
    digits, first = found
    pieces: list[Piece] = []
    for d in digits:
        moved = [axis for axis, step in enumerate(d.steps) if step]
        if len(moved) > 1 or not moved and writes:
            return None
        if moved:
            pieces.append(replace(d.piece, axis=moved[0], unit=d.steps[moved[0]]))
        elif d.piece.to == "thread":
            pieces.append(replace(d.piece, axis=None, unit=0))
    for axis, extent in enumerate(shape):
        left_out = missing([p for p in pieces if p.axis == axis], axis, extent)
        if sum(first[axis] // p.unit % p.extent * p.unit for p in left_out) != first[axis]:
            return None
        pieces += left_out
    pieces += [p for p in loop.fragment.pieces if p.axis is None]
    slot = 1
    for k in sorted(
        (k for k, p in enumerate(pieces) if p.to == "slot"),
        key=lambda k: (-(pieces[k].axis or 0), pieces[k].unit),
    ):
        pieces[k] = replace(pieces[k], stride=slot)
        slot *= pieces[k].extent
    try:
        return Fragment(tuple(shape), tuple(pieces), loop.fragment.threads)
    except TileValueError:  # digits that overlap
        return None


def missing(digits: list[Piece], axis: int, extent: int) -> list[Piece]:
    """The digits of an axis that are between the given ones and behind them, as slots; the axis stays cut
    wrongly where there are none."""
    made, unit = [], 1
    for p in sorted(digits, key=lambda p: p.unit):
        if p.unit > unit and p.unit % unit == 0:
            made.append(Piece(axis, unit, p.unit // unit, "slot", 1))
        unit = p.unit * p.extent
    if extent > unit and extent % unit == 0:
        made.append(Piece(axis, unit, extent // unit, "slot", 1))
    return made


#: what `to_mixed` found, by all that decides it: several passes ask the same
_FOUND: dict[Any, tuple[Piece, ...] | None] = {}


def to_mixed(
    vars_: Sequence[Any], extents: Sequence[int], indices: Sequence[Any], fragment: Fragment
) -> tuple[Piece, ...] | None:
    """The other way round: the pieces of the loop that runs where ``fragment`` has its element ``indices``,
    each digit of a variable where the digit of the axis that it moves is. Digits that move no index have no
    piece. None where an index is no sum of digits, or where threads differ in a digit that none moves."""
    names = tuple(v.name for v in vars_)
    if len(set(names)) < len(names) or any(numeric.variables(e) - set(vars_) for e in indices):
        return _to_mixed(vars_, extents, indices, fragment)
    key = names, tuple(extents), tuple(map(str, indices)), fragment
    if key not in _FOUND:
        if len(_FOUND) > 256:
            _FOUND.clear()
        _FOUND[key] = _to_mixed(vars_, extents, indices, fragment)
    return _FOUND[key]


def _to_mixed(
    vars_: Sequence[Any], extents: Sequence[int], indices: Sequence[Any], fragment: Fragment
) -> tuple[Piece, ...] | None:
    whole = [q for k, n in enumerate(extents) if n > 1 for q in _primes(Piece(k, 1, n, "slot", 1))]
    found = _digits(vars_, extents, whole, indices)
    if found is None:
        return None
    digits, first = found
    if any(at < 0 or at >= n for at, n in zip(first, fragment.shape, strict=True)):
        return None
    moves: dict[tuple[int, int, int], Piece] = {}
    for d in digits:
        moved = [axis for axis, step in enumerate(d.steps) if step]
        if len(moved) > 1:
            return None
        if moved:
            moves[moved[0], d.steps[moved[0]], d.piece.extent] = d.piece
    pieces: list[Piece] = []
    for p in (q for piece in fragment.pieces if piece.axis is not None for q in _primes(piece)):
        assert p.axis is not None
        own = moves.pop((p.axis, p.unit, p.extent), None)
        if own is None and p.to == "thread" or own is not None and first[p.axis] // p.unit % p.extent:
            return None  # a digit that begins elsewhere than at zero takes a carry
        if own is not None:
            pieces.append(replace(own, to=p.to, stride=p.stride))
    return None if moves else tuple(pieces)


def _digits(
    vars_: Sequence[Any], extents: Sequence[int], pieces: Sequence[Piece], indices: Sequence[Any]
) -> tuple[list[_Digit], list[int]] | None:
    """The digits of a loop's pieces with their steps, and the indices of the first iteration; None where an
    index is not a sum of those."""
    if int(np.prod(extents)) > MOST:
        return None
    grid = [np.ravel(g) for g in np.indices(extents)]
    try:
        values = [
            np.broadcast_to(
                np.asarray(numeric.evaluate(e, dict(zip(vars_, grid, strict=True)))), grid[0].shape
            )
            for e in indices
        ]
    except numeric.Unknown:
        return None
    cut = [q for p in pieces if p.axis is not None for q in _primes(p)]
    found = []
    for q in cut:
        at = int(np.ravel_multi_index([q.unit if k == q.axis else 0 for k in range(len(grid))], extents))
        found.append(_Digit(q, tuple(int(v[at] - v[0]) for v in values)))
    for axis, v in enumerate(values):
        made = np.full_like(v, v[0])
        for d in found:
            made = made + grid[d.piece.axis or 0] // d.piece.unit % d.piece.extent * d.steps[axis]
        if not (made == v).all():
            return None
    return found, [int(v[0]) for v in values]


def _primes(piece: Piece) -> list[Piece]:
    """A piece as digits of two, three, … values each."""
    made, rest = [], piece
    for factor in range(2, piece.extent + 1):
        while rest.extent > factor and rest.extent % factor == 0:
            low, rest = rest.split(factor)
            made.append(low)
    return [*made, rest]
