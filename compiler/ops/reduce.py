"""Reductions of a tile along one axis, in a fixed order."""

from __future__ import annotations

from typing import Any

from tilescale import log
from tilescale.compiler.ir import source
from tilescale.compiler.ir.contexts import SimContext
from tilescale.compiler.ir.folds import NUMBERS
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.operations import Access, TileOp, elements, register
from tilescale.compiler.ops.base import emit, region, same_extent, show, squeeze, unheeded
from tilescale.errors import TileTypeError, TileValueError
from tilescale.language.booleans import require_bools

OPS = ("sum", "max", "min", "abssum", "absmax", "prod", "bitand", "bitor", "bitxor")


def reduce(
    buffer: Any,
    out: Any,
    reduce_type: str,
    dim: int = -1,
    clear: bool = True,
    batch: int = 1,
    nan_propagate: bool = False,
    annotations: dict[str, Any] | None = None,
) -> None:
    """Reduces ``buffer`` along axis ``dim`` into ``out``, whose shape lacks that axis (or has extent one
    there).

    Args:
        reduce_type: sum, max, min, abssum, absmax, prod, bitand, bitor, bitxor.
        clear: False combines with what ``out`` holds.
        nan_propagate: in max, min and absmax a NaN wins over all numbers; else it is left out, and nothing
            but NaNs gives what no elements give: -∞, ∞ and, of magnitudes, 0.
        batch, annotations: decide nothing here.

    Raises:
        TileValueError, TileTypeError: shapes, axis, dtypes or an operation that do not fit.
    """
    require_bools(nan_propagate=nan_propagate)
    word = "reduce" if reduce_type not in OPS else f"reduce_{reduce_type}"
    together(word, batch)
    unheeded(word, annotations)
    fold_tile(buffer, out, reduce_type, dim, clear, nan_propagate)


def fold_tile(
    buffer: Any, out: Any, reduce_type: str, dim: int = -1, clear: bool = True, nan_wins: bool = True
) -> None:
    """`reduce` without TileLang's words."""
    require_bools(clear=clear)
    loc = source.current()
    if reduce_type not in OPS:
        raise TileValueError(
            f"there is no reduction {reduce_type!r}", loc=loc, expected="one of " + ", ".join(OPS)
        )
    src, dst = region(buffer, "the tile to reduce"), region(out, "the result")
    rank = len(src.shape)
    if not -rank <= dim < rank:
        raise TileValueError(
            f"axis {dim} of {src.name}, which has {rank}", loc=loc, expected=f"{-rank} ≤ dim < {rank}"
        )
    axis = dim % rank
    for r in (src, dst):
        if any(constant(e) is None for e in r.shape) or not r.buffer.scope.startswith(("shared", "local")):
            raise TileTypeError(
                f"{r.name} is not a tile of this block", loc=loc, hint="copy it into T.alloc_fragment first"
            )
    left = tuple(e for k, e in enumerate(src.shape) if k != axis)
    want, got = squeeze(left), squeeze(dst.shape)
    if len(want) != len(got) or not all(same_extent(a, b) for a, b in zip(want, got, strict=True)):
        raise TileValueError(
            f"reducing {src.name} {show(src.shape)} along axis {axis} gives {show(left)}, and {dst.name} "
            f"has {show(dst.shape)}",
            loc=loc,
        )
    if reduce_type.startswith("bit") and src.dtype.is_float:
        raise TileTypeError(f"reduce_{reduce_type} of {src.dtype}", loc=loc, expected="an integer dtype")
    # counted from the back, over the buffer's axes, so that a ring's leading stage axis changes nothing
    full = src.axes[axis] - src.buffer.ndim
    op = reduce_type
    if not nan_wins and (src.dtype.is_float or dst.dtype.is_float):
        op = NUMBERS.get(op, op)
    emit("reduce", [src.ir(), dst.ir()], {"op": op, "axis": full, "clear": int(bool(clear))})


def together(name: str, batch: int) -> None:
    """How many results TileLang reduces between two barriers, which decides nothing here.

    Raises:
        TileValueError: no such number.
    """
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise TileValueError(f"batch={batch!r}", loc=source.current(), expected="1 at least")
    if batch > 1:
        log.say("info", f"batch of T.{name} decides nothing here", once=True)


def _named(op: str, doc: str) -> Any:
    def call(
        buffer: Any,
        out: Any,
        dim: int = -1,
        clear: bool = True,
        batch: int = 1,
        annotations: dict[str, Any] | None = None,
    ) -> None:
        reduce(buffer, out, op, dim, clear, batch, annotations=annotations)

    call.__name__ = call.__qualname__ = f"reduce_{op}"
    call.__doc__ = doc
    return call


def _extreme(op: str, doc: str) -> Any:
    def call(
        buffer: Any,
        out: Any,
        dim: int = -1,
        clear: bool = True,
        batch: int = 1,
        nan_propagate: bool = False,
        annotations: dict[str, Any] | None = None,
    ) -> None:
        reduce(buffer, out, op, dim, clear, batch, nan_propagate, annotations)

    call.__name__ = call.__qualname__ = f"reduce_{op}"
    call.__doc__ = (
        f"{doc} NaNs are left out, and nothing but NaNs gives what no elements give: -∞, ∞ and, of "
        "magnitudes, 0. With ``nan_propagate=True`` a NaN wins."
    )
    return call


reduce_sum = _named("sum", "The sum along ``dim``.")
reduce_max = _extreme("max", "The greatest along ``dim``.")
reduce_min = _extreme("min", "The least along ``dim``.")
reduce_prod = _named("prod", "The product along ``dim``.")
reduce_bitand = _named("bitand", "All bits anded along ``dim``.")
reduce_bitor = _named("bitor", "All bits ored along ``dim``.")
reduce_bitxor = _named("bitxor", "All bits xored along ``dim``.")
reduce_abssum = _named("abssum", "The sum of magnitudes along ``dim``.")
reduce_absmax = _extreme("absmax", "The greatest magnitude along ``dim``.")


@register
class Reduce(TileOp):
    name = "reduce"
    attributes = ("op", "axis", "clear", "lanes?")
    plain = folds = True

    def written(self, call: Any) -> str:
        op = str(call.attrs["op"])
        return f"T.reduce_{next((word for word, number in NUMBERS.items() if number == op), op)}"

    def work(self, call: Any) -> int:
        return elements(call.args[0])

    def effects(self, call: Any) -> list[Access]:
        src, dst = call.args
        out = [Access(src, "read"), Access(dst, "write")]
        return out if call.attrs["clear"] else [*out, Access(dst, "read")]

    def simulate(self, call: Any, cx: SimContext) -> Any:
        from tilescale.compiler.sim import tiles

        src, dst = cx.view(call.args[0], call), cx.view(call.args[1], call)
        axis, op, clear = int(call.attrs["axis"]), str(call.attrs["op"]), bool(call.attrs["clear"])

        def run(ex: Any) -> None:
            before = None if clear else dst.read(ex)
            dst.write(ex, tiles.reduction(src.read(ex), before, axis, op, (src.dtype, dst.dtype)))

        return run


@register
class ReducePart(TileOp):
    """Scheduled level, GPUs: what each group of threads makes of its part of a reduction, into shared memory
    (groups, …)."""

    name = "reduce_part"
    levels = ("scheduled",)
    attributes = ("op", "axis", "clear", "lanes?")
    folds = True

    def effects(self, call: Any) -> list[Access]:
        return [Access(call.args[0], "read"), Access(call.args[1], "write")]

    def simulate(self, call: Any, cx: SimContext) -> Any:
        raise NotImplementedError  # made for GPUs alone, behind everything that the simulator runs
