"""What passes ask of statements about products."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.ir.nests import nest_of
from tilescale.compiler.ir.operations import effects_of, find
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ops.wgmma import FREE
from tilescale.compiler.passes.roles import calls
from tilescale.compiler.tvm_compat import ir, structural_walk, tirx


def is_product(s: Any) -> bool:
    """Whether a statement is a product that has to be awaited."""
    op = find(s.value) if isinstance(s, tirx.Evaluate) else None
    return (
        op is not None
        and op.multiplies
        and "pending" in op.attributes
        and int(s.value.attrs["pending"]) == FREE
    )


def operands_of(call: Any) -> list[Any]:
    """What a product reads beside its accumulator."""
    return [*call.args[:2], *call.args[4:]]


def flat(s: Any) -> list[Any]:
    """The statements of a sequence, those of sequences in it among them, without those that do nothing."""
    if isinstance(s, tirx.SeqStmt):
        return [x for inner in s.seq for x in flat(inner)]
    return [] if isinstance(s, tirx.Evaluate) and isinstance(s.value, tirx.IntImm) else [s]


def touched(s: Any) -> tuple[set[Any], set[Any]]:
    """Buffers that a statement reads, and those that it writes."""
    read: set[Any] = set()
    written: set[Any] = set()
    nest = nest_of(s)
    if nest is not None:
        for e in nest.accesses:
            (read if e.mode == "read" else written).add(e.buffer)
        return read, written
    structural_walk(s, (ir.TensorLoad, lambda x: read.add(x.source)))
    structural_walk(s, (tirx.BufferStore, lambda x: written.add(x.buffer)))
    for call in calls(s):
        for a in effects_of(call):
            (read if a.mode == "read" else written).add(a.region.source)
    return read, written


def has_producer(program: TileProgram) -> bool:
    """Whether a producer fills a program's rings: only then its products run beside the consumers."""
    return program.schedule is not None and len(program.schedule.roles) > 1
