"""``with T.Kernel(…)`` and ``with T.Scale(…)``: who runs the statements inside, and whom they reach."""

from __future__ import annotations

from math import prod
from typing import Any

from tilescale.compiler.builder import state as bld
from tilescale.compiler.builder.integers import range_of
from tilescale.compiler.builder.lanes import VectorTile
from tilescale.compiler.builder.values import Buffer, as_expr, index_expr, to_expr
from tilescale.compiler.frontend import returns
from tilescale.compiler.ir import source
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.program import COMM_DEPTH, Launch
from tilescale.compiler.ir.scales import EXECUTORS, MOST_BLOCKS, SCALES, WARP, WARPGROUP
from tilescale.compiler.tvm_compat import ir, register_op, tirx
from tilescale.errors import TileSyntaxError, TileTypeError, TileValueError
from tilescale.language.booleans import require_bools
from tilescale.language.dtypes import BITS
from tilescale.language.symbolic import SymExpr, settle

AXES = "xyz"
#: what ``comm_depth`` may be
DEPTHS = (1, 2, 4, 8)

register_op("ts.scale_index", pure=True)
register_op("ts.scale_count", pure=True)


def _extents(values: Any, what: str) -> tuple[Any, ...]:
    items = tuple(values) if isinstance(values, (tuple, list)) else (values,)
    out = []
    for item in items:
        e = settle(item) if isinstance(item, SymExpr) else item
        known = constant(e) if not isinstance(e, bool) else None
        if known is not None and known >= MOST_BLOCKS:
            raise TileValueError(
                f"{what} has extent {known}", loc=source.current(), expected="fewer than 2³¹ blocks"
            )
        if known is not None and known <= 0:
            raise TileValueError(
                f"{what} has extent {known}", loc=source.current(), expected="a positive number of blocks"
            )
        out.append(known if known is not None else index_expr(e))
    return tuple(out)


class Kernel:
    """Starts a grid of blocks on every rank: ``with T.Kernel(gx, gy, threads=256) as (bx, by):``; without
    extents one block.

    Args:
        grid: one to three extents, x first; ints or expressions of the kernel's symbolic extents.
        threads: threads of a block, a multiple of 32 (nominal on the CPU, where it bounds how many blocks are
            resident).
        block: the grid, given by scale (instead of positionally).
        cta_cluster: blocks of a cluster along x, or a tuple; must divide the grid.
        max_blocks: an SM budget: at most so many blocks are resident at once. A GPU starts what fits, so
            there the grid must be that small.
        ordered: False gives up the entry and exit flags of a launch (see docs/LANGUAGE.md).
        awaited: a promise that gives up the exit flags: all that others put, signal or send to a rank in a
            launch comes before waits of that rank in the same launch, and nobody reads other ranks' memory.
            The simulator judges it.
        pdl: on GPUs from sm_90 on, blocks may start before the kernel in front of them on the stream has
            ended (programmatic dependent launch): they set themselves up and await its end before they touch
            a tensor. Results never depend on it.
        comm_warps: on GPUs from sm_90 on: so many warps beside the block's threads, 1 to 3, make its
            non-blocking copies to other ranks (``T.copy(…, blocking=False)``) where a producer fills its
            rings; 0: its threads make them in turn. Results never depend on it.
        comm_depth: how many accesses of 16 bytes a thread of those warps has under way at once, 1, 2, 4 or 8,
            of rows that do not lie side by side half as many: bytes in flight against registers and other
            copies' turns. Results never depend on it.
        prelude: a text of CUDA that stands in front of the kernel (``T.import_source``).

    Raises:
        TileValueError, TileTypeError: extents that are not positive integers, more than three axes, a second
        launch.
    """

    def __init__(
        self,
        *grid: Any,
        threads: Any = None,
        block: Any = None,
        cta_cluster: Any = None,
        cluster_dims: Any = None,
        max_blocks: int = 0,
        ordered: bool = True,
        awaited: bool = False,
        pdl: bool = False,
        comm_warps: int = 2,
        comm_depth: int = COMM_DEPTH,
        is_cpu: bool = False,
        prelude: str | None = None,
    ):
        require_bools(ordered=ordered, awaited=awaited, pdl=pdl, is_cpu=is_cpu)
        if awaited and not ordered:
            raise TileValueError(
                "T.Kernel(awaited=True, ordered=False)",
                loc=source.current(),
                expected="one of the two: without order nobody awaits anyone's end",
            )
        if prelude is not None and not isinstance(prelude, str):
            raise TileTypeError(
                f"T.Kernel(prelude={prelude!r})", loc=source.current(), expected="a text of CUDA C++"
            )
        if block is not None:
            if grid:
                raise TileTypeError(
                    "the grid is given twice",
                    loc=source.current(),
                    hint="T.Kernel(gx, gy) or T.Kernel(block=(gx, gy))",
                )
            grid = tuple(block) if isinstance(block, (tuple, list)) else (block,)
        grid = grid or (1,)
        if len(grid) > 3:
            raise TileValueError(
                f"a grid of {len(grid)} axes", loc=source.current(), expected="one to three extents"
            )
        if cta_cluster is not None and cluster_dims is not None:
            raise TileTypeError(
                "the cluster is given twice",
                loc=source.current(),
                hint="cta_cluster= alone: cluster_dims= means it too",
            )
        cluster = cta_cluster if cta_cluster is not None else cluster_dims if cluster_dims is not None else 1
        dims = (*_extents(cluster, "the cluster"), 1, 1)[:3]
        count = 1
        for extent in (
            threads if isinstance(threads, (tuple, list)) else (threads if threads is not None else 128,)
        ):
            count *= 0 if isinstance(extent, bool) else extent
        if not isinstance(count, int) or not 1 <= count <= 1024:
            raise TileValueError(
                f"threads={threads!r}", loc=source.current(), expected="an int from 1 to 1024"
            )
        if not isinstance(max_blocks, int) or isinstance(max_blocks, bool) or max_blocks < 0:
            raise TileValueError(
                f"max_blocks={max_blocks!r}",
                loc=source.current(),
                expected="a number of blocks, or 0 for no bound",
            )
        if not isinstance(comm_warps, int) or isinstance(comm_warps, bool) or not 0 <= comm_warps <= 3:
            raise TileValueError(
                f"comm_warps={comm_warps!r}",
                loc=source.current(),
                expected="0 to 3: a producer's warpgroup has three warps beside its own",
            )
        if isinstance(comm_depth, bool) or comm_depth not in DEPTHS:
            raise TileValueError(
                f"comm_depth={comm_depth!r}",
                loc=source.current(),
                expected="one of " + ", ".join(map(str, DEPTHS)),
            )
        extents = _extents(grid, "the grid")
        for axis, (g, c) in enumerate(zip(extents, dims, strict=False)):
            if isinstance(g, int) and g % c:
                raise TileValueError(
                    f"a cluster of {c} blocks does not divide the grid's axis {AXES[axis]} of {g}",
                    loc=source.current(),
                )
        blocks = prod(e for e in extents if isinstance(e, int))
        if blocks >= MOST_BLOCKS:
            raise TileValueError(
                f"a grid of {' × '.join(map(str, extents))} blocks",
                loc=source.current(),
                expected="fewer than 2³¹ blocks in all",
                hint="a smaller grid whose blocks loop over tiles with T.Persistent",
            )
        self.launch = Launch(
            extents, count, dims, max_blocks, bool(ordered), bool(pdl), comm_warps, comm_depth,
            source.current(), awaited=bool(awaited),
        )  # fmt: skip
        if isinstance(threads, (tuple, list)) and len(threads) > 1:
            self.launch.hints["axes"] = tuple(threads)
        if prelude is not None:
            self.launch.hints["imported"] = (prelude,)  # as T.import_source does
        self.names: tuple[str, ...] = ()
        self.apart = False  # whether its one index is taken out of a tuple: `as (bx,)`

    def name_targets(self, names: tuple[Any, ...]) -> None:
        self.apart = len(names) == 1 and isinstance(names[0], tuple)
        names = names[0] if self.apart else names
        self.names = names if all(isinstance(n, str) for n in names) else ()
        axes = len(self.launch.grid)
        if len(self.names) != axes and (len(self.names) > 1 or (self.apart and self.names)):
            raise TileSyntaxError(
                f"T.Kernel of {axes} ax{'i' if axes == 1 else 'e'}s as {', '.join(self.names)}",
                loc=source.current(),
                expected="a name for each axis, or one for all of them",
                hint=f"as {', '.join('b' + a for a in AXES[:axes])}",
            )

    def __enter__(self) -> Any:
        b = bld.current()
        if b.launch is not None:
            if not b.launched or b.device_depth():
                raise TileSyntaxError(
                    "a T.Kernel in another one",
                    loc=source.current(),
                    hint="one behind the other: each is a launch of the same call",
                )
            b.next_launch()
        b.launch = self.launch
        names = self.names if len(self.names) == len(self.launch.grid) else tuple("b" + a for a in AXES)
        self.launch.block_vars = [
            tirx.Var(b.unique(n), "int32") for n, _ in zip(names, self.launch.grid, strict=False)
        ]
        self._frame = b.push("kernel", device=False)
        b.open_body()
        values = self.launch.block_vars
        return values[0] if len(values) == 1 and not self.apart else tuple(values)

    def __exit__(self, kind: Any, error: Any, tb: Any) -> None:
        if error is not None:
            return
        b = bld.current()
        body = returns.settled(b.close_body(), self.launch.block_vars)
        b.pop(self._frame)
        span = b.span(self.launch.loc)
        for axis in reversed(range(len(self.launch.grid))):
            extent = as_expr(self.launch.grid[axis])
            iv = tirx.IterVar(
                ir.Range.from_min_extent(0, extent),
                self.launch.block_vars[axis],
                tirx.IterVar.ThreadIndex,
                f"blockIdx.{AXES[axis]}",
            )
            body = tirx.AttrStmt(iv, "thread_extent", extent, body, span)
        b.emit(
            tirx.AttrStmt(
                ir.StringImm("kernel"), "ts.kernel", tirx.IntImm("int32", self.launch.threads), body, span
            )
        )
        b.launched = True


class Scale:
    """Says at which scale the statements inside act: ``with T.Scale("device") as (rank, n):``.

    thread, warp, warpgroup and block name the executor: statements run once for each. cta_cluster, grid and
    device name the reach: with whom a barrier synchronizes, whose memory a copy touches. The two values are
    the own index and the count; of a cluster the index may be one along each axis: ``with
    T.Scale("cta_cluster") as (x, y), n:``.

    Args:
        team: with "device", some ranks of what encloses this: a list of ints, or a range, also of device
            values. Others skip the body, and everything inside counts within the team (compiler/ops/team.py).

    Raises:
        TileValueError: an unknown scale, a block that cannot be cut so, or ranks that are not there.
        TileTypeError: what is no team, or one of another scale. TileSyntaxError: names that the values do not
        fit.
    """

    def __init__(self, name: str, team: Any = None):
        if name not in SCALES:
            import difflib

            close = difflib.get_close_matches(str(name), SCALES, 1)
            raise TileValueError(
                f"there is no scale {name!r}",
                loc=source.current(),
                expected="one of " + ", ".join(SCALES),
                hint=f'T.Scale("{close[0]}")' if close else None,
            )
        if team is not None and name != "device":
            raise TileTypeError(
                f'team= of T.Scale("{name}")', loc=source.current(), hint='T.Scale("device", team=…)'
            )
        self.name, self.team = name, team
        self.names: tuple[Any, ...] = ()

    def name_targets(self, names: tuple[Any, ...]) -> None:
        self.names = names
        axes = names[0] if len(names) == 2 and isinstance(names[0], tuple) else ()
        deep = [n for n in (*names, *axes) if isinstance(n, tuple)]
        along = self.name == "cta_cluster" and self._dims(len(axes)) is not None
        if len(names) > 2 or deep and (deep != [axes] or not along):
            raise TileSyntaxError(
                f'T.Scale("{self.name}") gives two values',
                loc=source.current(),
                expected="the own index and the count"
                + (
                    ", or the index along each axis of the cluster and the count"
                    if self.name == "cta_cluster"
                    else ""
                ),
                hint=f'with T.Scale("{self.name}") as ({"(x, y)" if self.name == "cta_cluster" else "i"}, '
                "n):",
            )

    @staticmethod
    def _dims(axes: int) -> tuple[int, ...] | None:
        """The cluster's extents along its first axes; None where those are not all that it has."""
        launch = bld.current().launch
        dims = launch.cluster if launch is not None else (1, 1, 1)
        return dims[:axes] if 1 <= axes <= len(dims) and prod(dims[axes:]) == 1 else None

    def __enter__(self) -> Any:
        b = bld.current()
        if b.launch is None:
            raise TileSyntaxError(
                f'T.Scale("{self.name}") stands outside T.Kernel',
                loc=source.current(),
                hint="open it inside the launch",
            )
        width = {"warp": WARP, "warpgroup": WARPGROUP}.get(self.name)
        if width and b.launch.threads % width:
            raise TileValueError(
                f"a block of {b.launch.threads} threads is not made of whole {self.name}s",
                loc=source.current(),
                hint=f"T.Kernel(…, threads={-(-b.launch.threads // width) * width})",
            )
        rank = SCALES.index(self.name)
        if self.name in EXECUTORS and rank > EXECUTORS.index(b.executor):
            raise TileValueError(
                f"a {self.name} inside a {b.executor}",
                loc=source.current(),
                hint=f"open the {self.name} scale first",
            )
        if any(f.kind in ("parallel", "vectorized") for f in b.frames):
            raise TileSyntaxError(
                f'T.Scale("{self.name}") in T.Parallel, whose iterations are of elements: one thread runs '
                "each",
                loc=source.current(),
                expected="it around the loop",
                hint=f'with T.Scale("{self.name}") as (i, n):, and the loop in it',
            )
        self._frame = b.push("scale", device=False, detail=self.name)
        b.scales.append(self.name)
        b.open_body()
        span = b.span()
        axes = self.names[0] if self.names and isinstance(self.names[0], tuple) else ()
        names = self.names if len(self.names) == 2 else (f"{self.name}_id", f"{self.name}_num")
        if axes:
            names = (f"{self.name}_id", names[1])
        if self.name == "device" and (self.team is not None or b.team is not None):
            return self._enter_team(names)
        values = []
        for name, op in zip(names, ("ts.scale_index", "ts.scale_count"), strict=True):
            var = tirx.Var(b.unique(name), "int32")
            b.emit(tirx.Bind(var, ir.Call(op, [ir.StringImm(self.name)], ret_ty=ir.PrimType("int32")), span))
            values.append(var)
        if self.name != "device":
            b.executors.add(values[0])
        if not axes:
            return tuple(values)
        index, along = values[0], []  # blocks of a cluster are counted along x first
        for axis, extent in zip(axes, self._dims(len(axes)) or (), strict=True):
            own = tirx.Var(b.unique(axis), "int32")
            b.emit(tirx.Bind(own, tirx.floormod(index, tirx.IntImm("int32", extent)), span))
            b.executors.add(own)
            index = tirx.floordiv(index, tirx.IntImm("int32", extent))
            along.append(own)
        return tuple(along), values[1]

    @property
    def conditional(self) -> bool:
        """Whether some executors skip the body."""
        return self.team is not None

    def _enter_team(self, names: tuple[str, ...]) -> Any:
        """Opens the body for the members of ``team`` alone; without one it is the team that is open
        already."""
        from tilescale.compiler.ops import team

        b = bld.current()
        if self.team is None:
            return team.bound(names[0], b.team.index()), b.team.count
        opened = team.open_team(self.team, b.team)
        count = team.bound(names[1], opened.count)
        self._inside = opened.inside()
        self._branch = b.push("if", device=True)
        b.open_body()
        b.teams.append(opened)
        return team.bound(names[0], opened.index()), count

    def _leave_team(self) -> None:
        b = bld.current()
        b.teams.pop()
        body = b.close_body()
        b.pop(self._branch)
        b.emit(
            body
            if self._inside is True
            else tirx.IfThenElse(self._inside, body, None, b.span(self._frame.loc))
        )

    def __exit__(self, kind: Any, error: Any, tb: Any) -> None:
        if error is not None:
            return
        if self.team is not None:
            self._leave_team()
        b = bld.current()
        body = b.close_body()
        b.scales.pop()
        b.pop(self._frame)
        level = tirx.IntImm("int32", SCALES.index(self.name))
        b.emit(tirx.AttrStmt(ir.StringImm(self.name), "ts.scale", level, body, b.span(self._frame.loc)))


def _hint(name: str, value: Any) -> None:
    b = bld.current()
    if b.launch is None:
        raise TileSyntaxError(f"T.{name} stands outside T.Kernel", loc=source.current())
    b.launch.hints[name] = value


def use_swizzle(panel_size: int = 8, order: str = "row", enable: bool = True) -> None:
    """Asks for blocks in panels of ``panel_size`` rows, so that neighbours share the cache. A hint: results
    never depend on it."""
    require_bools(enable=enable)
    if order not in ("row", "column", "col"):
        raise TileValueError(
            f"order={order!r} of T.use_swizzle", loc=source.current(), expected='"row" or "column"'
        )
    if enable:
        if not isinstance(panel_size, int) or panel_size < 1:
            raise TileValueError(
                f"panel_size={panel_size!r}", loc=source.current(), expected="a number of rows"
            )
        _hint("swizzle", (panel_size, "row" if order == "row" else "column"))


def annotate_min_blocks_per_sm(n: int) -> None:
    """Asks the compiler for registers few enough that ``n`` blocks are resident on a multiprocessor. A hint:
    results never depend on it. A kernel whose roles share out the registers of one block leaves it out, which
    the log says.

    Raises:
        TileValueError: no positive int. TileSyntaxError: outside T.Kernel.
    """
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise TileValueError(
            f"T.annotate_min_blocks_per_sm({n!r})", loc=source.current(), expected="a number of blocks"
        )
    _hint("min_blocks", n)


def annotate_layout(layouts: dict[Any, Any]) -> None:
    """Fixes where tiles lie, on targets that choose layouts: ``T.annotate_layout({a:
    tilescale.layout.make_swizzled_layout(a)})``.

    A tile in shared memory takes a ``T.Layout`` or what `tilescale.layout` makes of it, one in registers a
    ``T.Fragment`` over all threads of the executor that allocates it. The CPU keeps every tile row-major.
    Results never depend on it. A tensor takes a ``T.Layout``, too: from here on its elements lie at those
    places
    of its memory, on every target, and are touched one by one.

    Raises:
        TileTypeError: what is no tile, or a layout of another kind or shape. TileValueError: one that the
        compiler cannot follow.
    """
    from tilescale.compiler.layout import Fragment, Shared
    from tilescale.compiler.layout.made import Layout, shown
    from tilescale.compiler.ops import placed

    b, loc = bld.current(), source.current()
    if not isinstance(layouts, dict):
        raise TileTypeError(f"T.annotate_layout of {layouts!r}", loc=loc, expected="{tile: layout}")
    before = b.launch.hints.get("layouts", {}) if b.launch is not None else {}
    made = dict(before)
    for tile, given in layouts.items():
        if isinstance(tile, VectorTile):
            raise TileTypeError(
                f"T.annotate_layout of {tile.name}, of {tile.dtype}",
                loc=loc,
                expected=f"a tile of scalars: {tile.of.dtype} with a last axis of {tile.count}",
            )
        if isinstance(tile, Buffer) and tile.scope == "global" and isinstance(given, Layout):
            placed.put(tile, given)
            continue
        if not isinstance(tile, Buffer) or not tile.scope.startswith(("shared", "local.fragment")):
            what = (
                f"{tile.name} is a tensor, and lies as its caller laid it"
                if isinstance(tile, Buffer)
                else f"{tile} is no tile"
            )
            raise TileTypeError(
                f"T.annotate_layout: {what}", loc=loc, expected="a tile of T.alloc_shared or T.alloc_fragment"
            )
        kind, wanted = (Shared, "T.Layout") if tile.scope.startswith("shared") else (Fragment, "T.Fragment")
        layout = (
            given.shared(BITS[str(tile.dtype)]) if isinstance(given, Layout) and kind is Shared else given
        )
        if (
            not isinstance(layout, kind)
            or len(layout.shape) != len(tile.shape)
            or any(e > w for e, w in zip(tile.shape, layout.shape, strict=True))
        ):
            raise TileTypeError(
                f"T.annotate_layout gives {tile.name} of {tile.shape} a layout of "
                f"{getattr(given, 'shape', given)}"
                + ("" if isinstance(layout, kind) else f", a {type(given).__name__}"),
                loc=loc,
                expected=f"a {wanted} of {tile.shape}, since {tile.name} lies in "
                + ("shared memory" if kind is Shared else "registers"),
            )
        if isinstance(layout, Shared) and layout.bits != BITS[str(tile.dtype)]:
            raise TileTypeError(
                f"T.annotate_layout gives {tile.name} of {tile.dtype} a layout for elements of "
                f"{layout.bits} bits",
                loc=loc,
                expected=f"one for {BITS[str(tile.dtype)]} bits",
            )
        if tile in before and before[tile][0] != layout:
            first, at = before[tile]
            raise TileValueError(
                f"{tile.name} is given two layouts: here {shown(layout)}, at {at} {shown(first)}",
                loc=loc,
                expected="one layout for a tile",
            )
        made[tile] = (layout, loc)
    _hint("layouts", made)


def annotate_l2_hit_ratio(ratios: dict[Any, float]) -> None:
    """A cache hint, which is not given yet."""
    _require_tensors("annotate_l2_hit_ratio", ratios)


def _require_tensors(name: str, given: Any) -> None:
    """A hint by tensor, or tile, is a dict of them."""
    if not isinstance(given, dict) or not all(isinstance(buffer, Buffer) for buffer in given):
        raise TileTypeError(f"T.{name} of {given!r}", loc=source.current(), expected="{tensor: value}")


def annotate_safe_value(values: dict[Any, Any]) -> None:
    """What a read outside a tensor gives from here on, instead of zero, by tensor: ``{A: 10}``. Elements and
    T.copy obey it; threads make such copies, since TMA and cp.async fill with zeros.

    Raises:
        TileTypeError: no tensor, one of 4-bit numbers, or a value that is no number. TileValueError: a number
            that is none of the tensor's dtype.
    """
    _require_tensors("annotate_safe_value", values)
    for tensor, value in values.items():
        if tensor.kind not in ("tensor", "symm") or tensor.packed or isinstance(tensor, VectorTile):
            raise TileTypeError(
                f"T.annotate_safe_value of {tensor.name}",
                loc=source.current(),
                expected="a tensor of the kernel, of numbers of a byte or more",
            )
        number = constant(value) if not isinstance(value, (bool, int, float)) else value
        kind = str(tensor.dtype)
        if number is not None and kind.startswith(("int", "uint")):
            low, high = range_of(kind)
            if not (float(number).is_integer() and low <= number <= high):
                raise TileValueError(
                    f"{number} is read outside {tensor.name}, which is of {kind}",
                    loc=source.current(),
                    expected=f"a whole number, {low} to {high}",
                )
            number = int(number)
        tensor.safe = None if number == 0 else to_expr(value, "a safe value") if number is None else number


def get_block_binding(dim: int = 0) -> Any:
    """The block's index along an axis of the grid, x first: what ``with T.Kernel(…) as (bx, by):`` gives.

    Raises:
        TileSyntaxError: outside T.Kernel. TileValueError: an axis that the grid does not have.
    """
    launch, loc = bld.current().launch, source.current()
    if launch is None:
        raise TileSyntaxError("T.get_block_binding stands outside T.Kernel", loc=loc)
    if not isinstance(dim, int) or not 0 <= dim < len(launch.block_vars):
        raise TileValueError(
            f"axis {dim!r} of the grid", loc=loc, expected=f"0 … {len(launch.block_vars) - 1}"
        )
    return launch.block_vars[dim]


def ClusterKernel(*grid: Any, cluster_dims: Any, threads: Any = None, prelude: str | None = None) -> Kernel:
    """``T.Kernel`` with clusters of blocks, by TileLang's name: a number of blocks along x, or a tuple."""
    return Kernel(*grid, cluster_dims=cluster_dims, threads=threads, prelude=prelude)


def get_rank() -> Any:
    """This rank within the launch's team: an int32 device value."""
    return ir.Call("ts.scale_index", [ir.StringImm("device")], ret_ty=ir.PrimType("int32"))


def get_world_size() -> Any:
    """How many ranks the launch's team has: an int32 device value."""
    return ir.Call("ts.scale_count", [ir.StringImm("device")], ret_ty=ir.PrimType("int32"))
