"""The greatest and the least along an axis, with their places: one of each line, or several in order."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

from tilescale.compiler.ir import source
from tilescale.compiler.ir.contexts import SimContext
from tilescale.compiler.ir.nests import indexed, long_axes
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.operations import Access, TileOp, elements, register
from tilescale.compiler.ops.base import emit, region, same_extent, show, squeeze
from tilescale.errors import TileTypeError, TileValueError

#: what indices are: enough for any tile
INDEX = "int32"


def argmax(src: Any, values: Any, indices: Any, dim: int = -1) -> None:
    """The greatest element of each line of ``src`` along axis ``dim``, and its index in the line.

    Of equal elements the one with the lower index wins; -0.0 and 0.0 are equal. The first NaN of a line wins
    over all numbers.

    Args:
        src: a tile of any dtype.
        values: a tile of its dtype, whose shape lacks the axis (or has extent one there).
        indices: the same of int32. Counted from the beginning of the part of a tile that ``src`` is.

    Raises:
        TileValueError, TileTypeError: shapes, axis or dtypes that do not fit.
    """
    _emit("max", src, values, indices, dim)


def argmin(src: Any, values: Any, indices: Any, dim: int = -1) -> None:
    """The least element of each line of ``src`` along axis ``dim``, and its index in the line: as `argmax`,
    the first NaN wins."""
    _emit("min", src, values, indices, dim)


def topk(src: Any, values: Any, indices: Any, k: int) -> None:
    """The ``k`` greatest elements of each line of ``src`` along its last axis, the greatest first, and their
    indices in the line.

    Equal elements come in the order of their indices; -0.0 and 0.0 are equal. NaNs come first, as in
    torch.topk.

    Args:
        src: a tile of any dtype.
        values: a tile of its dtype and shape, with extent ``k`` along the last axis.
        indices: the same of int32. Counted from the beginning of the part of a tile that ``src`` is.

    Raises:
        TileValueError, TileTypeError: ``k``, shapes or dtypes that do not fit.
    """
    loc = source.current()
    try:
        count = operator.index(k)
    except TypeError:
        count = None
    if count is None or isinstance(k, bool):
        raise TileTypeError(
            f"T.topk of k={k!r}", loc=loc, expected="a whole number that is known at compile time"
        )
    _emit("top", src, values, indices, -1, count)


def _emit(op: str, src: Any, values: Any, indices: Any, dim: int, k: int = 0) -> None:
    """``k``: 0 where one of each line is wanted, and the axis goes."""
    loc, word = source.current(), "T.topk" if k or op == "top" else f"T.arg{op}"
    a, v, i = (
        region(src, f"what {word} looks through"),
        region(values, "the values"),
        region(indices, "the indices"),
    )
    rank = len(a.shape)
    if not isinstance(dim, int) or not -rank <= dim < rank:
        raise TileValueError(
            f"axis {dim} of {a.name}, which has {rank}", loc=loc, expected=f"{-rank} ≤ dim < {rank}"
        )
    for r in (a, v, i):
        if any(constant(e) is None for e in r.shape) or not r.buffer.scope.startswith(("shared", "local")):
            raise TileTypeError(
                f"{r.name} is not a tile of this block", loc=loc, hint="copy it into T.alloc_shared first"
            )
    axis = dim % rank
    extent = constant(a.shape[axis]) or 0
    if op == "top" and not 1 <= k <= extent:
        raise TileValueError(
            f"T.topk of k={k} along the last axis of {a.name}, which has {extent} elements",
            loc=loc,
            expected=f"1 ≤ k ≤ {extent}",
        )
    want = (*a.shape[:axis], *((k,) if op == "top" else ()), *a.shape[axis + 1 :])
    for r, what, dtype in ((v, "values", str(a.dtype)), (i, "indices", INDEX)):
        left, got = squeeze(want), squeeze(r.shape)
        if len(left) != len(got) or not all(same_extent(x, y) for x, y in zip(left, got, strict=True)):
            given = f" with k={k}" if op == "top" else f" along axis {axis}"
            raise TileValueError(
                f"{word} of {a.name} {show(a.shape)}{given} gives {what} of {show(want)}, and {r.name} has "
                f"{show(r.shape)}",
                loc=loc,
                expected=f"{r.name} of {show(want)}",
            )
        if str(r.dtype) != dtype:
            raise TileTypeError(
                f"{word} of {a.name} gives {what} of {dtype}, and {r.name} is of {r.dtype}",
                loc=loc,
                expected=dtype,
            )
    if v.buffer is i.buffer:
        raise TileValueError(f"{word} puts values and indices into {v.name}", loc=loc, expected="two tiles")
    # counted from the back, over the buffer's axes, so that a ring's leading stage axis changes nothing
    full = a.axes[axis] - a.buffer.ndim
    emit(
        "topk" if op == "top" else "argmax",
        [a.ir(), v.ir(), i.ir()],
        {"axis": full, **({"k": k} if op == "top" else {"op": op})},
    )


@dataclass(frozen=True)
class Picks:
    """What a call looks for: the ``count`` first along ``axis`` (of ``extent`` elements) of each line;
    ``others``: the axes that number the lines, and ``extents`` how long they are. ``least``: the least, not
    the greatest."""

    call: Any
    axis: int
    extent: int
    count: int
    least: bool
    others: tuple[int, ...]
    extents: tuple[int, ...]

    @staticmethod
    def of(call: Any) -> Picks:
        shape = [int(r.extent) for r in call.args[0].region]
        axis = int(call.attrs["axis"]) % len(shape)
        others = tuple(n for n in long_axes(call.args[0]) if n != axis)
        least = str(call.attrs.get("op", "")) == "min"
        return Picks(
            call,
            axis,
            shape[axis],
            int(call.attrs.get("k", 1)),
            least,
            others,
            tuple(shape[n] for n in others),
        )

    def source(self, line: list[Any], at: Any) -> list[Any]:
        """The indices in the tile that is looked through of the element ``at`` of a line."""
        return indexed(self.call.args[0], [*line, at], [*self.others, self.axis])

    def target(self, which: int, line: list[Any], number: Any) -> list[Any]:
        """The indices in the tile of values (1) or of indices (2) of a line's pick."""
        dst = self.call.args[which]
        at = [*line, number] if self.count > 1 else line
        return indexed(dst, at, long_axes(dst))


class _Picking(TileOp):
    plain = True

    def effects(self, call: Any) -> list[Access]:
        return [Access(call.args[0], "read"), Access(call.args[1], "write"), Access(call.args[2], "write")]

    def work(self, call: Any) -> int:
        return elements(call.args[0]) * Picks.of(call).count

    def simulate(self, call: Any, cx: SimContext) -> Any:
        import numpy as np

        from tilescale.compiler.sim import numerics

        src, values, indices = (cx.view(a, call) for a in call.args)
        picks = Picks.of(call)

        def run(ex: Any) -> None:
            held = np.moveaxis(src.read(ex), picks.axis, -1)
            x = numerics.decode(held, src.dtype)
            if picks.least:  # NumPy's first of the least is a NaN where there is one
                found = np.argmin(x, -1)[..., None]
            else:  # sorted and read from behind: the greatest first, NaNs in front, equal ones as they stand
                found = (
                    picks.extent
                    - 1
                    - np.argsort(x[..., ::-1], -1, kind="stable")[..., ::-1][..., : picks.count]
                )
            values.write(ex, np.take_along_axis(held, found, -1))
            indices.write(ex, found.astype(INDEX))

        return run


@register
class ArgMax(_Picking):
    """``ts.argmax(src, values, indices)``, the least with ``attrs["op"]`` "min"."""

    name = "argmax"
    attributes: ClassVar[tuple[str, ...]] = ("op", "axis")

    def written(self, call: Any) -> str:
        return f"T.arg{call.attrs['op']}"


@register
class TopK(_Picking):
    """``ts.topk(src, values, indices)``: the ``attrs["k"]`` greatest."""

    name = "topk"
    attributes: ClassVar[tuple[str, ...]] = ("axis", "k")
