"""What authors fix of loops over elements, T.Parallel's and those of T.copy, as the annotations and
attributes that stand for it."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.ir import source
from tilescale.errors import TileTypeError, TileValueError


def width(asked: Any) -> int:
    """``coalesced_width``: the most neighbours that a thread moves in one access to memory.

    Raises:
        TileValueError: no power of two.
    """
    if not isinstance(asked, int) or asked < 1 or asked & (asked - 1):
        raise TileValueError(
            f"coalesced_width={asked!r}", loc=source.current(), expected="a power of two, in elements"
        )
    return asked


def layout(given: Any, extents: list[Any], what: str) -> str:
    """``loop_layout``, a `T.Fragment` of ``extents``, as text (layout/asked.py).

    Raises:
        TileTypeError: extents that are not constant, or anything but such a fragment.
    """
    from tilescale.compiler.layout import Fragment, asked

    loc, shown = source.current(), ", ".join(str(e) for e in extents)
    if not all(isinstance(e, int) for e in extents):
        raise TileTypeError(
            f"loop_layout= of {what}({shown}), whose extents are known only when the kernel runs",
            loc=loc,
            expected="constant extents",
        )
    fits = isinstance(given, Fragment) and len(given.shape) == len(extents)
    if not fits or any(e > w for e, w in zip(extents, given.shape, strict=True)):
        held = f"one of {given.shape}" if isinstance(given, Fragment) else repr(given)
        raise TileTypeError(
            f"loop_layout= of {what}({shown}) is {held}", loc=loc, expected=f"a T.Fragment of ({shown})",
            hint=f"T.Fragment(({shown}), lambda {', '.join('ijklmnpq'[: len(extents)])}: (thread, round))",
        )  # fmt: skip
    return asked.written(given)
