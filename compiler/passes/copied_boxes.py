"""T.Parallel nests of pipelined loops that copy a box of a tensor into a shared tile: they are T.copy's where
a producer may fill the tile by TMA. (Where threads copy ahead, such a nest is a gather: gathers.py.)

Both read zero where the box lies outside of the tensor, touch the same elements, and are complete where they
stand (docs/LANGUAGE.md, "Outside", "Order"). What the tile program says of the nest has been checked and
simulated as the author wrote it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilescale.compiler.ir.operations import VOID
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.statements import sequence, statements
from tilescale.compiler.passes.copy_nests import box, copy_nest, keeps_places
from tilescale.compiler.passes.schedule import below_the_block
from tilescale.compiler.tvm_compat import ir, structural_map, tirx


def copied_boxes(program: TileProgram, able: Callable[[Any], bool]) -> TileProgram:
    """The program in which such nests are copies, those that are ``able`` to; itself where there are none. In
    loops of parts of the block nests are left as they are."""
    narrow = below_the_block(program.func.body)

    def visit(loop: Any) -> Any:
        notes = loop.annotations or {}
        if (
            str(notes.get("ts.kind", "")) != "pipelined"
            or int(notes.get("ts.num_stages", 0)) < 1
            or loop.loop_var in narrow
            or keeps_places(loop)
        ):
            return loop
        stmts = statements(loop.body)
        made = [_copied(s, able) or s for s in stmts]
        if all(a is b for a, b in zip(made, stmts, strict=True)):
            return loop
        body = sequence(made)
        return tirx.For(
            loop.loop_var, loop.min, loop.extent, loop.kind, body, annotations=dict(notes), span=loop.span
        )

    body = structural_map(program.func.body, (tirx.For, visit))
    return program if body.same_as(program.func.body) else program.with_body(body)


def _copied(s: Any, able: Callable[[Any], bool]) -> Any:
    """The T.copy that a statement is; None for any other."""
    nest = copy_nest(s)
    if nest is None or nest.condition is not None:
        return None
    frm, to = box(nest.at, nest.extents), box(nest.into, nest.extents)
    if frm is None or to is None or [hash(v) for v in frm[1]] != [hash(v) for v in to[1]]:
        return None
    attrs = {"executor": "block", "reach": "block"} | ({"width": nest.width} if nest.width else {})
    regions = [tirx.BufferRegion(nest.source, frm[0]), tirx.BufferRegion(nest.tile, to[0])]
    call = ir.Call("ts.copy", regions, attrs=attrs, ret_ty=VOID, span=s.span)
    return tirx.Evaluate(call, s.span) if able(call) else None
