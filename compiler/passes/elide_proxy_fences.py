"""Which releases of a ring's stage need a proxy fence of their own.

What threads read of a stage themselves is of another proxy than TMA's next write of it (PTX ISA 9.0,
"Proxies"), so each thread puts a proxy fence between its reads and its warp's arrival. That fence waits for
all that the thread has under way in shared memory. Where every thread has made one anyway since those reads,
in front of a barrier or of another release, the arrival needs none: a fence orders all accesses before it,
whatever it was put there for.

Only what stands in one sequence is looked at: at its head, of a loop's body among them, everything counts as
read since. But of a ring that loops share, a stage that products alone have read between its round's wait and
its release needs no fence either: what threads read of other rounds lies in front of those rounds' releases.
"""

from __future__ import annotations

from typing import Any

from tilescale.compiler.ir.operations import effects_of, find, name_of, operations
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.passes.products import flat
from tilescale.compiler.passes.stage_operands import again
from tilescale.compiler.tvm_compat import ir, structural_map, structural_walk, tirx


def read_by_threads(node: Any, ring_of: dict[Any, int]) -> set[int]:
    """The numbers of the rings whose tiles threads read in a statement: element by element, or by operations
    that no engine does, as their effects say."""
    loads: list[Any] = []
    structural_walk(node, (ir.TensorLoad, loads.append))
    touched = [
        a
        for c, op in operations(node)
        if not op.completes
        for a in effects_of(c)
        if a.mode == "read" and a.proxy != "async"
    ]
    return {
        ring_of[b] for b in (*(e.source for e in loads), *(a.region.source for a in touched)) if b in ring_of
    }


def elide_proxy_fences(program: TileProgram) -> TileProgram:
    """The program, whose releases behind a proxy fence of all threads say so."""
    plan = program.schedule
    if plan is None or len(plan.roles) < 2:
        return program
    every = read_by_threads(program.func.body, plan.ring_of)
    if not every:
        return program

    def order(s: Any) -> Any:
        return sequence(_marked(flat(s), every, plan.ring_of))

    return program.with_body(structural_map(program.func.body, (tirx.SeqStmt, order)))


def _marked(stmts: list[Any], every: set[int], ring_of: dict[Any, int]) -> list[Any]:
    out, read = [], set(every)
    multiplied = _multiplied(stmts, ring_of)
    for s in stmts:
        multiplied |= _multiplied(flat(s.body), ring_of) if isinstance(s, tirx.For) else set()
        if name_of(s) == "sync" and str(s.value.attrs["scope"]) == "block" and int(s.value.attrs["proxy"]):
            read = set()
        elif name_of(s) == "ring_release":
            if int(s.value.attrs["ring"]) in every & multiplied:
                s = again(s.value, list(s.value.args), {"fenced": 1})
            elif int(s.value.attrs["ring"]) in read:
                read = set()  # behind its own fence
            elif int(s.value.attrs["ring"]) in every:
                s = again(s.value, list(s.value.args), {"fenced": 1})
        elif not isinstance(s, tirx.Evaluate) or find(s.value) is not None:
            read |= read_by_threads(s, ring_of)
        out.append(s)
    return out


def _multiplied(stmts: list[Any], ring_of: dict[Any, int]) -> set[int]:
    """The rings that a sequence awaits itself, and of which no thread reads anything there: only products do.
    The release behind such a loop is that of its last round (passes/release_late.py)."""
    awaited = {int(s.value.attrs["ring"]) for s in stmts if name_of(s) == "ring_wait"}
    return awaited - {n for s in stmts for n in read_by_threads(s, ring_of)}
