"""Launches that end without flags: ``T.Kernel(…, awaited=True)``.

**Why nobody needs to hear that others have ended.** A launch of rank r is complete when every access aimed at
r is, so that what follows in r's stream may read and write its memory. Exits say that (include/ts/team.cuh,
step 3). Where each access aimed at r is a write that happens before the end of r's own blocks, r's own end
says it too: each such write is released by a signal, or comes before one, which a wait of r acquires. What is
left of the flags is the entry: nobody touches r in launch k + 1 before r has entered it, behind its end of
launch k, so behind its last wait and the zeroes of its counters.

A rank may be in launch k + 1 while another one is in launch k, with nothing left to aim at it. So whoever
looks at its entry may see a later one.

Reads of other ranks' memory and sums into it are refused: their owner could not await them. Packets need the
exchange of passes/packets.py, where otherwise exits keep a launch from writing over the last but one's.

The promise itself is judged where all of its executors and their clocks are known, in the simulator
(sim/awaited.py)."""

from __future__ import annotations

from tilescale.compiler.ir.operations import effects_of, operations
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.source import loc_of
from tilescale.errors import TileSyntaxError

_SENT = ("signal", "packets")


def awaited(program: TileProgram) -> TileProgram:
    """The program.

    Raises:
        TileSyntaxError: an access of another rank's memory that its owner cannot await.
    """
    if not program.launch.awaited:
        return program
    kinds = {p.var: getattr(p.spec, "kind", "tensor") for p in program.params}
    for call, op in operations(program.func.body):
        for a in effects_of(call):
            if a.owner is None or str(call.attrs["reach"]) != "device":
                continue
            sent = kinds.get(a.region.source) in _SENT
            if a.mode == "read" or (a.mode != "write" and not sent):
                does = "reads" if a.mode == "read" else "adds to"
                raise TileSyntaxError(
                    f"{op.written(call)} {does} another rank's memory in a T.Kernel with awaited=True",
                    loc=loc_of(call.span),
                    expected="writes with their signals: a rank cannot await what does not tell it",
                    hint="T.copy(…, dst=rank, signal=s[i]), or no awaited=True",
                )
    return program
