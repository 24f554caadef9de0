"""Views of tensors whose axes are the tensor's own, some of them as one: accesses go to the tensor itself. A
box of a tensor is what TMA and rings know; memory under another name is none."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from tilescale.compiler.ir.multiples import bound_in, is_multiple, spelt_out
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.pointed import address_of
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.layout.loops import element_dtype
from tilescale.compiler.tvm_compat import ir, structural_map, structural_walk, tirx


@dataclass(frozen=True)
class _Merged:
    """A view of ``base``. ``groups``: for each of its axes the extents of the base's axes that it is."""

    base: Any
    groups: list[list[int]]


def merged_views(program: TileProgram) -> TileProgram:
    """The program without such views, where each part of one that a statement names is a part of the tensor:
    a part of a merged axis lies in one row of the last of the axes that it is made of."""
    views: dict[Any, _Merged] = {}

    def look(s: Any) -> None:
        base = s.data.args[0]
        if address_of(s) is not None or base in views or base.ty.storage_scope != "global":
            return
        same = element_dtype(s.buffer) == element_dtype(base) and not list(base.ty.strides)
        groups = _groups(s.buffer, base) if same else None
        if groups is not None:
            views[s.buffer] = _Merged(base, groups)

    structural_walk(program.func.body, (tirx.DeclBuffer, look))
    names = bound_in(program.func.body) if views else {}
    body = program.func.body
    for view, merged in views.items():
        made = _without(body, view, merged, names)
        body = body if made is None else made
    return program if body.same_as(program.func.body) else program.with_body(body)


def _groups(view: Any, base: Any) -> list[list[int]] | None:
    """The axes of a view as groups of its base's, both from the first on; None where they are cut
    otherwise."""
    shape, left = [constant(e) for e in view.ty.shape], [constant(e) for e in base.ty.shape]
    groups: list[list[int]] = []
    for extent in reversed(shape):
        group: list[int] = []
        while left and (not group or prod(group) != extent):
            if (axis := left.pop()) is None or extent is None:
                return None
            group.insert(0, axis)
        if not group or prod(group) != extent:
            return None
        groups.insert(0, group)
    if any(e != 1 for e in left) or not groups:
        return None
    groups[0] = [1 for _ in left] + groups[0]  # axes of one element in front
    return groups


def _without(body: Any, view: Any, merged: _Merged, names: Any) -> Any | None:
    """A statement with the base in a view's place; None where it names a part that is no box of the base, or
    the view's memory as a whole."""
    unfit: list[Any] = []

    def part(r: Any) -> Any:
        if not r.source.same_as(view):
            return r
        out = []
        for place, group in zip(r.region, merged.groups, strict=True):
            size = constant(place.extent)
            one = len(group) == 1 or size == 1
            whole = size and group[-1] % size == 0 and is_multiple(spelt_out(place.min, names), size)
            if not one and not whole:
                unfit.append(r)
                return r
            *outer, last = _digits(place.min, group)
            out += [ir.Range.from_min_extent(d, tirx.IntImm(str(d.ty), 1)) for d in outer]
            out.append(ir.Range.from_min_extent(last, place.extent))
        return tirx.BufferRegion(merged.base, out)

    def at(indices: Any) -> list[Any]:
        return [d for i, group in zip(indices, merged.groups, strict=True) for d in _digits(i, group)]

    def load(e: Any) -> Any:
        return tirx.BufferLoad(merged.base, at(e.indices)) if e.source.same_as(view) else e

    def store(s: Any) -> Any:
        return tirx.BufferStore(merged.base, s.value, at(s.indices), s.span) if s.buffer.same_as(view) else s

    nothing = tirx.Evaluate(tirx.IntImm("int32", 0))
    made = structural_map(body, (ir.TensorRegion, part))
    made = structural_map(made, (ir.TensorLoad, load))
    made = structural_map(made, (tirx.BufferStore, store))
    made = structural_map(made, (tirx.DeclBuffer, lambda s: nothing if s.buffer.same_as(view) else s))
    structural_walk(made, (ir.Var, lambda v: unfit.append(v) if v.same_as(view) else None))
    return None if unfit else made


def _digits(index: Any, group: list[int]) -> list[Any]:
    """An index into merged axes as one into each. The first one's may lie outside, where the index does."""
    if len(group) == 1:
        return [index]
    out: list[Any] = []
    dtype = str(index.ty)
    for extent in reversed(group[1:]):
        out.insert(0, tirx.floormod(index, tirx.IntImm(dtype, extent)))
        index = tirx.floordiv(index, tirx.IntImm(dtype, extent))
    return [index, *out]
