"""T.Parallel nests in one form: whoever asks how iterations lie among threads finds the whole nest.

A nest that is all of another one's body is part of it where each iteration writes elements of its own: else
the inner iterations, which a thread would run in turn, may add up or follow one another. A condition that
bounds a variable by a constant, around the whole body, is the extent of the loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tilescale.compiler.ir.nests import Element, accesses, loops_of
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.numeric import variables
from tilescale.compiler.ir.statements import sequence, statements
from tilescale.compiler.tvm_compat import same_expression, tirx

#: what a nest may say that is joined: any other annotation is about its own loops
PLAIN = {"ts.kind", "ts.depth"}


def joined(nest: Any) -> Any:
    """The statement of a T.Parallel nest with what is directly in it."""
    loops, body = _loops(nest)
    if not set(nest.annotations) <= PLAIN:
        return nest
    extents = [loop.extent for loop in loops]
    depth, inner = len(loops), body
    if _is_parallel(body) and set(body.annotations) <= PLAIN:
        more, inner = _loops(body)
        outer = {None, *(x.loop_var for x in loops)}  # None: memory that an extent reads
        if any(outer & variables(x.extent) for x in more):
            return nest
        if not _apart(inner, [x.loop_var for x in (*loops, *more)]):
            return nest
        loops, extents = [*loops, *more], [*extents, *(loop.extent for loop in more)]
    made, inner = _bounded(loops, extents, inner)
    if len(loops) == depth and inner is body:
        return nest
    for k in reversed(range(len(loops))):
        notes = {**({"ts.kind": "parallel"} if k == 0 else {}), "ts.depth": len(loops) - k}
        x = loops[k]
        inner = tirx.For(x.loop_var, x.min, made[k], x.kind, inner, annotations=notes, span=x.span)
    return inner


def _is_parallel(s: Any) -> bool:
    return isinstance(s, tirx.For) and s.kind == tirx.ForKind.PARALLEL


def _loops(nest: Any) -> tuple[list[Any], Any]:
    """The loops of a nest, the outermost first, and its body, without a sequence around one statement."""
    loops = loops_of(nest)
    only = statements(loops[-1].body)
    return loops, only[0] if len(only) == 1 else loops[-1].body


def _apart(body: Any, own: list[Any]) -> bool:
    """Whether an iteration writes what its variables name, and reads no other's results."""
    found = list(accesses(body))
    written = [a for a in found if a.mode != "read"]
    if any(not set(own) <= {v for e in a.indices for v in variables(e)} for a in written):
        return False
    return all(
        any(_same(a, w) for w in written if w.buffer.same_as(a.buffer))
        for a in found
        if a.mode == "read" and any(w.buffer.same_as(a.buffer) for w in written)
    )


def _same(a: Element, b: Element) -> bool:
    return len(a.indices) == len(b.indices) and all(map(same_expression, a.indices, b.indices))


def _bounded(loops: list[Any], extents: list[Any], body: Any) -> tuple[list[Any], Any]:
    """The extents of loops and their body, with the constant bounds around the body among the extents."""
    extents = list(extents)
    while isinstance(body, tirx.IfThenElse) and body.else_case is None:
        least: dict[int, int] = {}
        for bound in _bounds(body.condition, [x.loop_var for x in loops]):
            extent = None if bound is None else constant(extents[bound[0]])
            if bound is None or extent is None:
                return extents, body
            least[bound[0]] = min(bound[1], extent, least.get(bound[0], extent))
        for k, count in least.items():
            extents[k] = tirx.IntImm(str(loops[k].loop_var.ty), count)
        body = sequence(statements(body.then_case))
    return extents, body


def _bounds(condition: Any, own: list[Any]) -> Iterator[tuple[int, int] | None]:
    """For each part of a condition: which of the loops it bounds, and by how much; None for any other."""
    if isinstance(condition, tirx.And):
        yield from _bounds(condition.a, own)
        yield from _bounds(condition.b, own)
        return
    at = (
        next((k for k, v in enumerate(own) if v.same_as(condition.a)), None)
        if isinstance(condition, tirx.LT)
        else None
    )
    count = constant(condition.b) if at is not None else None
    yield (at, count) if at is not None and count is not None and count > 0 else None
