"""Where a loop awaits what TMA still reads of the round before (passes/tma_stores.py): in front of a barrier
that there is anyway."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.ir.nests import nest_of
from tilescale.compiler.ir.operations import name_of
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.passes.products import flat, has_producer, touched
from tilescale.compiler.passes.roles import calls
from tilescale.compiler.tvm_compat import structural_map, tirx


def hoist_store_waits(program: TileProgram) -> TileProgram:
    """The program, whose loops of that form await their stores early."""
    tile_at = {"ts.tma_store": 0, "ts.tma_reduce": 1}
    staged = {c.args[tile_at[c.op.name]].source for c in calls(program.func.body) if c.op.name in tile_at}
    if not has_producer(program) or not staged:
        return program
    return program.with_body(structural_map(program.func.body, (tirx.For, lambda f: _hoisted(f, staged))))


def _hoisted(loop: Any, staged: set[Any]) -> Any:
    """A loop whose stores of a round before are awaited in front of what threads write to shared memory last
    before this round's, and of the barrier with its readers: that one then orders TMA's reads before the next
    writes of their tile too, which need none of their own. Where the last such write stands behind the
    stores, in the round before, the first round's wait is in front of the loop."""
    if not isinstance(loop.body, tirx.SeqStmt) or nest_of(loop) is not None:
        return loop
    stmts, outside = flat(loop.body), []
    for s in list(stmts):
        tile = (
            s.value.args[0].source
            if name_of(s) == "await_stores" and not int(s.value.attrs["complete"])
            else None
        )
        if (
            tile not in staged
            or sum(name_of(x) == "await_stores" and x.value.args[0].source.same_as(tile) for x in stmts) > 1
        ):
            continue
        k = stmts.index(s)
        end = next(i for i in reversed(range(len(stmts))) if _uses(stmts[i], tile)) + 1
        turned = stmts[end:] + stmts[:k]  # from the last use of the tile to the next
        for at in reversed(range(len(turned))):
            written = {b for b in touched(turned[at])[1] if b.ty.storage_scope == "shared"}
            if written and any(written & touched(x)[0] for x in turned[at + 1 :]):
                place = turned[at]
                break
        else:
            continue
        if any(x is place for x in stmts[end:]):
            outside.append(s)
        stmts = [x for x in stmts if x is not s]
        stmts.insert(next(i for i, x in enumerate(stmts) if x is place), s)
    made = sequence(stmts)
    notes = dict(loop.annotations or {})
    return sequence(
        [
            *outside,
            tirx.For(
                loop.loop_var, loop.min, loop.extent, loop.kind, made, annotations=notes, span=loop.span
            ),
        ]
    )


def _uses(s: Any, buffer: Any) -> bool:
    return any(buffer in found for found in touched(s))
