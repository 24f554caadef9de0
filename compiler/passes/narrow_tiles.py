"""Tiles into which copies of a pipelined loop widen a tensor's numbers take the tensor's dtype, and are
widened where they are read. Each number is the same: the wider dtype has all of the narrower one's.

Engines copy bytes, so a copy that widens is the threads' own, awaited in each round; one that does not may
run ahead. And the tile takes half of the memory, or a quarter."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.ir.buffers import buffer_uses
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.statements import statements
from tilescale.compiler.layout.loops import element_dtype
from tilescale.compiler.passes.filled import filled_tile
from tilescale.compiler.tvm_compat import ir, structural_map, structural_walk, tirx

#: dtype → those of which it has every number
WIDENED = {"float32": ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")}


def narrow_tiles(program: TileProgram) -> TileProgram:
    """The program with such tiles: shared ones that copies of whole tiles alone write, some of them in a
    pipelined loop, and copies or expressions read."""
    body = program.func.body
    filled: dict[Any, list[Any]] = {}
    wanted: set[Any] = set()

    def look(loop: Any) -> None:
        notes = loop.annotations or {}
        if str(notes.get("ts.kind", "")) == "pipelined" and int(notes.get("ts.num_stages", 0)) > 0:
            wanted.update(b for b in map(filled_tile, statements(loop.body)) if b is not None)

    def fill(s: Any) -> None:
        if (tile := filled_tile(s)) is not None:
            filled.setdefault(tile, []).append(s.value)

    structural_walk(body, (tirx.For, look))
    structural_walk(body, (tirx.Evaluate, fill))
    uses, reads = buffer_uses(body), _reads(body)
    narrowed: dict[Any, Any] = {}
    for tile in wanted - set(program.hints.get("layouts", {})):
        copies = filled[tile]
        narrow = {element_dtype(c.args[0].source) for c in copies}
        if len(narrow) != 1 or not narrow <= set(WIDENED.get(element_dtype(tile), ())):
            continue
        if len(copies) + reads.get(tile, 0) == uses[tile] and all(len(c.args) == 2 for c in copies):
            narrowed[tile] = tirx.decl_buffer(
                tuple(tile.ty.shape), narrow.pop(), tile.name, scope="shared", data_alignment=64, layout=None
            )
    return program.with_body(_with(body, narrowed)) if narrowed else program


def _reads(body: Any) -> dict[Any, int]:
    """How many times a buffer is a copy's source, or read by an expression."""
    found: dict[Any, int] = {}

    def add(buffer: Any) -> None:
        found[buffer] = found.get(buffer, 0) + 1

    structural_walk(body, (ir.Call, lambda c: add(c.args[0].source) if c.op.name == "ts.copy" else None))
    structural_walk(body, (ir.TensorLoad, lambda e: add(e.source)))
    return found


def _with(body: Any, narrowed: dict[Any, Any]) -> Any:
    def region(r: Any) -> Any:
        return tirx.BufferRegion(narrowed[r.source], list(r.region)) if r.source in narrowed else r

    def load(e: Any) -> Any:
        if e.source not in narrowed:
            return e
        return tirx.Cast(element_dtype(e.source), tirx.BufferLoad(narrowed[e.source], list(e.indices)))

    def allocated(s: Any) -> Any:
        return tirx.AllocBuffer(narrowed[s.buffer], {}, s.span) if s.buffer in narrowed else s

    body = structural_map(structural_map(body, (ir.TensorRegion, region)), (ir.TensorLoad, load))
    return structural_map(body, (tirx.AllocBuffer, allocated))
