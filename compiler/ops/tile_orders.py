"""In which order the tiles of a domain come, as arithmetic on a tile's number: of Python's integers as of the
device's (T.Persistent)."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.builder.held import named
from tilescale.compiler.builder.values import binary
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.tvm_compat import is_expr


def product(extents: list[Any]) -> Any:
    """How many tiles there are."""
    total: Any = 1
    for e in extents:
        total = binary("*", total, e)
    return total


def row_major(number: Any, extents: list[Any]) -> list[Any]:
    """The place of a tile: the last axis counts first."""
    out = []
    for e in reversed(extents[1:]):
        out.append(binary("%", number, e))
        number = binary("//", number, e)
    # The outermost needs no remainder: between numbers it says that the tile lies inside, elsewhere it
    # costs TVM minutes.
    out.append(number if constant(extents[0]) is None else binary("%", number, extents[0]))
    out.reverse()
    return out


def in_groups(number: Any, extents: list[Any], group: tuple[int, int]) -> list[Any]:
    """The place of a tile where the last two axes are cut into groups of so many tiles, those at the ends
    smaller, and each group is visited in all places of the axes in front (the owners) before the next one is.
    Groups, owners and the tiles of a group come in row-major order.

    Why every tile comes once: bands of rows, groups of a band, owners of a group and tiles of an owner's
    group are each an interval of the numbers, of known length, cut into intervals of the next kind. All
    groups of a band but the last have one length, and all bands but the last, so a quotient says which one a
    number lies in; inside the last one, too, since what comes before it is whole."""
    *owners, rows, cols = extents
    high, wide = (
        max(1, min(g, e)) if isinstance(e, int) else g for g, e in zip(group, (rows, cols), strict=True)
    )
    count = product(owners)
    if all(isinstance(e, int) and e % g == 0 for e, g in ((rows, high), (cols, wide))):
        # All groups are alike: digits, each of which is known to be inside.
        digits = [rows // high, cols // wide, count, high, wide]
        band, part, owner, i, j = row_major(number, digits)
    else:
        band, rest = _cut(number, _times(high, cols, count), "band")
        height = _size(high, rows, band, "height")
        part, rest = _cut(rest, _times(height, wide, count), "part")
        width = _size(wide, cols, part, "width")
        owner, rest = _cut(rest, _times(height, width), "owner")
        i, j = binary("//", rest, width), binary("%", rest, width)
    places = row_major(owner, owners) if owners else []
    return [*places, binary("+", binary("*", band, high), i), binary("+", binary("*", part, wide), j)]


def _times(*factors: Any) -> Any:
    return product(list(factors))


def _named(value: Any, name: str) -> Any:
    """A device's value under a name: written out, a remainder of remainders costs TVM minutes."""
    return named(value, name) if is_expr(value) and constant(value) is None else value


def _cut(number: Any, length: Any, name: str) -> tuple[Any, Any]:
    """Which interval of a length a number lies in, and where in it."""
    which = _named(binary("//", number, length), name)
    return which, _named(binary("-", number, binary("*", which, length)), f"in_{name}")


def _size(of_one: int, extent: Any, which: Any, name: str) -> Any:
    """How many rows (columns) the group of this number has."""
    if isinstance(extent, int) and extent % of_one == 0:
        return of_one
    left = binary("-", extent, binary("*", which, of_one))
    return min(of_one, left) if isinstance(left, int) else _named(binary("min", of_one, left), name)


def rotated(wave_size: Any, index: Any, total: Any, rotate: Any) -> tuple[Any, Any]:
    """Where block ``index`` begins to count its tiles, by steps of ``wave_size`` up to ``total``, and what
    number a count is then: in wave w the block takes the place that is ``rotate`` · w further, round the
    wave.

    A block's place in the last wave, which may be short, decides whether it has a tile there. So counting
    begins at that place: it ends behind a whole number of waves, or one more where the place is in the last
    one. In each wave the places are the blocks' numbers turned round, so each is taken once."""

    def place(wave: Any) -> Any:
        return binary("%", binary("+", index, binary("*", wave, rotate)), wave_size)

    def number(counted: Any) -> Any:
        wave = binary("//", counted, wave_size)
        return binary("+", binary("*", wave, wave_size), place(wave))

    return place(binary("//", total, wave_size)), number
