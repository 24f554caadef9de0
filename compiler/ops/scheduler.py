"""``T.PersistentTileScheduler``: by TileLang's name, which tiles fall to a worker, as variables of its own
that a loop advances. ``T.Persistent`` is the loop. No operation of the IR."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.builder import state as bld
from tilescale.compiler.builder.values import Variable, as_expr, binary, compare, index_expr
from tilescale.compiler.ir import source
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ops import tile_orders
from tilescale.compiler.ops.alloc import alloc_var
from tilescale.compiler.ops.math import max as greater
from tilescale.compiler.ops.math import min as less
from tilescale.errors import TileSyntaxError, TileValueError
from tilescale.language.booleans import require_bools


class PersistentTileScheduler:
    """Tiles of a grid, numbered, of which worker w has the numbers w, w + num_workers and so on::

        s = T.PersistentTileScheduler(m_tiles, n_tiles)
        s.init(block)
        while s.valid():
            ... s.m_idx, s.n_idx ...
            s.next_tile()

    Args:
        num_m_tiles, num_n_tiles: the grid of tiles.
        num_workers: the launch's blocks, or clusters of ``cluster_size``, where it is left out.
        swizzle_size: tiles of the slow axis that are visited together, before the fast axis goes on.
        column_major: m is the fast axis; else n is.
        cluster_size: tiles along m that a cluster has together; ``m_idx`` counts clusters.
        stateful: False: it has no variables, and `coord` alone says where a number's tile lies.
        name: what its variables are called.

    Raises:
        TileSyntaxError: outside T.Kernel. TileValueError: a size that is no positive number.
    """

    def __init__(
        self,
        num_m_tiles: Any,
        num_n_tiles: Any,
        num_workers: Any = None,
        swizzle_size: int = 1,
        column_major: bool = True,
        cluster_size: int = 1,
        stateful: bool = True,
        name: str | None = None,
    ):
        loc, launch = source.current(), bld.current().launch
        require_bools(column_major=column_major, stateful=stateful)
        if launch is None:
            raise TileSyntaxError("T.PersistentTileScheduler stands outside T.Kernel", loc=loc)
        for word, size in (("swizzle_size", swizzle_size), ("cluster_size", cluster_size)):
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise TileValueError(f"{word}={size!r}", loc=loc, expected="an int of 1 or more")
        rows = binary("//", binary("+", num_m_tiles, cluster_size - 1), cluster_size)
        self.total = binary("*", rows, num_n_tiles)
        self.fast, self.slow = (rows, num_n_tiles) if column_major else (num_n_tiles, rows)
        self.column_major, self.swizzle_size, self.cluster_size = column_major, swizzle_size, cluster_size
        blocks = tile_orders.product(list(launch.grid))
        self.num_workers = (
            binary("//", blocks, cluster_size) if num_workers is None else index_expr(num_workers)
        )
        self.variables: dict[str, Variable] = {}
        for word in ("m_idx", "n_idx", "linear_idx", "current_iter") if stateful else ():
            made = self.variables[word] = alloc_var("int32")
            bld.current().give_name(made.buffer, f"{name}_{word}" if name else word)

    def coord(self, tile_id: Any) -> tuple[Any, Any]:
        """``(m, n)`` of a tile's number; of one behind the last some place outside of the grid."""
        if self.swizzle_size == 1:
            slow, fast = binary("//", tile_id, self.fast), binary("%", tile_id, self.fast)
        else:
            panel = binary("*", self.fast, self.swizzle_size)
            first = binary("*", binary("//", tile_id, panel), self.swizzle_size)
            width: Any = self.swizzle_size
            if constant(self.slow) is None or constant(self.slow) % self.swizzle_size:  # type: ignore[operator]
                width = greater(1, less(self.swizzle_size, binary("-", self.slow, first)))
            rest = binary("%", tile_id, panel)
            slow, fast = binary("+", first, binary("%", rest, width)), binary("//", rest, width)
        return (fast, slow) if self.column_major else (slow, fast)

    def init(self, worker_id: Any) -> None:
        """The first tile of a worker."""
        self._variable("current_iter").store(0)
        self._go_to(worker_id)

    def next_tile(self) -> None:
        """The worker's next tile."""
        count = self._variable("current_iter")
        count.store(count + 1)
        self._go_to(binary("+", self._variable("linear_idx"), self.num_workers))

    def valid(self) -> Any:
        """Whether there is a tile."""
        return compare("<", self._variable("linear_idx"), as_expr(self.total))

    @property
    def m_idx(self) -> Any:
        """The tile's row, or its cluster's."""
        return self._variable("m_idx").load()

    @property
    def n_idx(self) -> Any:
        """The tile's column."""
        return self._variable("n_idx").load()

    @property
    def linear_idx(self) -> Any:
        """The tile's number."""
        return self._variable("linear_idx").load()

    @property
    def current_iter(self) -> Any:
        """How many tiles the worker has had before."""
        return self._variable("current_iter").load()

    def _go_to(self, number: Any) -> None:
        self._variable("linear_idx").store(number)
        for word, place in zip(("m_idx", "n_idx"), self.coord(self.linear_idx), strict=True):
            self._variable(word).store(place)

    def _variable(self, name: str) -> Variable:
        if name not in self.variables:
            raise TileSyntaxError(
                f"{name} of a T.PersistentTileScheduler with stateful=False",
                loc=source.current(),
                expected="its coord(number)",
            )
        return self.variables[name]
