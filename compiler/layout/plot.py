"""Pictures of layouts: which thread and slot holds each element of a fragment, which bank each element of a
shared tile lies in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tilescale.compiler.layout.fragment import Fragment
from tilescale.compiler.layout.shared import BANK_BYTES, BANKS, Shared
from tilescale.errors import TileTypeError, TileValueError

#: cells of a picture; a larger tile is cut, and the title says so
MOST = 128 * 64
#: cells above which numbers would no longer be read
LABELLED = 64 * 32


def plot_layout(layout: Fragment | Shared, path: str | Path, *, title: str = "") -> Path:
    """Draws a layout and returns the file's path. Of more than two axes (a ring's stages) the first of all
    but the last two is drawn.

    A fragment's cells show ``thread:slot``, coloured by thread (of several copies the first). A shared tile's
    cells show the element's place in its swizzled memory, in elements, coloured by the bank of its first
    byte.

    Args:
        path: ends in ``.png``, ``.svg`` or ``.pdf``. title: stands in front of what the layout is.

    Raises:
        TileValueError: another file type, a folder that is not there. TileTypeError: matplotlib is not
        installed.
    """
    path = Path(path)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise TileValueError(f"plot_layout to {path.name}", expected="a name that ends in .png, .svg or .pdf")
    if not path.parent.is_dir():
        raise TileValueError(
            f"plot_layout to {path}: there is no folder {path.parent}", hint=f'os.makedirs("{path.parent}")'
        )
    values, label, what = _fragment(layout) if isinstance(layout, Fragment) else _shared(layout)
    return _draw(values, label, path, f"{title}: {what}" if title else what)


def _grid(shape: tuple[int, ...]) -> tuple[Any, ...]:
    rows, columns = _last_two(shape)
    columns = min(columns, MOST)
    rows = min(rows, max(1, MOST // columns))
    index = np.indices((rows, columns))
    return (*(np.zeros_like(index[0]) for _ in shape[:-2]), *index) if len(shape) > 1 else (index[1],)


def _last_two(shape: tuple[int, ...]) -> tuple[int, int]:
    return (shape[-2], shape[-1]) if len(shape) > 1 else (1, shape[0])


def _cut(shape: tuple[int, ...], shown: tuple[int, ...]) -> str:
    """What of a tile is shown, where that is not all of it."""
    first = f" [{', '.join('0' * (len(shape) - 2))}]" if len(shape) > 2 else ""
    return first if _last_two(shape) == shown else f"{first} (rows 0:{shown[0]}, columns 0:{shown[1]})"


def _fragment(layout: Fragment) -> tuple[Any, Callable[[int, int], str], str]:
    index = _grid(layout.shape)
    threads, slots = layout.thread(*index), layout.slot(*index)
    copies = f", {len(layout.copies)} copies" if len(layout.copies) > 1 else ""
    size = "×".join(map(str, layout.shape))
    what = (
        f"fragment {size} on {layout.threads} threads, {layout.slots} slots each{copies}; "
        f"thread:slot{_cut(layout.shape, threads.shape)}"
    )
    return threads, lambda r, c: f"{threads[r, c]}:{slots[r, c]}", what


def _shared(layout: Shared) -> tuple[Any, Callable[[int, int], str], str]:
    bytes_ = layout.byte(*_grid(layout.shape))
    size = "×".join(map(str, layout.shape))
    swizzle = f"swizzle {layout.swizzle} B" if layout.swizzle else "no swizzle"
    what = (
        f"shared {size} × {layout.bits} bits, {swizzle}; place, coloured by "
        f"bank{_cut(layout.shape, bytes_.shape)}"
    )
    return bytes_ // BANK_BYTES % BANKS, lambda r, c: str(bytes_[r, c] * 8 // layout.bits), what


def _draw(values: Any, label: Callable[[int, int], str], path: Path, title: str) -> Path:
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.backends.backend_pdf import FigureCanvasPdf
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError:
        raise TileTypeError("plot_layout needs matplotlib", hint="pip install 'tilescale[vis]'") from None
    rows, columns = values.shape
    cell = 0.42 if rows * columns <= LABELLED else 0.12
    figure = Figure(figsize=(max(4.0, columns * cell + 1), max(2.0, rows * cell + 1)), layout="constrained")
    canvas = {".png": FigureCanvasAgg, ".svg": FigureCanvasSVG, ".pdf": FigureCanvasPdf}[path.suffix]
    canvas(figure)
    axes = figure.add_subplot()
    # neighbouring numbers get colours far apart: a walk around a cyclic map by the golden ratio
    axes.imshow(
        values * 0.618034 % 1.0,
        cmap="hsv",
        alpha=0.45,
        vmin=0,
        vmax=1,
        aspect="equal",
        interpolation="nearest",
    )
    if rows * columns <= LABELLED:
        for r in range(rows):
            for c in range(columns):
                axes.text(c, r, label(r, c), ha="center", va="center", fontsize=6)
    axes.set_title(title, fontsize=9, wrap=True)
    axes.xaxis.tick_top()
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text that can be read and searched, not outlines
        figure.savefig(path, dpi=120)
    return path
