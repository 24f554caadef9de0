"""Where tiles lie: the layouts that `T.annotate_layout` takes, and pictures of them and of those that a
kernel has (`plot_layout`)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tilescale.compiler.layout.made import (
    Fragment,
    Layout,
    make_full_bank_swizzled_layout,
    make_fully_replicated_layout_fragment,
    make_gemm_fragment_8x8,
    make_gemm_fragment_8x8_transposed,
    make_half_bank_swizzled_layout,
    make_linear_layout,
    make_quarter_bank_swizzled_layout,
    make_swizzled_layout,
    make_wgmma_swizzled_layout,
)
from tilescale.errors import TileTypeError, TileValueError
from tilescale.kernel import Kernel

__all__ = [
    "Fragment",
    "Layout",
    "layouts",
    "make_full_bank_swizzled_layout",
    "make_fully_replicated_layout_fragment",
    "make_gemm_fragment_8x8",
    "make_gemm_fragment_8x8_transposed",
    "make_half_bank_swizzled_layout",
    "make_linear_layout",
    "make_quarter_bank_swizzled_layout",
    "make_swizzled_layout",
    "make_wgmma_swizzled_layout",
    "plot_layout",
]
#: bits of the elements of a T.Layout that no tile has yet
UNKNOWN = 32


def plot_layout(
    what: Any, name: str | os.PathLike[str], path: str | os.PathLike[str] | None = None, *, title: str = ""
) -> Path:
    """Draws the layout of a tile as a PNG or an SVG: ``plot_layout(kernel, "acc", "acc.svg")``, or of one
    made by hand ``plot_layout(layout, "mine.png")``.

    The cells of a tile in registers show ``thread:slot``, coloured by thread; those of a tile in shared
    memory the place of each element behind the swizzle, coloured by bank. Of a ring the first stage is drawn.

    Args:
        what: a kernel of the target cuda, whose tiles have the layouts that the compiler chose; or a layout
            (T.Fragment, T.Layout, what `tilescale.layout.make_swizzled_layout` and its like give). A T.Layout
            is drawn with elements of 32 bits.
        name: the tile's name in the kernel, or the file's where ``what`` is a layout. path: ends in .png or
            .svg.

    Raises:
        TileValueError: no tile of that name (those that there are follow), another file type. TileTypeError:
            neither kernel nor layout, a target without layouts, matplotlib is not installed.
    """
    if isinstance(what, Kernel):
        if path is None:
            raise TileValueError(
                f"plot_layout of {what.name} names no tile",
                expected=f"one of {', '.join(layouts(what))}, and a file",
            )
        held = layouts(what)
        if name not in held:
            raise TileValueError(f"{what.name} has no tile {name!r}", expected="one of " + ", ".join(held))
        layout, title = held[str(name)], title or f"{name} of {what.name}"
    else:
        if path is not None:
            raise TileTypeError(
                f"plot_layout of a layout, which has no name, and not even {name!r}",
                hint="plot_layout(layout, path)",
            )
        layout, path = what, name
    from tilescale.compiler import layout as compiled
    from tilescale.compiler.layout.plot import plot_layout as draw

    layout = layout.shared(UNKNOWN) if isinstance(layout, Layout) else layout
    if not isinstance(layout, (compiled.Fragment, compiled.Shared)):
        raise TileTypeError(
            f"plot_layout of a {type(what).__name__}", expected="a kernel, a T.Fragment or a T.Layout"
        )
    return draw(layout, os.fspath(path), title=title)


def layouts(kernel: Kernel) -> dict[str, Any]:
    """The layouts of a kernel's tiles by name, rings with their stages in front. Traces and lowers the kernel
    again.

    Raises:
        TileTypeError: a target that has none.
    """
    if not kernel.device.gpu:
        raise TileTypeError(
            f"{kernel.name} is a kernel of the target {kernel.target}, where tiles have no layouts",
            hint='target="cuda"',
        )
    program = kernel.program()
    from tilescale.compiler import driver

    found = driver.lower(program, kernel.built_for).program.layouts
    return {b.name: layout for b, layout in found.items() if b.ty.storage_scope != "local.var"}
