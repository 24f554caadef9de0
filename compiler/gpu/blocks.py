"""Who a block is: its number, its place in a cluster, and the order in which a grid's blocks run."""

from __future__ import annotations

from math import prod
from typing import Any

from tilescale.compiler.gpu.places import widened
from tilescale.compiler.gpu.state import State
from tilescale.compiler.ir.scales import WIDTHS
from tilescale.compiler.tvm_compat import tirx

AXES = "xyz"


class Blocks(State):
    """Mixed into the lowering. ``axes``: those along which blocks are looked at, some of "xyz"."""

    def scale_value(self, name: str, which: int) -> Any:
        """The own index (0) or the count (1) at a scale."""
        width = self.threads
        for scale, n in self.executor.outer:
            inner = WIDTHS[scale]
            if scale == name:
                index = self.tid if width == self.threads else self.tid % width
                return tirx.IntImm("int32", n) if which else (index // inner if inner > 1 else index)
            width = inner
        if name in WIDTHS:
            return tirx.IntImm("int32", which)
        grid = [*(self.extent(e) for e in self.program.launch.grid), 1, 1][:3]
        if name in ("grid", "block"):
            return _linear(self.block, grid, which)
        if name == "cta_cluster":
            return tirx.IntImm("int32", self.cluster_size("xyz")) if which else self.cluster_rank("xyz")
        return self.of_launch("world" if which else "rank")

    def cluster_size(self, axes: str) -> int:
        """How many blocks there are along ``axes``."""
        return prod(n for a, n in zip(AXES, self.program.launch.cluster, strict=True) if a in axes)

    def rank_along(self, axis: int) -> Any:
        """This block's place in its cluster along one."""
        return tirx.floormod(self.raw[axis], tirx.IntImm("int32", self.program.launch.cluster[axis]))

    def cluster_rank(self, axes: str) -> Any:
        """This block's number among those along ``axes``."""
        made, stride = tirx.IntImm("int32", 0), 1
        for k, n in enumerate(self.program.launch.cluster):
            if AXES[k] in axes and n > 1:
                made, stride = made + self.rank_along(k) * stride, stride * n
        return made

    def panels(self) -> list[Any]:
        """T.use_swizzle: blocks that start together lie in a panel of a few rows ("row"; of columns with
        "column"), one column after the other, so that they share what they read in the L2 cache. The last
        panel may be lower."""
        panel, order = self.program.hints.get("swizzle", (0, "row"))
        grid, dims = (
            [*(self.extent(e) for e in self.program.launch.grid), 1, 1][:3],
            self.program.launch.cluster,
        )
        # The axis along a panel, the one that is cut into panels.
        across, down = (0, 1) if order == "row" else (1, 0)
        if panel < 2 or grid[2] != 1:
            return []
        # blocks of a cluster stay together: what is ordered is clusters, as high as they are
        panel = max(1, panel // dims[down])
        self.raw = [tirx.Var(f"block_{axis}", "int32") for axis in "xyz"]
        self.block = [*self.block[:2], self.raw[2]]
        wide, high = (self._clusters(grid[k], k) for k in (across, down))
        names = {n: tirx.Var(n, "int32") for n in ("panel", "first", "rows", "within")}
        flat = self._clusters(self.raw[0], 0) + self._clusters(self.raw[1], 1) * self._clusters(grid[0], 0)
        values = {
            "panel": flat // (wide * panel),
            "first": names["panel"] * panel,
            "rows": tirx.min(high - names["first"], widened(panel, "int32")),
            "within": flat - names["first"] * wide,
        }
        ends = {
            down: names["first"] + tirx.truncmod(names["within"], names["rows"]),
            across: tirx.truncdiv(names["within"], names["rows"]),
        }
        ends = {k: e * dims[k] + self.rank_along(k) if dims[k] > 1 else e for k, e in ends.items()}
        return [
            *(tirx.Bind(names[n], v) for n, v in values.items()),
            *(tirx.Bind(self.block[k], ends[k]) for k in (0, 1)),
        ]

    def _clusters(self, blocks: Any, axis: int) -> Any:
        """How many clusters so many blocks along an axis are, or the cluster of such a block."""
        return self.analyzer.simplify(
            tirx.floordiv(widened(blocks, "int32"), tirx.IntImm("int32", self.program.launch.cluster[axis]))
        )


def _linear(index: list[Any], extents: list[Any], which: int) -> Any:
    (x, y, z), (gx, gy, gz) = index, (widened(e, "int32") for e in extents)
    return gx * gy * gz if which else x + gx * (y + gy * z)
