"""A second stage for loops that ask for one, where the grid has no more blocks than a GPU has multiprocessors
and shared memory has room: no other block could use that room, and the next round's copies need not wait
until this round's tiles have been read.

Each multiprocessor has at most one such block, so what bounds it is how long a round takes. With one stage
that is a copy's latency and what is computed behind it; with two it is the longer one of them. The order of
arithmetic is the same."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.rewrite import around
from tilescale.compiler.ir.statements import statements
from tilescale.compiler.layout.loops import bits_of, in_registers
from tilescale.compiler.passes.copy_nests import keeps_places
from tilescale.compiler.passes.filled import filled_tile
from tilescale.compiler.passes.residency import SMS
from tilescale.compiler.passes.roles import calls
from tilescale.compiler.passes.room import BESIDE, tile_bytes
from tilescale.compiler.tvm_compat import structural_map, structural_walk, tirx

#: stages of such a loop
SPARE = 2


def spare_stages(program: TileProgram) -> TileProgram:
    """The program, whose loops of one stage have two; as it is where the grid is larger, or known only at the
    launch, or memory is short."""
    grid = program.launch.grid
    if not all(isinstance(e, int) for e in grid) or prod(grid) > SMS:
        return program
    loops: list[Any] = []
    structural_walk(program.func.body, (tirx.For, lambda f: loops.append(f) if _asks_for_one(f) else None))
    tiles = {b for f in loops for b in map(filled_tile, statements(f.body)) if b is not None}
    sizes = tile_bytes(program)
    room = program.target.shared_bytes - BESIDE - sum(sizes.values()) - _results(program)
    if not tiles or sum(sizes[b] for b in tiles) > room:
        return program

    def more(f: Any) -> Any:
        if not _asks_for_one(f):
            return f
        return around(f, f.body, {"ts.num_stages": tirx.IntImm("int32", SPARE)})

    made = program.with_body(structural_map(program.func.body, (tirx.For, more)))
    return replace(made, hints=made.hints | {"spare_stages": True})


def _asks_for_one(loop: Any) -> bool:
    notes = loop.annotations or {}
    one = str(notes.get("ts.kind", "")) == "pipelined" and int(notes.get("ts.num_stages", 0)) == 1
    return one and not keeps_places(loop)


def _results(program: TileProgram) -> int:
    """The bytes that results take in shared memory on their way to tensors (tma_stores.py)."""
    return sum(
        prod(int(e) for e in c.args[0].source.ty.shape) * bits_of(c.args[1].source) // 8
        for c in calls(program.func.body)
        if c.op.name == "ts.copy" and in_registers(c.args[0].source) and not in_registers(c.args[1].source)
    )
