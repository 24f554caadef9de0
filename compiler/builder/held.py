"""Values as they are now. An expression that reads memory would read it where it stands in the end: Python's
names, tuples, lists and arguments have their values from the moment at which they are made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tilescale.compiler.builder import state as bld
from tilescale.compiler.builder.values import Region, Variable
from tilescale.compiler.tvm_compat import ir, is_expr, structural_walk, tirx


def reads_memory(e: Any) -> bool:
    found: list[Any] = []
    if is_expr(e) and not isinstance(e, (ir.Var, tirx.IntImm, tirx.FloatImm)):
        structural_walk(e, (ir.TensorLoad, found.append))
    return bool(found)


class Element(Variable):
    """An element of a tile or a tensor as a cell: what a macro's ``x: T.Ref`` is where it is given one. Its
    place is the one of now."""

    def __init__(self, load: Any):
        super().__init__(bld.current().buffers[load.source])
        self.indices = tuple(named(i, "at") if reads_memory(i) else i for i in load.indices)

    @property
    def name(self) -> str:
        return str(self.load())

    def load(self) -> Any:
        return tirx.BufferLoad(self.buffer.var, list(self.indices))

    def store(self, value: Any) -> None:
        self.buffer.store(self.indices, value)


def held(value: Any, name: str = "value") -> Any:
    """A value that later writes do not change: what it reads is read here, once, under a name. An element
    keeps its place, as the first one of a tile; a region keeps where it begins and ends. Cells
    (``T.alloc_var``) and tiles are what they are."""
    if isinstance(value, Region):
        mins, extents = (tuple(held(e) for e in part) for part in (value.mins, value.extents))
        same = all(a is b for a, b in zip((*mins, *extents), (*value.mins, *value.extents), strict=True))
        return value if same else replace(value, mins=mins, extents=extents)
    if hasattr(value, "asobject"):  # TVM's deferred == and !=
        value = value.asobject()
    return named(value, name) if reads_memory(value) else value


def held_parts(value: Any, name: str) -> Any:
    """The same of what tuples and lists have in them; a list stays the same list."""
    if isinstance(value, list):
        value[:] = [held_parts(v, name) for v in value]
        return value
    if isinstance(value, tuple):
        parts = [held_parts(v, name) for v in value]
        if all(a is b for a, b in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return held(value, name)


def contents(value: Any, name: str = "value") -> Any:
    """What a cell that has a name holds now; any other value as it is. One that was made here and has no name
    yet is the value itself."""
    fresh = isinstance(value, Variable) and value.buffer.var in bld.current().unnamed
    return named(value.load(), name) if isinstance(value, Variable) and not fresh else value


def named(e: Any, name: str) -> Any:
    """A name for what an expression is here, computed once."""
    b, place = bld.current(), e
    if isinstance(e, ir.TensorLoad) and any(
        reads_memory(i) for i in e.indices
    ):  # its place, too, is the one of now
        place = tirx.BufferLoad(e.source, [held(i, f"{name}_at") for i in e.indices])
    var = tirx.Var(b.unique(name), e.ty)
    b.emit(tirx.Bind(var, e, b.span()))
    if isinstance(e, ir.TensorLoad):
        b.origins[var] = place
    elif str(e.ty) in ("int32", "int64"):
        b.definitions[var] = e
    return var
