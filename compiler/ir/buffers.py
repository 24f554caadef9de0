"""Questions about the buffers of a program that several passes ask."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tilescale.compiler.ir.operations import effects_of, operations
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.tvm_compat import ir, structural_map, structural_walk, tirx


def buffer_uses(body: Any) -> dict[Any, int]:
    """How many times each buffer appears in a statement: in regions, loads, stores and as the base of a
    view."""
    count: dict[Any, int] = {}

    def add(buffer: Any) -> None:
        count[buffer] = count.get(buffer, 0) + 1

    structural_walk(body, ((ir.TensorRegion, ir.TensorLoad), lambda n: add(n.source)))
    structural_walk(body, (tirx.BufferStore, lambda s: add(s.buffer)))
    structural_walk(body, (tirx.DeclBuffer, lambda s: add(s.data.args[0])))
    return count


def written_buffers(program: TileProgram) -> set[Any]:
    """Buffers that a kernel may write, by the effect tables of its operations; writes through a view count
    for its base."""
    return _bases(program.func.body, stored(program.func.body))


def stored(body: Any) -> set[Any]:
    """What a statement may write, by the effect tables of its operations, views by their own names."""
    touched = _accessed(body, lambda mode: mode != "read")
    structural_walk(body, (tirx.BufferStore, lambda s: touched.add(s.buffer)))
    return touched


def read_buffers(body: Any) -> set[Any]:
    """Buffers that some statement may read, by the effect tables of operations; reads through a view count
    for its base."""
    touched = _accessed(body, lambda mode: mode != "write")
    structural_walk(body, (ir.TensorLoad, lambda e: touched.add(e.source)))
    return _bases(body, touched)


def bases(body: Any) -> dict[Any, Any]:
    """The buffer under each view that a statement declares."""
    over: dict[Any, Any] = {}
    structural_walk(body, (tirx.DeclBuffer, lambda s: over.__setitem__(s.buffer, s.data.args[0])))

    def base(buffer: Any) -> Any:
        while buffer in over:
            buffer = over[buffer]
        return buffer

    return {view: base(view) for view in over}


def views_of(body: Any) -> dict[Any, list[Any]]:
    """The views that a statement declares of each buffer, and of each view."""
    over: dict[Any, list[Any]] = {}
    structural_walk(body, (tirx.DeclBuffer, lambda s: over.setdefault(s.data.args[0], []).append(s.buffer)))
    return over


def redirected(s: Any, there: Mapping[Any, Any]) -> Any:
    """A statement with the accesses to some buffers directed to others of the same shape."""

    def load(e: Any) -> Any:
        return tirx.BufferLoad(there[e.source], list(e.indices)) if e.source in there else e

    def region(r: Any) -> Any:
        return tirx.BufferRegion(there[r.source], list(r.region)) if r.source in there else r

    def store(x: Any) -> Any:
        new = there.get(x.buffer)
        return x if new is None else tirx.BufferStore(new, x.value, list(x.indices), x.span)

    made = structural_map(s, (ir.TensorLoad, load))
    made = structural_map(made, (ir.TensorRegion, region))
    return structural_map(made, (tirx.BufferStore, store))


def _accessed(body: Any, wanted: Callable[[str], bool]) -> set[Any]:
    """What operations touch in such a mode."""
    return {
        access.region.source
        for call, op in operations(body)
        for access in effects_of(call)
        if wanted(access.mode)
    }


def _bases(body: Any, touched: set[Any]) -> set[Any]:
    """The buffers themselves, with the base of each view in its place."""
    of = bases(body)
    return {of.get(b, b) for b in touched}
