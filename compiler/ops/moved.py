"""Copies by names of TileLang's: ``T.transpose`` of tiles, and ``T.async_copy``."""

from __future__ import annotations

from typing import Any

from tilescale import log
from tilescale.compiler.builder.constructs import LoopNest
from tilescale.compiler.builder.values import Region
from tilescale.compiler.ir import source
from tilescale.compiler.ops import placed
from tilescale.compiler.ops.base import region, same_extent, show, unheeded
from tilescale.compiler.ops.copy import copy
from tilescale.errors import TileTypeError, TileValueError


def transpose(src: Any, dst: Any, annotations: dict[str, Any] | None = None) -> None:
    """``dst[…, j, i] = src[…, i, j]`` of two tiles, or regions, whose last two axes are swapped.

    Args:
        annotations: TileLang's; they decide nothing.

    Raises:
        TileValueError: extents that do not agree with their axes swapped, or fewer than two of them.
    """
    unheeded("transpose", annotations)
    to, frm = region(dst, "the destination"), region(src, "the source")
    swapped = (*frm.shape[:-2], *reversed(frm.shape[-2:]))
    alike = len(to.shape) == len(swapped) >= 2 and all(map(same_extent, to.shape, swapped))
    if not alike:
        raise TileValueError(
            f"T.transpose of {frm.name} with {show(frm.shape)} into {to.name} with {show(to.shape)}",
            loc=source.current(),
            expected=f"a destination of {show(swapped)}"
            if len(swapped) >= 2
            else "tiles of two axes or more",
        )
    for at in LoopNest("parallel", [(0, e, 1) for e in frm.shape]).trace(()):
        swap = (*at[:-2], at[-1], at[-2])
        to.buffer.store(placed.index(to, to.axes, swap), frm.buffer[placed.index(frm, frm.axes, at)])


def async_copy(
    src: Any,
    dst: Any,
    coalesced_width: int | None = None,
    annotations: dict[str, Any] | None = None,
    loop_layout: Any = None,
) -> None:
    """A copy from a tensor into shared memory by threads, not by TMA, that TileLang begins here and completes
    at ``T.ptx_wait_group``. Here it is ``T.copy``: complete where it is read, wherever the wait stands.

    Args:
        coalesced_width, loop_layout: as in ``T.copy``. annotations: TileLang's; they decide nothing.

    Raises:
        TileTypeError: another source than a tensor, another destination than shared memory.
    """
    unheeded("async_copy", annotations)
    to = region(dst, "the destination", region(src, "the source").shape if isinstance(src, Region) else ())
    frm = region(src, "the source", to.shape)
    if not frm.buffer.scope.startswith("global") or not to.buffer.scope.startswith("shared"):
        raise TileTypeError(
            f"T.async_copy from {frm.name} to {to.name}",
            loc=source.current(),
            expected="a tensor, and a tile of T.alloc_shared",
            hint="T.copy",
        )
    log.say("info", "T.async_copy is T.copy here: its data is there where it is read", once=True)
    copy(src, dst, coalesced_width=coalesced_width, loop_layout=loop_layout, disable_tma=True)
