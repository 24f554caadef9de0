"""The algebra under fragments and swizzled tiles: an index cut into digits, each of which moves an element by
a stride.

An axis of extent 128 may be cut into digits (unit 1, extent 8), (unit 8, extent 16): index 19 = 3·1 + 2·8. A
*piece* is one digit and where it leads: ``to`` one of a layout's outputs (a thread, a slot of its registers,
an offset in shared memory) by a stride. An output is the sum of its pieces' digits times their strides.
Extents need not be powers of two. This is the mixed-radix reading of what CUTLASS writes as nested shapes and
strides (CuTe) and Triton as matrices over bits (Zhou et al., "Linear Layouts", arXiv 2505.23819).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from tilescale.errors import TileValueError


@dataclass(frozen=True, order=True)
class Piece:
    """Digit ``index // unit % extent`` of an axis, and how far each step of it moves the output ``to``.

    ``axis`` None: no axis of the tile but a copy of it: every value of the digit holds the same element.
    """

    axis: int | None
    unit: int
    extent: int
    to: str
    stride: int

    def split(self, low: int) -> tuple[Piece, Piece]:
        """Two pieces that do the same, the first with ``low`` values. ``low`` divides the extent."""
        if self.extent % low:
            raise TileValueError(
                f"a digit of {self.extent} values cannot be cut at {low}", expected="a divisor"
            )
        high = replace(self, unit=self.unit * low, extent=self.extent // low, stride=self.stride * low)
        return replace(self, extent=low), high


def _order(piece: Piece) -> tuple[int, int, str, int]:
    return (-1 if piece.axis is None else piece.axis, piece.unit, piece.to, piece.stride)


def canonical(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """The one way of writing a layout: digits of one value left out, neighbours that move alike merged,
    sorted by axis and unit. Two layouts are the same map exactly when these are equal. Copies (``axis`` None)
    have no unit: they are merged by stride."""
    kept = [replace(p, unit=0) if p.axis is None else p for p in pieces if p.extent != 1]
    done: list[Piece] = []
    for p in sorted(kept, key=_order):
        last = done[-1] if done else None
        joins = (
            last is not None
            and last.axis == p.axis
            and last.to == p.to
            and last.stride * last.extent == p.stride
        )
        if joins and last is not None and (p.axis is None or last.unit * last.extent == p.unit):
            done[-1] = replace(last, extent=last.extent * p.extent)
        else:
            done.append(p)
    return tuple(done)


def check_axes(shape: Sequence[int], pieces: Sequence[Piece]) -> None:
    """Every axis is cut into digits without gap or overlap.

    Raises:
        TileValueError: it is not.
    """
    for axis, extent in enumerate(shape):
        unit = 1
        for p in sorted((p for p in pieces if p.axis == axis), key=lambda p: p.unit):
            if p.unit != unit:
                raise TileValueError(
                    f"axis {axis}: a digit begins at {p.unit}", expected=f"one that begins at {unit}"
                )
            unit *= p.extent
        if unit != extent:
            raise TileValueError(
                f"axis {axis} of extent {extent} is cut into digits of {unit} values", expected=f"{extent}"
            )


def evaluate(pieces: Iterable[Piece], to: str, index: Sequence[Any]) -> Any:
    """One output for an index (integers, or arrays that broadcast)."""
    arrays = [i for i in index if isinstance(i, np.ndarray)]
    total: Any = np.zeros(np.broadcast_shapes(*[a.shape for a in arrays]), np.int64) if arrays else 0
    for p in pieces:
        if p.to == to and p.axis is not None:
            total = total + index[p.axis] // p.unit % p.extent * p.stride
    return total


def is_injective(pieces: Sequence[Piece]) -> bool:
    """Whether different digits give different outputs: an output can be read digit by digit if each stride
    steps over all that the smaller ones span. Where strides interleave otherwise the outputs are counted."""
    for to in {p.to for p in pieces}:
        mine = sorted((abs(p.stride), p.extent) for p in pieces if p.to == to and p.extent > 1)
        reach = 0
        for stride, extent in mine:
            if stride <= reach:
                return len(np.unique(_places(mine))) == prod(e for _, e in mine)
            reach += stride * (extent - 1)
    return True


def _places(digits: Sequence[tuple[int, int]]) -> Any:
    places = np.zeros(1, np.int64)
    for stride, extent in digits:
        places = (places[:, None] + np.arange(extent) * stride).ravel()
    return places


def span(pieces: Iterable[Piece], to: str) -> int:
    """One more than the greatest value of an output."""
    return 1 + sum((p.extent - 1) * p.stride for p in pieces if p.to == to)


def radix(pieces: Sequence[Piece], to: str) -> list[Piece] | None:
    """The pieces of an output by stride if they are the digits of a number: every value below the span
    belongs to exactly one choice of digits, so that the output can be inverted. None where they are not."""
    mine = sorted((p for p in pieces if p.to == to and p.extent > 1), key=lambda p: p.stride)
    reach = 1
    for p in mine:
        if p.stride != reach:
            return None
        reach *= p.extent
    return mine
