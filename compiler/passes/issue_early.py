"""Rings of two stages whose copies run ahead (prefetch.py): the next round's copies are issued in front of
the wait for this round's, so that both are under way while a block waits.

    wait(n); barrier; copies of n + 1; compute        becomes
    barrier; copies of n + 1; wait(n); barrier; compute

With latency L of a copy and C of a round's computation, a round takes max(C, L) the first way and
max(C, (L + C) / 2) the second: what L lies above C costs half. It has a barrier more, in front of copies into
the stage that the round before has read. Rings of more stages have several rounds' copies under way anyway,
and keep their one barrier.

Who sees what: the barrier in front says that all threads have read the stage of round n - 1, which is the one
that is filled. A thread's wait leaves the one group that it committed since under way, so its own copies of
round n have arrived; the barrier behind it (insert_barriers.py) tells all.
"""

from __future__ import annotations

from typing import Any

from tilescale.compiler.ir.operations import name_of
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.ops.fence import fence
from tilescale.compiler.passes.products import flat
from tilescale.compiler.passes.roles import calls
from tilescale.compiler.passes.schedule import AHEAD, read_by_engines
from tilescale.compiler.tvm_compat import structural_map, tirx


def issue_early(program: TileProgram) -> TileProgram:
    """The program with such loops."""
    by_engines = read_by_engines(program)
    rings = {
        r.number: r
        for r in program.schedule.rings
        if r.form == AHEAD and r.depth == 2 and not r.below and r.number not in by_engines
    }
    if not rings:
        return program

    def loop(s: Any) -> Any:
        stmts = flat(s.body)
        at = next((k for k, x in enumerate(stmts[:-1]) if _waits_for(x) in rings), None)
        if at is None or not _fills(stmts[at + 1], _waits_for(stmts[at])):
            return s
        wait, issued = stmts[at : at + 2]
        ring = rings[_waits_for(wait)]
        ring.early = True
        read = fence("block", f"ring {ring.number}: the stage of the round before has been read", wait.span)
        body = sequence([*stmts[:at], read, issued, wait, *stmts[at + 2 :]])
        return tirx.For(
            s.loop_var, s.min, s.extent, s.kind, body, annotations=dict(s.annotations), span=s.span
        )

    body = structural_map(program.func.body, (tirx.For, loop))
    return program if body.same_as(program.func.body) else program.with_body(body)


def _waits_for(s: Any) -> int:
    """The ring that a statement waits for; -1 for any other statement."""
    return int(s.value.attrs["ring"]) if name_of(s) == "ring_wait" else -1


def _fills(s: Any, ring: int) -> bool:
    """Whether a statement is the copies of a later round of a ring, where there is one."""
    return (
        isinstance(s, tirx.IfThenElse)
        and s.else_case is None
        and any(c.op.name == "ts.ring_commit" and int(c.attrs["ring"]) == ring for c in calls(s))
    )
