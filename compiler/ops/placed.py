"""Tensors whose elements lie where a layout puts them (``T.annotate_layout`` of a tensor), one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tilescale.compiler.builder.constructs import LoopNest
from tilescale.compiler.builder.outside import is_inside
from tilescale.compiler.builder.values import Buffer, Region, as_expr, binary
from tilescale.compiler.ir import source
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ops.alloc import view
from tilescale.compiler.ops.math import if_then_else
from tilescale.compiler.tvm_compat import tirx
from tilescale.errors import TileTypeError, TileValueError


def put(tensor: Buffer, layout: Any) -> None:
    """From here on ``tensor[i, j]`` is the element that lies at ``layout.place(i, j)``, counted from the
    tensor's beginning. What lies outside its extents stays outside.

    Raises:
        TileTypeError: extents that are not constant. TileValueError: a layout that does not fit.
    """
    loc = source.current()
    if not all(isinstance(e, int) for e in tensor.shape):
        raise TileTypeError(f"T.annotate_layout of {tensor.name}, whose extents are not constants", loc=loc)
    size = 1
    for extent in tensor.shape:
        size *= extent
    reach = 1
    for extent in layout.extents:
        reach *= extent
    if tuple(layout.shape) != tuple(tensor.shape) or reach > size:
        raise TileValueError(
            f"T.annotate_layout gives {tensor.name} of {tensor.shape} a layout of {layout.shape} "
            f"that takes {reach} elements",
            loc=loc,
            expected=f"one of {tensor.shape} that takes {size}",
        )
    order = _order(layout)
    if order is not None:
        tensor.flat = view(tensor, tuple(tensor.shape[k] for k in order))
        tensor.place = lambda indices: tuple(indices[k] for k in order)
        return

    def place(indices: Sequence[Any]) -> tuple[Any, ...]:
        inside = is_inside(indices, tensor.shape)
        at = as_expr(layout.place(*indices))
        return (at if inside is None else if_then_else(inside, at, -1),)

    tensor.flat, tensor.place = view(tensor, (size,)), place


def _order(layout: Any) -> list[int] | None:
    """The tensor's axes in the order in which the memory has them; None where a layout cuts axes. A view with
    its axes in that order has the elements outside where the tensor has them, axis by axis: each access says
    no more of that than one of a plain tensor, and neighbours are seen to lie side by side."""
    axes = [tirx.Var(f"axis{k}", "int32") for k in range(len(layout.shape))]
    found = layout.map_forward_index(axes)
    order = [k for part in found for k, axis in enumerate(axes) if axis.same_as(part)]
    return order if sorted(order) == list(range(len(axes))) and len(found) == len(axes) else None


def index(of: Region, axes: Sequence[int], at: Sequence[Any]) -> tuple[Any, ...]:
    """Where the element of a region that lies at ``at`` along its buffer's ``axes`` is in the buffer: first
    along all others."""
    moved = dict(zip(axes, at, strict=False))
    return tuple(
        binary("+", as_expr(low), moved[k]) if k in moved else as_expr(low) for k, low in enumerate(of.mins)
    )


def by_element(to: Region, frm: Region, act: Callable[[Any, Any], None]) -> None:
    """``act(index in the first, index in the second)`` for each element of two regions of one shape."""
    axes = [k for k, e in enumerate(to.extents) if constant(e) != 1]
    others = [k for k, e in enumerate(frm.extents) if constant(e) != 1]
    nest = LoopNest("parallel", [(0, to.extents[k], 1) for k in axes] or [(0, 1, 1)])
    for found in nest.trace(tuple("ijklmnpq"[: max(len(axes), 1)])):
        at = found if isinstance(found, tuple) else (found,)
        act(index(to, axes, at), index(frm, others, at))
