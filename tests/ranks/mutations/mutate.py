"""Mutants of a kernel: each wait, signal and meeting of its tile IR deleted, or moved over one statement of
its block; each wait that counts one fewer.

    for mutant in mutants(kernel):
        report = check(mutant.program, ...)

The tile IR is that which the simulator runs: collectives are written out, so that the meetings which they are
made of are mutated as well. A put's signal (``T.copy(…, signal=s[i])``) is a statement behind the copy:
deleted, in front of the copy, behind what follows. A collective as a whole is moved and not deleted, which
would be another computation and no other order.

Moved over one statement means over one that others can notice. What touches nothing but the block's own
tiles, parameters that the kernel never writes, or results that it never reads commutes with any wait and
signal: it is crossed on the way and counts for nothing. A statement is never moved over the definition of a
name that it uses, nor out of its block of statements; one that stands alone under a branch or in a loop moves
together with that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tilescale.compiler.ir.buffers import read_buffers, written_buffers
from tilescale.compiler.ir.operations import VOID, find
from tilescale.compiler.ir.source import loc_of
from tilescale.compiler.ops.collective import _Collective
from tilescale.compiler.passes.pipeline import tile_level
from tilescale.compiler.tvm_compat import ir, structural_map, structural_walk, tirx

SYNCHRONISES = {"wait": "wait", "signal": "signal", "barrier": "barrier", "team_sync": "meeting"}


@dataclass(frozen=True)
class Mutant:
    """A program with one fault. ``what``: deleted, moved up, moved down or one fewer; ``statement``: the
    operation and its line's text."""

    program: Any
    what: str
    statement: str
    line: int

    def __str__(self) -> str:
        return f"{self.statement}: {self.what}"


def mutants(kernel: Any) -> list[Mutant]:
    """All of them, in program order."""
    traced = kernel.trace() if hasattr(kernel, "trace") else kernel
    collectives = [m for m in _Mutations(traced).all() if m.statement.startswith("collective ")]
    made: dict[str, Mutant] = {}
    for m in (*collectives, *_Mutations(tile_level(traced)).all()):
        again = sum(
            other.statement.split(" (again")[0] == m.statement and other.what == m.what
            for other in made.values()
        )
        m = replace(m, statement=m.statement + f" (again {again})") if again else m
        made[str(m)] = m
    return list(made.values())


class _Mutations:
    def __init__(self, program: Any):
        self.program, self.body = program, program.func.body
        self.meetings: dict[int, list[Any]] = {}
        written, read = written_buffers(program), read_buffers(self.body)
        memory = [p for p in program.params if hasattr(p.spec, "shape") and p.var in written]
        self.noticed = {p.var for p in memory if p.spec.kind != "tensor" or p.var in read}
        self.tiles_too = _shares_tiles(program)

    def all(self) -> Iterator[Mutant]:
        blocks: list[Any] = []
        structural_walk(self.body, (tirx.SeqStmt, blocks.append))
        inside = {s for block in blocks for s in block.seq}
        alone: list[Any] = []
        structural_walk(self.body, (tirx.Evaluate, lambda s: alone.append(s) if s not in inside else None))
        for block in blocks:
            for k, s in enumerate(block.seq):
                yield from self._of(block, list(block.seq), k, s)
        for s in alone:
            yield from self._changed(s, [s], 0, s)

    def _of(self, block: Any, seq: list[Any], k: int, s: Any) -> Iterator[Mutant]:
        unit = _only(s)
        if unit is s:
            yield from self._changed(block, seq, k, s)
        elif (op := _operation(unit)) is not None and op.name in SYNCHRONISES:
            yield from self._moved(block, seq, k, s, unit)

    def _changed(self, block: Any, seq: list[Any], k: int, s: Any) -> Iterator[Mutant]:
        op = _operation(s)
        if op is None:
            return
        if op.name in SYNCHRONISES:
            yield self._made(block, [*seq[:k], *seq[k + 1 :]], "deleted", s)
            yield from self._moved(block, seq, k, s, s)
            if op.name == "wait":
                yield self._made(block, [*seq[:k], _fewer(s), *seq[k + 1 :]], "one fewer", s)
        elif isinstance(op, _Collective):
            yield from self._moved(block, seq, k, s, s)
        elif op.name == "remote_copy" and len(s.value.args) > 3:
            copy, signal = _apart(s)
            yield self._made(block, [*seq[:k], copy, *seq[k + 1 :]], "deleted", s)
            yield self._made(block, [*seq[:k], signal, copy, *seq[k + 1 :]], "moved up", s)
            behind = self._over(seq[k + 1 :], signal)
            if behind:
                yield self._made(
                    block,
                    [*seq[:k], copy, *seq[k + 1 : k + 1 + behind], signal, *seq[k + 1 + behind :]],
                    "moved down",
                    s,
                )

    def _moved(self, block: Any, seq: list[Any], k: int, s: Any, of: Any) -> Iterator[Mutant]:
        before, after = seq[:k], seq[k + 1 :]
        up = self._over(before[::-1], s)
        if up:
            yield self._made(block, [*before[:-up], s, *before[-up:], *after], "moved up", of)
        down = self._over(after, s)
        if down:
            yield self._made(block, [*before, *after[:down], s, *after[down:]], "moved down", of)

    def _over(self, others: list[Any], s: Any) -> int:
        """How many statements lie up to and with the first that others can notice; 0 where there is none, or
        ``s`` cannot pass."""
        used: set[Any] = set()
        structural_walk(s, (ir.Var, used.add))
        for count, other in enumerate(others, 1):
            made = other.var if isinstance(other, tirx.Bind) else getattr(other, "buffer", None)
            if made in used and not isinstance(other, tirx.BufferStore):
                return 0
            if self._noticed(other):
                return count
        return 0

    def _noticed(self, s: Any) -> bool:
        found: list[Any] = []

        def touch(buffer: Any) -> None:
            scope = buffer.ty.storage_scope
            if buffer in self.noticed or self.tiles_too and scope.startswith("shared"):
                found.append(buffer)

        def call(c: Any) -> None:
            op = find(c)
            if op is not None and (op.waits or op.name == "signal"):
                found.append(op)

        structural_walk(s, ((ir.TensorRegion, ir.TensorLoad), lambda n: touch(n.source)))
        structural_walk(s, (tirx.BufferStore, lambda n: touch(n.buffer)))
        structural_walk(s, (ir.Call, call))
        return bool(found)

    def _made(self, block: Any, seq: list[Any], what: str, s: Any) -> Mutant:
        new = tirx.SeqStmt(seq) if len(seq) > 1 else seq[0] if seq else tirx.Evaluate(tirx.IntImm("int32", 0))
        body = structural_map(self.body, (type(block), lambda b: new if b.same_as(block) else b))
        op, loc = find(s.value), loc_of(s.span) or loc_of(s.value.span)
        assert op is not None and loc is not None
        text = loc.excerpt().split("|")[1].split("#")[0].strip()
        name = SYNCHRONISES.get(op.name, "collective" if isinstance(op, _Collective) else "signal of")
        if op.name == "team_sync":  # a collective has several, all at its line
            same = self.meetings.setdefault(loc.line, [])
            if all(other is not s for other in same):
                same.append(s)
            name += f" {next(k for k, other in enumerate(same, 1) if other is s)} of"
        return Mutant(self.program.with_body(body), what, f"{name} {text}", loc.line)


def _operation(s: Any) -> Any:
    return find(s.value) if isinstance(s, tirx.Evaluate) else None


def _only(s: Any) -> Any:
    """The one statement that a branch or a loop is made of; otherwise the statement itself."""
    inner = s
    while (
        isinstance(inner, (tirx.For, tirx.AttrStmt))
        or isinstance(inner, tirx.IfThenElse)
        and inner.else_case is None
    ):
        inner = inner.then_case if isinstance(inner, tirx.IfThenElse) else inner.body
    return inner if _operation(inner) is not None else s


def _apart(s: Any) -> tuple[Any, Any]:
    """A put with its signal as two statements."""
    call = s.value
    attrs = {key: call.attrs[key] for key in call.attrs.keys()}
    plain = {key: value for key, value in attrs.items() if key != "signal_op"}
    copy = ir.Call(call.op, list(call.args)[:3], attrs=plain, ret_ty=VOID, span=call.span)
    where = {key: attrs[key] for key in ("executor", "reach")}
    args = [call.args[3], call.args[4], call.args[2]]
    signal = ir.Call(
        "ts.signal", args, attrs={**where, "op": attrs["signal_op"]}, ret_ty=VOID, span=call.span
    )
    return tirx.Evaluate(copy, s.span), tirx.Evaluate(signal, s.span)


def _fewer(s: Any) -> Any:
    """A wait that asks for one less than it should."""
    call = s.value
    flag, value = call.args
    less = ir.Call(
        call.op,
        [flag, value - 1],
        attrs={key: call.attrs[key] for key in call.attrs.keys()},
        ret_ty=VOID,
        span=call.span,
    )
    return tirx.Evaluate(less, s.span)


def _shares_tiles(program: Any) -> bool:
    """Whether executors share tiles: warps of a block, blocks of a cluster."""
    found: list[Any] = []
    structural_walk(
        program.func.body, (tirx.AttrStmt, lambda s: found.append(s) if s.attr_key == "ts.scale" else None)
    )
    return any(n > 1 for n in program.launch.cluster) or any(int(s.value.value) < 3 for s in found)
