"""Looks at kernels and layouts, by TileLang's names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilescale.compat import unused
from tilescale.errors import TileValueError
from tilescale.layout import plot_layout as _plot

__all__ = ["Analysis", "Analyzer", "plot_layout"]


@dataclass(frozen=True)
class Analysis:
    """What a launch has to do on a GPU at least.

    Attributes:
        total_flops: operations, a multiply-add as two. total_global_bytes: bytes that memory moves at
            least. estimated_time: seconds at the machine's peaks. expected_bandwidth_GBps,
            expected_tflops: rates at that time.
    """

    total_flops: int
    total_global_bytes: int
    estimated_time: float
    expected_bandwidth_GBps: float
    expected_tflops: float


class Analyzer:
    """``Analyzer.analysis(prim_func, CUDA("cuda"))``."""

    @staticmethod
    def analysis(func: Any, device: Any) -> Analysis:
        """The work of one launch of a ``@T.prim_func`` or a traced program, and its bound on ``device``, by
        the cost model (compiler/cost).

        Raises:
            TileValueError: an extent that the caller decides. TileTypeError: a GPU without known figures.
        """
        from tilescale.compiler.cost import count, roofline
        from tilescale.errors import TileTypeError

        if device.machine is None:
            raise TileTypeError(f"no figures are known of {device.target}")
        program = func.trace() if hasattr(func, "trace") else func
        work = count(program)
        bound = roofline(work, device.machine)
        flops, moved = int(bound.operations), int(bound.bytes)
        return Analysis(
            flops, moved, bound.seconds, moved / bound.seconds / 1e9, flops / bound.seconds / 1e12
        )


def plot_layout(
    layout: Any, save_directory: Any = "./tmp", name: str = "layout", colormap: str | None = None,
    verbose: bool = False, formats: str = "pdf", view: str = "input",
    grid_shape: tuple[int, int] | None = None,
) -> list[Path]:  # fmt: skip
    """Draws a layout into ``save_directory/name.pdf`` (formats: "pdf", "png", "svg", several with commas, or
    "all"); the paths. The elements of the tile are the grid, so ``view`` is "input"; ``colormap``,
    ``verbose`` and ``grid_shape`` decide nothing.

    Raises:
        TileTypeError, TileValueError: see `tilescale.plot_layout`; another view.
    """
    if view != "input":
        raise TileValueError(f"plot_layout with view={view!r}", expected='"input"')
    unused("plot_layout", {"colormap": colormap, "verbose": verbose or None, "grid_shape": grid_shape})
    folder = Path(save_directory)
    folder.mkdir(parents=True, exist_ok=True)
    kinds = ["pdf", "png", "svg"] if formats == "all" else [f.strip() for f in formats.split(",")]
    return [_plot(layout, folder / f"{name}.{kind}") for kind in kinds]
