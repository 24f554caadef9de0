"""Running sums and maxima of a tile along one axis."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.ir import source
from tilescale.compiler.ir.contexts import SimContext
from tilescale.compiler.ir.folds import accumulator, fold, identity
from tilescale.compiler.ir.nests import Nest, indexed
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.operations import Access, TileOp, elements, register
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.layout.loops import element_dtype, in_registers
from tilescale.compiler.ops.base import emit, region, require_same_shape, unheeded
from tilescale.compiler.tvm_compat import tirx
from tilescale.errors import TileTypeError, TileValueError
from tilescale.language.booleans import require_bools

ZERO = tirx.IntImm("int32", 0)


def _scan(op: str, src: Any, dst: Any, dim: int, reverse: bool) -> None:
    require_bools(reverse=reverse)
    loc = source.current()
    a = region(src, "the tile to scan")
    b = a if dst is None else region(dst, "the result")
    require_same_shape(a, b, f"T.cum{op}")
    rank = len(a.shape)
    if not -rank <= dim < rank:
        raise TileValueError(
            f"axis {dim} of {a.name}, which has {rank}", loc=loc, expected=f"{-rank} ≤ dim < {rank}"
        )
    for r in (a, b):
        if any(constant(e) is None for e in r.shape) or not r.buffer.scope.startswith(("shared", "local")):
            raise TileTypeError(
                f"{r.name} is not a tile of this block", loc=loc, hint="copy it into T.alloc_shared first"
            )
    full = a.axes[dim % rank] - a.buffer.ndim
    emit("cumsum", [a.ir(), b.ir()], {"op": op, "axis": full, "reverse": int(bool(reverse))})


def cumsum(
    src: Any, dst: Any = None, dim: int = 0, reverse: bool = False, annotations: dict[str, Any] | None = None
) -> None:
    """Running sums along ``dim`` into ``dst`` (in place without one), from the end with ``reverse``."""
    unheeded("cumsum", annotations)
    _scan("sum", src, dst, dim, reverse)


def cummax(
    src: Any, dst: Any = None, dim: int = 0, reverse: bool = False, annotations: dict[str, Any] | None = None
) -> None:
    """Running maxima along ``dim`` into ``dst`` (in place without one), from the end with ``reverse``."""
    unheeded("cummax", annotations)
    _scan("max", src, dst, dim, reverse)


@register
class CumSum(TileOp):
    name = "cumsum"
    attributes = ("op", "axis", "reverse")
    plain = in_place = True

    def written(self, call: Any) -> str:
        return f"T.cum{call.attrs['op']}"

    def work(self, call: Any) -> int:
        return elements(call.args[0])

    def effects(self, call: Any) -> list[Access]:
        return [Access(call.args[0], "read"), Access(call.args[1], "write")]

    def nest(self, call: Any) -> Any:
        from tilescale.compiler.ops.cumsum import lines

        return lines(call)

    def simulate(self, call: Any, cx: SimContext) -> Any:
        from tilescale.compiler.sim import tiles

        src, dst = cx.view(call.args[0], call), cx.view(call.args[1], call)
        axis, op, reverse = int(call.attrs["axis"]), str(call.attrs["op"]), bool(call.attrs["reverse"])
        return lambda ex: dst.write(ex, tiles.scan(src.read(ex), axis, op, reverse, (src.dtype, dst.dtype)))


def lines(call: Any) -> Nest:
    """One iteration a line: a loop along the axis that carries the total."""
    src, dst = call.args
    if in_registers(src.source) or in_registers(dst.source):
        return None  # type: ignore[return-value]  # not staged yet
    op, reverse = str(call.attrs["op"]), bool(call.attrs["reverse"])
    rank = len(src.region)
    axis = int(call.attrs["axis"]) % rank
    extents = [int(r.extent) for r in src.region]
    others = [k for k in range(rank) if k != axis and extents[k] != 1]
    names = tuple(tirx.Var("ijkl"[k % 4], "int32") for k in range(len(others)))
    along = tirx.Var("s", "int32")
    at = tirx.IntImm("int32", extents[axis] - 1) - along if reverse else along
    source = dict(zip(others, names, strict=True)) | {axis: at}
    kept = sorted(source)
    to_axes = _same_axes(src, dst, kept)
    acc = accumulator(element_dtype(src.source), element_dtype(dst.source))
    total = tirx.decl_buffer((1,), acc, "total", scope="local", layout=None)
    now = tirx.BufferLoad(total, [ZERO])
    element = tirx.BufferLoad(src.source, indexed(src, [source[k] for k in kept], kept))

    def cast(v: Any, dt: str) -> Any:
        return v if str(v.ty) == dt else tirx.Cast(dt, v)

    put = tirx.BufferStore(
        dst.source,
        cast(now, element_dtype(dst.source)),
        indexed(dst, [source[k] for k in kept], to_axes),
        call.span,
    )
    step = sequence([tirx.BufferStore(total, fold(op, now, cast(element, acc)), [ZERO], call.span), put])
    body = sequence(
        [
            tirx.AllocBuffer(total, {}, call.span),
            tirx.BufferStore(total, identity(op, acc), [ZERO], call.span),
            tirx.For(
                along, ZERO, tirx.IntImm("int32", extents[axis]), tirx.ForKind.SERIAL, step, span=call.span
            ),
        ]
    )
    return Nest(names, tuple(extents[k] for k in others), body, call, f"T.cum{op}", alone=True)


def _same_axes(src: Any, dst: Any, kept: list[int]) -> list[int]:
    """The axes of ``dst`` that the axes ``kept`` of ``src`` are, both without axes of extent one; a scanned
    axis of extent one is any."""
    long = [k for k, r in enumerate(dst.region) if int(r.extent) != 1]
    if len(long) == len(kept):
        return long
    spare = [k for k in range(len(dst.region)) if k not in long]
    return sorted([*long, *spare[: len(kept) - len(long)]])
