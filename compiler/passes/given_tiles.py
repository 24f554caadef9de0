"""Tiles of shared memory that the kernel's author fills and copies to a tensor, or adds to one (T.atomic_add
of a whole tile): TMA reads them where they lie (passes/tma_stores.py), one thread's instruction for what all
threads would read back and store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilescale.compiler.ir.nests import nest_of
from tilescale.compiler.ir.operations import name_of
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.scales import Executor
from tilescale.compiler.ir.walks import scalar_reads, walk
from tilescale.compiler.ops.tma import await_stores
from tilescale.compiler.passes.products import touched
from tilescale.compiler.passes.stage_operands import whole
from tilescale.compiler.tvm_compat import ir, structural_walk, tirx


def given(
    program: TileProgram,
    statements: list[tuple[Any, Executor]],
    parts: list[Any],
    leaves: Callable[[Any], bool],
) -> dict[Any, Any]:
    """Copies and updates from such tiles → the tile. All else that touches one are the block's threads that
    fill it. ``leaves``: whether TMA can make such a call. ``parts``: the consumer's statements. A tile that
    is allocated inside one of them has its bytes for a part of a round alone, and TMA may read longer."""
    found: dict[Any, Any] = {}
    for s, _ in statements:
        if name_of(s) in ("atomic", "copy") and isinstance(s, tirx.Evaluate) and leaves(s.value):
            found[s] = s.value.args[int(name_of(s) == "atomic")].source
    tiles = set(found.values())
    structural_walk(program.func.body, (tirx.DeclBuffer, lambda s: tiles.discard(s.data.args[0])))
    rings = program.schedule.ring_of if program.schedule is not None else {}
    tiles -= {t for t in tiles if t in rings or t in program.hints.get("layouts", {})}
    for part in parts:
        if not isinstance(part, tirx.AllocBuffer):
            structural_walk(part, (tirx.AllocBuffer, lambda s: tiles.discard(s.buffer)))
    for s, ex in statements:
        if s in found:
            continue
        read, written = own_touches(s)
        fills = ex.name == "block" and (nest_of(s) is not None or name_of(s) in ("copy", "fill"))
        tiles -= read if fills else read | written
    return {s: tile for s, tile in found.items() if tile in tiles}


def own_touches(s: Any) -> tuple[set[Any], set[Any]]:
    """What a statement reads and writes, of a loop or an If its own."""
    if isinstance(s, (tirx.For, tirx.While, tirx.IfThenElse)) and nest_of(s) is None:
        return {r.buffer for r in scalar_reads(s)}, set()
    return touched(s)


def awaited(parts: list[Any], stores: dict[Any, Any]) -> tuple[list[Any], dict[Any, Any]]:
    """The consumer's statements with the waits behind those in which TMA reads such tiles: other tiles may
    take their bytes then. And what fills a tile in a loop that gives it, in front of which a wait has to
    stand."""
    made: list[Any] = []
    refilled: dict[Any, Any] = {}
    for part in parts:
        inside = [s for s, _ in walk(part, Executor("block", 1))]
        read = {stores[s]: s for s in inside if s in stores}
        made += [part, *(await_stores(whole(tile), s.span) for tile, s in read.items())]
        if len(inside) > 1:
            refilled |= {s: tile for tile in read for s in inside if tile in own_touches(s)[1]}
    return made, refilled


def is_shared_tile(region: Any) -> bool:
    return isinstance(region, ir.TensorRegion) and region.source.ty.storage_scope == "shared"
