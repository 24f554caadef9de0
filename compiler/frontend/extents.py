"""What a launch says of its grid and of its blocks' threads, by TileLang's names: indices, and extents."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.builder import state as bld
from tilescale.compiler.frontend.launch import get_block_binding
from tilescale.compiler.ir import source
from tilescale.compiler.ir.program import Launch
from tilescale.compiler.ops.expert import get_thread_binding
from tilescale.errors import TileSyntaxError, TileValueError


def _launch(word: str) -> Launch:
    launch = bld.current().launch
    if launch is None:
        raise TileSyntaxError(f"T.{word} stands outside T.Kernel", loc=source.current())
    return launch


def _axis(dim: Any, count: int, what: str) -> int:
    if not isinstance(dim, int) or isinstance(dim, bool) or not 0 <= dim < count:
        raise TileValueError(f"axis {dim!r} of the {what}", loc=source.current(), expected=f"0 … {count - 1}")
    return dim


def get_block_bindings() -> list[Any]:
    """The block's index along each axis of the grid, x first."""
    return [get_block_binding(k) for k in range(len(_launch("get_block_bindings").block_vars))]


def get_block_extents() -> list[Any]:
    """The extents of the grid, x first, as T.Kernel was given them."""
    return list(_launch("get_block_extents").grid)


def get_block_extent(dim: int = 0) -> Any:
    """The grid's extent along an axis, x first.

    Raises:
        TileSyntaxError: outside T.Kernel. TileValueError: an axis that the grid does not have.
    """
    grid = _launch("get_block_extent").grid
    return grid[_axis(dim, len(grid), "grid")]


def get_thread_bindings() -> list[Any]:
    """The thread's index along the three axes of the block, x first: `get_thread_binding` of each."""
    _launch("get_thread_bindings")
    return [get_thread_binding(k) for k in range(3)]


def get_thread_extents() -> list[int]:
    """The block's threads along its three axes, x first."""
    launch = _launch("get_thread_extents")
    axes = tuple(launch.hints.get("axes", (launch.threads,)))
    return [*axes, *[1] * (3 - len(axes))]


def get_thread_extent(dim: int = 0) -> int:
    """The block's threads along an axis, x first.

    Raises:
        TileSyntaxError: outside T.Kernel. TileValueError: an axis that is not 0, 1 or 2.
    """
    _launch("get_thread_extent")
    return get_thread_extents()[_axis(dim, 3, "block")]
