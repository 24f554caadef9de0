"""Questions about the buffers of a program that several passes ask."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.ops.base import find
from tilescale.compiler.tvm_compat import ir, structural_walk, tirx


def buffer_uses(body: Any) -> dict[Any, int]:
    """How many times each buffer appears in a statement: in regions, loads, stores and as the base of a view."""
    count: dict[Any, int] = {}

    def add(buffer: Any) -> None:
        count[buffer] = count.get(buffer, 0) + 1

    structural_walk(body, ((ir.TensorRegion, ir.TensorLoad), lambda n: add(n.source)))
    structural_walk(body, (tirx.BufferStore, lambda s: add(s.buffer)))
    structural_walk(body, (tirx.DeclBuffer, lambda s: add(s.data.args[0])))
    return count


def written_buffers(program: Any) -> set[Any]:
    """Buffers that a kernel may write, by the effect tables of its operations; writes through a view count for its base."""
    bases: dict[Any, Any] = {}
    structural_walk(program.func.body, (tirx.DeclBuffer, lambda s: bases.__setitem__(s.buffer, s.data.args[0])))
    touched: set[Any] = set()

    def note(buffer: Any) -> None:
        while buffer in bases:
            buffer = bases[buffer]
        touched.add(buffer)

    def look(call: Any) -> None:
        op = find(call)
        for access in op.effects(call) if op is not None else ():
            if access.mode != "read":
                note(access.region.source)

    structural_walk(program.func.body, (ir.Call, look))
    structural_walk(program.func.body, (tirx.BufferStore, lambda s: note(s.buffer)))
    return touched
