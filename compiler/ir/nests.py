"""Loops of independent iterations as one thing: the T.Parallel nests that the author wrote, and the
operations (copies, fills) that are the same kind of loop over the elements of a tile."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tilescale.compiler.ir.operations import VOID, effects_of, find
from tilescale.compiler.tvm_compat import ir, structural_walk, tirx


@dataclass(frozen=True)
class Element:
    """One access of a nest: ``buffer[indices]``, read, written or updated (an atomic), always or only under a
    condition."""

    buffer: Any
    indices: tuple[Any, ...]
    mode: str
    conditional: bool
    node: Any


@dataclass
class Nest:
    """``body`` for every value of ``vars`` below ``extents`` (ints or expressions), in any order."""

    vars: tuple[Any, ...]
    extents: tuple[Any, ...]
    body: Any
    node: Any
    #: which operation it stands for; T.Parallel for the author's own
    what: str = "T.Parallel"
    #: an iteration may run only once: its values come from what it does to memory
    alone: bool = False
    #: it writes memory that it reads: who has its results in registers must have run it before anybody else
    rereads: bool = False
    #: which thread runs which iteration, where the author fixed it (layout/asked.py)
    layout: str = ""
    #: the most neighbours that one access to memory may take, where the author bounds them
    width: int = 0
    accesses: list[Element] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.accesses = list(accesses(self.body))
        self.alone = self.alone or _takes_results(self.body)
        memory = [a for a in self.accesses if not a.buffer.ty.storage_scope.startswith("local")]
        read, written = ({a.buffer for a in memory if (a.mode == "read") is reads} for reads in (True, False))
        self.rereads = bool(read & written)

    @property
    def is_static(self) -> bool:
        return all(isinstance(e, int) for e in self.extents)


def _takes_results(body: Any) -> bool:
    """Whether a body uses what an atomic update of its own returned."""
    found: list[Any] = []

    def look(call: Any) -> None:
        if find(call) is not None and str(call.ty) != str(VOID):
            found.append(call)

    structural_walk(body, (ir.Call, look))
    return bool(found)


def constant_extent(e: Any) -> Any:
    """An extent as an int where it is one."""
    if isinstance(e, int):
        return e
    return int(e.value) if isinstance(e, tirx.IntImm) else e


def is_nest(s: Any) -> bool:
    """Whether a statement is a loop whose iterations the executor's threads share."""
    return isinstance(s, tirx.For) and s.kind in (tirx.ForKind.PARALLEL, tirx.ForKind.VECTORIZED)


def loops_of(s: Any) -> list[Any]:
    """The loops of a nest (`is_nest`), the outermost first."""
    loops, depth = [s], int((s.annotations or {}).get("ts.depth", 1))
    while len(loops) < depth and isinstance(loops[-1].body, tirx.For):
        loops.append(loops[-1].body)
    return loops


@functools.lru_cache(maxsize=4096)
def nest_of(s: Any) -> Nest | None:
    """The nest that a statement is: a T.Parallel loop with its inner ones, or an operation that is a loop
    over elements. Statements never change and are compared by identity, and every pass asks again, so the
    answer is kept; nobody writes to it."""
    if is_nest(s):
        loops, notes = loops_of(s), s.annotations or {}
        extents = tuple(constant_extent(loop.extent) for loop in loops)
        asked: dict[str, Any] = {
            "layout": str(notes.get("ts.layout", "")),
            "width": int(notes.get("ts.width", 0)),
        }
        return Nest(tuple(loop.loop_var for loop in loops), extents, loops[-1].body, s, **asked)
    if isinstance(s, tirx.BufferStore):
        return Nest((), (), s, s, "the assignment")
    if isinstance(s, tirx.Evaluate):
        op = find(s.value)
        if op is not None:
            nest: Nest | None = op.nest(s.value)
            return nest
    return None


def accesses(s: Any, conditional: bool = False) -> Iterator[Element]:
    """The accesses of a nest's body in the order of its text; what stands behind a condition may not
    happen."""
    if isinstance(s, tirx.SeqStmt):
        for inner in s.seq:
            yield from accesses(inner, conditional)
    elif isinstance(s, tirx.IfThenElse):
        yield from reads(s.condition, conditional)
        yield from accesses(s.then_case, True)
        if s.else_case is not None:
            yield from accesses(s.else_case, True)
    elif isinstance(s, tirx.For):
        yield from reads(s.extent, conditional)
        yield from accesses(s.body, True)
    elif isinstance(s, tirx.While):
        yield from reads(s.condition, conditional)
        yield from accesses(s.body, True)
    elif isinstance(s, tirx.Bind):
        yield from reads(s.value, conditional)
    elif isinstance(s, tirx.BufferStore):
        for e in (*s.indices, s.value):
            yield from reads(e, conditional)
        yield Element(s.buffer, tuple(s.indices), "write", conditional, s)
    elif isinstance(s, tirx.Evaluate):
        yield from reads(s.value, conditional)
    elif isinstance(s, tirx.AttrStmt):
        yield from accesses(s.body, conditional)


def reads(e: Any, conditional: bool = False) -> Iterator[Element]:
    """The elements that an expression touches: loads, and those of operations that work on single
    elements."""
    if isinstance(e, int):
        return
    found: list[Element] = []
    structural_walk(
        e,
        (ir.TensorLoad, lambda x: found.append(Element(x.source, tuple(x.indices), "read", conditional, x))),
    )

    def call(c: Any) -> None:
        for a in effects_of(c):
            found.append(
                Element(a.region.source, tuple(r.min for r in a.region.region), a.mode, conditional, c)
            )

    structural_walk(e, (ir.Call, call))
    yield from found


def element_nest(shape: list[Any], make: Any, node: Any, what: str, layout: str = "", width: int = 0) -> Nest:
    """``make(indices)`` for every index of ``shape``."""
    names = "ijklmnpq"
    vars_ = tuple(tirx.Var(names[k % len(names)], "int32") for k in range(len(shape)))
    return Nest(
        vars_,
        tuple(constant_extent(e) for e in shape),
        make(list(vars_)),
        node,
        what,
        layout=layout,
        width=width,
    )


def indexed(region: Any, indices: list[Any], kept: list[int]) -> list[Any]:
    """The indices in a region's buffer of its element ``indices``, counted over the axes ``kept``; the others
    have extent one."""
    at = dict(zip(kept, indices, strict=True))
    out = []
    for axis, r in enumerate(region.region):
        if axis not in at:
            out.append(r.min)
        elif isinstance(r.min, tirx.IntImm) and int(r.min.value) == 0:
            out.append(at[axis])
        else:
            out.append(r.min + (at[axis] if str(r.min.ty) == "int32" else tirx.Cast(str(r.min.ty), at[axis])))
    return out


def matrix_axes(region: Any) -> tuple[int, int]:
    """The two axes of a region that are the matrix: those longer than one, filled up from the back."""
    keep = [k for k, r in enumerate(region.region) if int(r.extent) != 1]
    for k in reversed(range(len(region.region))):
        if len(keep) < 2 and k not in keep:
            keep.append(k)
    a, b = sorted(keep)
    return a, b


def long_axes(region: Any) -> list[int]:
    """The axes of a region whose extent is not one."""
    return [k for k, r in enumerate(region.region) if constant_extent(r.extent) != 1]
