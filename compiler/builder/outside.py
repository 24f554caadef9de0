"""Tensors outside of which something else than zero is read (``T.annotate_safe_value``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilescale.compiler.builder.narrow import Element
from tilescale.compiler.builder.values import as_expr, compare, const, convert
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.tvm_compat import tirx


def is_inside(indices: Sequence[Any], shape: Sequence[Any]) -> Any:
    """Whether a tensor of this shape has such an element; None where constants say that it has."""
    inside: Any = None
    for i, extent in zip(indices, shape, strict=True):
        known = constant(i)
        if known is not None and isinstance(extent, int) and 0 <= known < extent:
            continue
        test = tirx.And(compare(">=", as_expr(i), 0), compare("<", as_expr(i), extent))
        inside = test if inside is None else tirx.And(inside, test)
    return inside


class Guarded(Element):
    """An element of such a tensor; the base of a tile of it where a tile is needed."""

    def load(self) -> Any:
        """Its value, or the tensor's where there is no such element."""
        tensor = self.buffer
        inside = is_inside(self.indices, tensor.shape)
        value = tensor.read(self.indices)
        if inside is None:
            return value
        kind = str(tensor.dtype)
        other = tensor.safe
        given = const(other, kind) if isinstance(other, (bool, int, float)) else convert(other, kind)
        return tirx.if_then_else(inside, value, given)
