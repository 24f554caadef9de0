"""Running sums and maxima of a tile along one axis."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.ir import source
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.operations import Access, TileOp, register
from tilescale.compiler.ops.base import emit, region, require_same_shape
from tilescale.errors import TileTypeError, TileValueError


def _scan(op: str, src: Any, dst: Any, dim: int, reverse: bool) -> None:
    loc = source.current()
    a = region(src, "the tile to scan")
    b = a if dst is None else region(dst, "the result")
    require_same_shape(a, b, f"T.cum{op}")
    rank = len(a.shape)
    if not -rank <= dim < rank:
        raise TileValueError(f"axis {dim} of {a.name}, which has {rank}", loc=loc, expected=f"{-rank} ≤ dim < {rank}")
    for r in (a, b):
        if any(constant(e) is None for e in r.shape) or not r.buffer.scope.startswith(("shared", "local")):
            raise TileTypeError(f"{r.name} is not a tile of this block", loc=loc, hint="copy it into T.alloc_shared first")
    full = [k for k, d in enumerate(a.dropped) if not d][dim % rank] - a.buffer.ndim
    emit("cumsum", [a.ir(), b.ir()], {"op": op, "axis": full, "reverse": int(bool(reverse))})


def cumsum(src: Any, dst: Any = None, dim: int = 0, reverse: bool = False) -> None:
    """Running sums along ``dim`` into ``dst`` (in place without one), from the end with ``reverse``."""
    _scan("sum", src, dst, dim, reverse)


def cummax(src: Any, dst: Any = None, dim: int = 0, reverse: bool = False) -> None:
    """Running maxima along ``dim`` into ``dst`` (in place without one), from the end with ``reverse``."""
    _scan("max", src, dst, dim, reverse)


@register
class CumSum(TileOp):
    name = "cumsum"

    def effects(self, call: Any) -> list[Access]:
        return [Access(call.args[0], "read"), Access(call.args[1], "write")]

    def stage(self, call: Any, cx: Any) -> list[Any] | None:
        from tilescale.compiler.cuda.scan import stage

        return stage(call, cx)

    def nest(self, call: Any) -> Any:
        from tilescale.compiler.cuda.scan import lines

        return lines(call)

    def lower_cpu(self, call: Any, cx: Any) -> Any:
        from tilescale.compiler.cpu.reduce import emit_cumsum
        from tilescale.compiler.cpu.view import like

        src, dst = cx.tile(call.args[0]), cx.tile(call.args[1])
        axis = int(call.attrs["axis"]) + len(src.shape)
        return emit_cumsum(cx, src, like(dst, src.shape), axis, bool(call.attrs["reverse"]), str(call.attrs["op"]))

    def simulate(self, call: Any, cx: Any) -> Any:
        from tilescale.compiler.sim import tiles

        src, dst = cx.view(call.args[0], call), cx.view(call.args[1], call)
        axis, op, reverse = int(call.attrs["axis"]), str(call.attrs["op"]), bool(call.attrs["reverse"])
        return lambda ex: dst.write(ex, tiles.scan(src.read(ex), axis, op, reverse, (src.dtype, dst.dtype)))
