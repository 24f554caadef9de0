"""Stages of what warpgroups hand over by themselves: ``T.Pipelined(…, num_stages=n)`` around ``T.ws``.

    for k in T.Pipelined(rounds, num_stages=2):
        with T.ws(1):
            T.barrier_wait(done, (k + 1) % 2)
            T.tma_copy(A[…, k], tile, barrier=ready)
            T.barrier_arrive(ready)
        with T.ws(0):
            T.barrier_wait(ready, k % 2)
            T.gemm(tile, …)
            T.barrier_arrive(done)

As it is written, one tile goes to and fro: the copy of round k waits for the product of round k - 1. With n
stages a tile and its barriers are there n times, round k has those of number k mod n, and the copy waits for
the product of round k - n. Every wait names the phase of its barrier by the round, so it is rewritten by the
same rule: a barrier of n has a phase each n rounds, k // n is its number.

That is the same program where nothing but the tiles and barriers in question is handed over in the loop: each
phase is one round's; each tile is written by T.tma_copy in whole, once a round, and touched by others behind
a wait for that round's copy; nobody touches tiles or barriers outside of the loop, which writes no other
memory that it reads; and no loop around it runs it again, when barriers would be in the phases where the
rounds before have left them. A loop of another form stays as it is written, and so does one whose stages
would not fit into shared memory.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from tilescale.compiler.builder import state as bld
from tilescale.compiler.frontend.groups import MARK
from tilescale.compiler.ir import numeric
from tilescale.compiler.ir.buffers import bases, buffer_uses, read_buffers, stored
from tilescale.compiler.ir.operations import effects_of, find, operations
from tilescale.compiler.ir.scales import WARPGROUP
from tilescale.compiler.ir.statements import statements
from tilescale.compiler.tvm_compat import ir, structural_map, structural_walk, tirx
from tilescale.language.dtypes import BITS

#: bytes of shared memory that a block has at most, on the GPUs that copy so (sm_90: 227 KB)
ROOM = 227 * 1024
#: rounds of which the phases are looked at: they repeat after two
_ROUNDS = np.arange(4)
_BARRIER, _TILE = "shared.barrier", "shared"
WAIT = "ts.mbarrier_wait_parity"


def staged(body: Any, builder: bld.Builder) -> Any:
    """The kernel's body, whose loops of that form have the stages that they ask for. One that has them has no
    longer that form."""
    while (found := next((h for h in _handed(body) if h.fits()), None)) is not None:
        body = found.put(body, builder)
    return body


def _handed(body: Any) -> list[_Handed]:
    """The loops that ask for stages and that no other loop runs again."""
    loops: list[Any] = []
    again: list[Any] = []
    structural_walk(body, (tirx.For, lambda f: loops.append(f) if _asks(f) else None))
    if loops:
        structural_walk(body, ((tirx.For, tirx.While), lambda f: again.extend(_within(f))))
    return [_Handed(f, body) for f in loops if not any(f.same_as(x) for x in again)]


def _asks(loop: Any) -> bool:
    """Whether a loop of T.ws regions and names, and of nothing else, whose first round is 0, asks for
    stages."""
    notes = loop.annotations or {}
    pipelined = str(notes.get("ts.kind", "")) == "pipelined" and "ts.stage" not in notes
    pipelined = pipelined and _value(loop.min) == 0
    parts = statements(loop.body)
    ws = [p for p in parts if isinstance(p, tirx.AttrStmt) and p.attr_key == MARK]
    others = [p for p in parts if not isinstance(p, tirx.Bind) and p not in ws]
    return pipelined and int(notes.get("ts.num_stages", 0)) > 1 and bool(ws) and not others


def _within(loop: Any) -> list[Any]:
    """The loops in a loop's body."""
    found: list[Any] = []
    structural_walk(loop.body, (tirx.For, found.append))
    return found


class _Handed:
    """What the warpgroups of a loop hand over: ``tiles`` and ``barriers``."""

    def __init__(self, loop: Any, body: Any):
        self.loop, self.stages = loop, int(loop.annotations["ts.num_stages"])
        self.inside, self.everywhere = buffer_uses(loop), buffer_uses(body)
        self.viewed = set(bases(body).values())
        self.allocated: dict[Any, Any] = {}
        structural_walk(body, (tirx.AllocBuffer, lambda s: self.allocated.__setitem__(s.buffer, s)))
        copies = [c for c in _calls(loop, "ts.tma_copy") if _is(c.args[1].source, _TILE)]
        self.tiles = list(dict.fromkeys(c.args[1].source for c in copies))
        self.barriers = [b for b in self.inside if _is(b, _BARRIER)]
        self.copies = copies

    def fits(self) -> bool:
        return (
            bool(self.tiles)
            and bool(self.barriers)
            and all(map(self.belongs, [*self.tiles, *self.barriers]))
            and all(map(self.whole, self.copies))
            and len(self.copies) == len(self.tiles)
            and all(map(self.one_phase, self.barriers))
            and all(self.parity(c) is not None for c in _calls(self.loop, WAIT))
            and all(map(self.awaited, self.copies))
            and not self.others_handed()
            and self.bytes() <= ROOM
        )

    def belongs(self, buffer: Any) -> bool:
        """Whether it is the block's, as large as can be said, and the loop's alone."""
        made = self.allocated.get(buffer)
        notes = {} if made is None else dict(made.annotations or {})
        static = all(isinstance(e, (int, tirx.IntImm)) for e in buffer.ty.shape)
        plain = set(notes) <= {"ts.counts"}
        alone = self.inside[buffer] == self.everywhere[buffer] and buffer not in self.viewed
        return made is not None and static and plain and alone

    def whole(self, c: Any) -> bool:
        """Whether a copy writes all of its tile, in every round."""
        at = c.args[1]
        full = all(
            _value(r.min) == 0 and _value(r.extent) == int(n)
            for r, n in zip(at.region, at.source.ty.shape, strict=True)
        )
        return full and any(_direct(p.body, c) for p in self.regions())

    def one_phase(self, barrier: Any) -> bool:
        """Whether every round completes one phase of a barrier: all arrivals stand in T.ws, under no
        condition, and are as many as it counts."""
        counts = [int(n) for n in self.allocated[barrier].annotations["ts.counts"]]
        arrived = 0
        for c, _ in operations(self.loop):
            if barrier not in buffer_uses(c):
                continue
            if c.op.name == "ts.mbarrier_arrive":
                who = [p for p in self.regions() if _direct(p.body, c)]
                arrived += sum(WARPGROUP * len(str(p.node.value).split(",")) for p in who)
                if not who:
                    return False
            elif c.op.name not in (WAIT, "ts.mbarrier_expect_tx", "ts.tma_copy"):
                return False
        return len(counts) == 1 and arrived == counts[0]

    def parity(self, c: Any) -> int | None:
        """0 where a wait is for its own round's phase, 1 where it is for that of the round before; None where
        the round's number does not say it."""
        try:
            found = np.broadcast_to(numeric.evaluate(c.args[1], {self.loop.loop_var: _ROUNDS}), _ROUNDS.shape)
        except numeric.Unknown:
            return None
        return next((k for k in (0, 1) if (found == (_ROUNDS + k) % 2).all()), None)

    def awaited(self, c: Any) -> bool:
        """Whether all that touch a copy's tile besides wait for the copy of their own round before."""
        tile, barrier = c.args[1].source, c.args[2].source
        if any(tile in buffer_uses(s) for s in statements(self.loop.body) if isinstance(s, tirx.Bind)):
            return False
        for p in self.regions():
            waited = False
            for s in statements(p.body):
                call: Any = s.value if isinstance(s, tirx.Evaluate) else None
                if find(call) is not None and call.op.name == WAIT and call.args[0].source.same_as(barrier):
                    if self.parity(call) != 0:
                        return False
                    waited = True
                elif tile in buffer_uses(s) and not (waited or call is not None and call.same_as(c)):
                    return False
        return True

    def others_handed(self) -> bool:
        """Whether the loop writes other memory that it reads, which its warpgroups may hand over, too; or a
        tile otherwise than by its copy."""
        writes = [
            a.region.source for c, _ in operations(self.loop) for a in effects_of(c) if a.mode != "read"
        ]
        structural_walk(self.loop, (tirx.BufferStore, lambda x: writes.append(x.buffer)))
        if any(writes.count(t) > 1 for t in self.tiles):
            return True
        both = stored(self.loop) & read_buffers(self.loop) - {*self.tiles, *self.barriers}
        return any(not b.ty.storage_scope.startswith("local") for b in both)

    def bytes(self) -> int:
        """Of all shared tiles, with the stages."""
        return sum(
            prod(int(e) for e in b.ty.shape)
            * BITS[str(b.ty.dtype)]
            // 8
            * (self.stages if b in self.tiles else 1)
            for b in self.allocated
            if _is(b, _TILE) and all(isinstance(e, (int, tirx.IntImm)) for e in b.ty.shape)
        )

    def regions(self) -> list[Any]:
        return [p for p in statements(self.loop.body) if isinstance(p, tirx.AttrStmt)]

    # -- stages
    # -------------------------------------------------------------------------------------------------
    def put(self, body: Any, builder: bld.Builder) -> Any:
        """The body with the stages."""
        made = {b: self.larger(b) for b in (*self.tiles, *self.barriers)}
        for old, new in made.items():
            if old in builder.renames:
                builder.renames[new] = builder.renames[old]
        var = self.loop.loop_var
        kind, n = str(var.ty), tirx.IntImm(str(var.ty), self.stages)
        stage = tirx.floormod(var, n)

        index = stage if kind == "int32" else tirx.Cast("int32", stage)

        def load(e: Any) -> Any:
            if e.source not in made:
                return e
            return tirx.BufferLoad(made[e.source], [index, *(e.indices if e.source in self.tiles else [])])

        def region(r: Any) -> Any:
            if r.source not in made:
                return r
            first = ir.Range.from_min_extent(index, 1)
            return tirx.BufferRegion(made[r.source], [first, *(r.region if r.source in self.tiles else [])])

        def wait(c: Any) -> Any:
            if getattr(c.op, "name", "") != WAIT:
                return c
            phase = tirx.floormod(tirx.floordiv(var, n) + tirx.IntImm(kind, self.parity(c) or 0), 2)
            phase = phase if kind == "int32" else tirx.Cast("int32", phase)
            attrs = dict(c.attrs)
            return ir.Call(c.op, [c.args[0], phase], attrs=attrs, ret_ty=c.ty, span=c.span)

        inside = structural_map(self.loop.body, (ir.Call, wait))
        inside = structural_map(structural_map(inside, (ir.TensorLoad, load)), (ir.TensorRegion, region))
        loop = tirx.For(
            var, self.loop.min, self.loop.extent, self.loop.kind, inside,
            annotations=dict(self.loop.annotations), span=self.loop.span,
        )  # fmt: skip
        body = structural_map(body, (tirx.For, lambda f: loop if f.same_as(self.loop) else f))
        return structural_map(
            body, (tirx.AllocBuffer, lambda s: self.allocation(s, made) if s.buffer in made else s)
        )

    def larger(self, b: Any) -> Any:
        shape = [self.stages, *b.ty.shape] if _is(b, _TILE) else [self.stages]
        return tirx.decl_buffer(
            shape, str(b.ty.dtype), b.name, scope=b.ty.storage_scope, data_alignment=b.ty.data_alignment,
            layout=None,
        )  # fmt: skip

    def allocation(self, s: Any, made: dict[Any, Any]) -> Any:
        notes = dict(s.annotations or {})
        if "ts.counts" in notes:
            notes["ts.counts"] = [int(n) for n in notes["ts.counts"]] * self.stages
        return tirx.AllocBuffer(made[s.buffer], notes, s.span)


def _is(buffer: Any, scope: str) -> bool:
    return str(buffer.ty.storage_scope) == scope


def _value(e: Any) -> Any:
    return int(e.value) if isinstance(e, tirx.IntImm) else e


def _calls(s: Any, name: str) -> list[Any]:
    """The operations of a name in a statement."""
    return [c for c, _ in operations(s) if c.op.name == name]


def _direct(body: Any, c: Any) -> bool:
    """Whether an operation is a statement of a body itself, and not of a loop or a condition in it."""
    return any(isinstance(s, tirx.Evaluate) and s.value.same_as(c) for s in statements(body))
