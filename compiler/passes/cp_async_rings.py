"""Rings whose copies run ahead of the loop that reads them: cp.async on sm_80 and later, where no producer
fills them by TMA."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.advice import reason
from tilescale.compiler.ir.operations import REGISTRY
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.layout.chunks import chunk, integer_names
from tilescale.compiler.layout.loops import bits_of, element_dtype
from tilescale.compiler.passes import annotated
from tilescale.compiler.passes import roles as splitting
from tilescale.compiler.passes.schedule import AHEAD, schedule


def copies_ahead(
    program: TileProgram, depth: int, gathers: bool = True
) -> tuple[TileProgram | None, str, Any]:
    """``(the program at the scheduled level, "", None)`` with at most ``depth`` stages; None, why not, and
    the place where some copy of a ring is none of cp.async's. ``gathers``: see `schedule`."""

    if depth < 2:
        return (
            None,
            reason("shared memory has no room for a second stage", "smaller tiles in shared memory"),
            program.launch,
        )
    made = schedule(program, depth=depth, ahead=True, gathers=gathers)
    plan = made.schedule
    if not any(r.form == AHEAD for r in plan.rings):
        return (
            None,
            plan.kept[0].reason if plan.kept else "no copy fills a ring",
            plan.kept[0] if plan.kept else None,
        )
    names = integer_names(made.func.body)
    params = {p.var for p in program.params}
    for call in splitting.calls(made.func.body):
        if not REGISTRY[call.op.name].fills or "bytes" in call.attrs:  # a gather's are known
            continue
        var = call.args[0].source
        if len(call.args) > 2 or var not in params or var.ty.storage_scope != "global":
            return None, f"{var.name} is no tensor of this rank alone", call
        if not chunk(call, names):
            what = (
                f"rows of {var.name}, or where its tiles begin, are not known to be multiples of 4 bytes "
                "of one dtype"
            )
            each = max(1, 32 // bits_of(var))
            hint = (
                f"tiles of {element_dtype(var)}, and T.dynamic(…, multiple_of={each}) or rows padded to "
                f"a multiple of {each} elements"
            )
            return None, reason(what, hint), call
    for var, layout, _ in annotated.of_rings(made):
        if not annotated.chunked(layout):
            return (
                None,
                f"T.annotate_layout puts the chunks of 16 bytes that {var.name} is copied in apart",
                program.launch,
            )
    return made, "", None
