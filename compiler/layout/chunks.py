"""How many bytes of a copy one instruction may move beside the threads (PTX ISA, "cp.async")."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from tilescale.compiler.ir.multiples import multiple, spelt_out
from tilescale.compiler.ir.nests import long_axes
from tilescale.compiler.layout.loops import bits_of, element_dtype
from tilescale.compiler.tvm_compat import structural_walk, sym, tirx

#: bytes that one instruction moves; 16 of them pass by the L1 cache
SIZES = (16, 8, 4)


def integer_names(body: Any) -> dict[Any, Any]:
    """What integer names of a program are bound to: a multiple stays one whatever it was computed from."""
    found: dict[Any, Any] = {}
    structural_walk(
        body, (tirx.Bind, lambda s: found.__setitem__(s.var, s.value) if "int" in str(s.value.ty) else None)
    )
    return found


def chunk(copy: Any, definitions: Mapping[Any, Any]) -> int:
    """How many bytes one instruction of a ``ts.copy`` into a ring's stage may move: the most that always are
    aligned on both sides, and inside the tensor or outside it as a whole; 0 where not even four are."""
    src, dst = copy.args[:2]
    var, size = src.source, bits_of(dst.source) // 8
    from_axes, to_axes = long_axes(src), [k for k in long_axes(dst) if k]
    if element_dtype(var) != element_dtype(dst.source) or not from_axes or not to_axes:
        return 0
    last, strides = len(var.ty.shape) - 1, strides_of(var)
    if from_axes[-1] != last or to_axes[-1] != len(dst.source.ty.shape) - 1:
        return 0
    analyzer = sym.Analyzer()
    one = multiple(analyzer, strides[-1] - 1, 1 << 20)
    whole = [
        *strides[:-1],
        var.ty.shape[-1],
        int(dst.region[to_axes[-1]].extent),
        spelt_out(src.region[last].min, definitions),
    ]
    most = size * int(copy.attrs["width"]) if "width" in copy.attrs else SIZES[0]
    return next(
        (
            n
            for n in SIZES
            if n <= most and one and n % size == 0 and all(multiple(analyzer, e, n // size) for e in whole)
        ),
        0,
    )


def strides_of(tensor: Any) -> list[Any]:
    """A tensor's strides: those that it was given, or row-major ones."""
    shape, one = list(tensor.ty.shape), tirx.IntImm("int32", 1)
    return list(tensor.ty.strides) or [prod(shape[k + 1 :], start=one) for k in range(len(shape))]
