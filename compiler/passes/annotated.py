"""What T.annotate_layout fixes, where copies and products ask for layouts of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tilescale.compiler.advice import reason
from tilescale.compiler.ir.lowerings import lowering
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.layout import Fragment, Shared
from tilescale.compiler.layout.loops import bits_of
from tilescale.compiler.layout.products import wgmma_fragments
from tilescale.compiler.layout.shared import CHUNK_BYTES, boxed, strided, widest_swizzle
from tilescale.compiler.passes import roles as splitting


def layouts(program: TileProgram) -> Iterator[tuple[Any, Any, Any]]:
    """Each annotated tile as the program has it now, its layout, and where that was annotated: a tile that
    became a ring keeps its layout in every stage."""
    stages = program.schedule.stages if program.schedule is not None else {}
    for var, (layout, loc) in program.hints.get("layouts", {}).items():
        shape = [int(e) for e in var.ty.shape]
        ring = next(
            (s for s in stages if s.name == var.name and [int(e) for e in s.ty.shape[1:]] == shape), None
        )
        if isinstance(layout, Shared) and ring is not None:
            var, layout = ring, layout.staged(int(ring.ty.shape[0]))
        yield var, layout, loc


def of_rings(program: TileProgram) -> Iterator[tuple[Any, Shared, Any]]:
    """Those of rings' tiles."""
    for var, layout, loc in layouts(program):
        if var in program.schedule.ring_of:
            yield var, layout, loc


def unfit(program: TileProgram) -> tuple[str, Any] | None:
    """Why TMA and wgmma cannot work on tiles as they were laid, and where; None where they can."""

    if not program.hints.get("layouts"):
        return None
    asked: dict[Any, list[Any]] = {}
    for var in program.schedule.ring_of:
        stages, *shape = (int(e) for e in var.ty.shape)
        if len(shape) == 1:  # a row, which has no swizzle
            asked[var] = [strided((stages, *shape), bits_of(var))]
        else:
            asked[var] = [
                boxed(tuple(shape), bits_of(var), widest_swizzle(shape[-1], bits_of(var))).staged(stages)
            ]
    for call in splitting.calls(program.func.body):
        if call.op.name not in ("ts.gemm", "ts.wgmma"):
            continue
        for var, layout in lowering(call, program.target).shared_layouts(call).items():
            asked.setdefault(var, [layout])
        asked[call.args[2].source] = [f for f, *_ in wgmma_fragments(call, program.launch.threads)]
        asked.setdefault(call.args[0].source, [])
    for var, layout, loc in layouts(program):
        if var in asked and layout not in asked[var]:
            what = "wgmma takes" if isinstance(layout, Fragment) else "TMA writes and wgmma reads"
            why = f"T.annotate_layout gives {var.name} another layout than {what}"
            return reason(why, f"{var.name} left out of T.annotate_layout"), loc
    return None


def chunked(layout: Shared) -> bool:
    """Whether every aligned chunk of 16 bytes of a row lies in one piece, aligned."""
    last, each = len(layout.shape) - 1, CHUNK_BYTES * 8 // layout.bits
    first = next((p for p in layout.pieces if p.axis == last and p.unit == 1), None)
    others = all(p.stride % each == 0 for p in layout.pieces if p is not first)
    return first is not None and layout.vector(last) % each == 0 and others
