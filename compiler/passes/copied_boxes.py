"""T.Parallel nests of pipelined loops that copy a box of a tensor into a shared tile: they are T.copy's.

Both read zero where the box lies outside of the tensor, touch the same elements, and are complete where they
stand (docs/LANGUAGE.md, "Outside", "Order"); as a T.copy the nest may fill a ring, by TMA where that can.
What the tile program says of it has been checked and simulated as the author wrote it.
"""

from __future__ import annotations

from typing import Any

from tilescale.compiler.ir.operations import VOID
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.statements import sequence, statements
from tilescale.compiler.passes.copy_nests import box, copy_nest
from tilescale.compiler.passes.roles import calls
from tilescale.compiler.passes.schedule import below_the_block
from tilescale.compiler.tvm_compat import ir, structural_map, tirx


def copied_boxes(program: TileProgram) -> TileProgram:
    """The program in which such nests are copies. In loops of parts of the block, and in those whose author
    keeps copies in their places, nests are left as they are."""
    params = {p.var for p in program.params}
    narrow = below_the_block(program.func.body)

    def visit(loop: Any) -> Any:
        notes = loop.annotations or {}
        if (
            str(notes.get("ts.kind", "")) != "pipelined"
            or int(notes.get("ts.num_stages", 0)) < 1
            or loop.loop_var in narrow
            or any("pinned" in (c.attrs or {}) for c in calls(loop.body))
        ):
            return loop
        stmts = statements(loop.body)
        made = [_copied(s, params) or s for s in stmts]
        if all(a is b for a, b in zip(made, stmts, strict=True)):
            return loop
        return tirx.For(
            loop.loop_var,
            loop.min,
            loop.extent,
            loop.kind,
            sequence(made),
            annotations=dict(notes),
            span=loop.span,
        )

    body = structural_map(program.func.body, (tirx.For, visit))
    return program if body.same_as(program.func.body) else program.with_body(body)


def _copied(s: Any, params: set[Any]) -> Any:
    """The T.copy that a statement is; None for any other."""
    nest = copy_nest(s)
    if nest is None or nest.condition is not None or nest.source not in params:
        return None
    frm, to = box(nest.at, nest.extents), box(nest.into, nest.extents)
    if frm is None or to is None or [hash(v) for v in frm[1]] != [hash(v) for v in to[1]]:
        return None
    attrs = {"executor": "block", "reach": "block"} | ({"width": nest.width} if nest.width else {})
    regions = [tirx.BufferRegion(nest.source, frm[0]), tirx.BufferRegion(nest.tile, to[0])]
    return tirx.Evaluate(ir.Call("ts.copy", regions, attrs=attrs, ret_ty=VOID, span=s.span), s.span)
