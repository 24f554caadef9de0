"""Consuming warpgroups with code of their own.

Where a product has fewer rows than a block's warpgroups could take, one of them runs it and what is computed
over its accumulator, and the others skip both (layout.Fragment.first_thread says which). With one text for
all of them these are branches, and ptxas awaits every product where ways join. So each warpgroup gets a copy
of the consumers' text: what it skips is not in it, and what it issues stays under way across what others do.
Barriers stand in all copies in the same order, since they stand outside of what is skipped.

A wait for products names how many of those issued later may still run. That number is the warpgroup's own:
what it skipped is not in its queue (`Apart.await_own`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from tilescale.compiler.cuda import wgmma
from tilescale.compiler.gpu import lower
from tilescale.compiler.gpu.build import call
from tilescale.compiler.gpu.places import digit
from tilescale.compiler.ir.nests import nest_of
from tilescale.compiler.ir.operations import effects_of, name_of
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.scales import WARP, WARPGROUP
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.layout import Fragment
from tilescale.compiler.layout.loops import element_dtype, in_registers
from tilescale.compiler.passes.products import flat, touched
from tilescale.compiler.passes.roles import calls, inside
from tilescale.compiler.tvm_compat import ir, structural_map, structural_walk, tirx

#: slots of a tile in registers whose computation takes long
LARGE = 64


def has_warpgroup_code(program: TileProgram, consumer: Any, threads: int) -> bool:
    """Whether the warpgroups of a consumer get code of their own: some product is one of them's alone, and
    none is awaited where it is issued, by a number that would have to be another in each."""
    found = [c for c in calls(consumer) if c.op.name == "ts.wgmma"]
    few = [c for c in found if int(c.args[2].source.ty.shape[0]) < program.layouts[c.args[2].source].shape[0]]
    sparse = any(c.op.name == "ts.wgmma_sp" for c in calls(consumer))  # awaited where it stands, by all
    return (
        threads > WARPGROUP and bool(few) and not sparse and all(int(c.attrs["pending"]) < 0 for c in found)
    )


class Apart(lower.Lowering):
    """Mixed into the lowering: who runs a statement where warpgroups have code of their own."""

    #: the warpgroup whose code is being made; None where all run the same
    group: int | None = None
    #: the thread's number in it
    lane: Any = None
    #: how many threads behind the first one the fragments of the current statement begin
    first_thread: int = 0
    #: the products under way, and whether this warpgroup issued them
    flying: list[bool]
    #: whether this warpgroup may have written shared memory since its last proxy fence
    wrote: bool = True
    #: the last large tile in registers that it computed since its last barrier with others
    computed: Any = None

    def recorder(self) -> Any:
        """A warpgroup that has code of its own logs for itself."""
        if self.group is not None and self.executor.name == "block":
            return tirx.EQ(self.lane, tirx.IntImm("int32", 0))
        return super().recorder()

    def apart(self, consumer: Any) -> Any:
        """A consumer's body, once for each warpgroup."""
        bodies = []
        for group in range(self.threads // WARPGROUP):
            self.group, self.flying, self.lane = group, [], tirx.Var("lane", "int32")
            self.wrote, self.computed = True, None
            self.bind_range(self.lane, WARPGROUP)
            body = structural_map(consumer, (tirx.SeqStmt, lambda s: sequence(self.postponed(flat(s)))))
            with self.behind_looks():
                made = self.stmt(body)
            bodies.append(sequence([tirx.Bind(self.lane, self.tid - self.group * WARPGROUP), made]))
        self.group = None
        made, number = bodies.pop(), tirx.Var("group", "int32")
        for g in reversed(range(len(bodies))):
            made = tirx.IfThenElse(tirx.EQ(number, tirx.IntImm("int32", g)), bodies[g], made)
        return sequence(
            [tirx.Bind(number, tirx.call_extern("int32", "ts::uniform", self.tid // WARPGROUP)), made]
        )

    def postponed(self, stmts: list[Any]) -> list[Any]:
        """Statements of a sequence, where a wait for a stage stands in front of the first one of this
        warpgroup that reads it."""
        out: list[Any] = []
        for s in reversed(stmts):
            k = 0
            if name_of(s) == "ring_wait":
                ring = int(s.value.attrs["ring"])
                while k < len(out) and not self.concerns(out[k], ring):
                    k += 1
            out.insert(k, s)
        return out

    def concerns(self, s: Any, ring: int) -> bool:
        """Whether a statement has a part of this warpgroup's that reads a stage of a ring, or a token of
        it."""
        inner = list(s.seq) if isinstance(s, tirx.SeqStmt) else inside(s)
        if inner and nest_of(s) is None:
            return any(self.concerns(x, ring) for x in inner)
        if name_of(s).startswith("ring_"):
            return int(s.value.attrs["ring"]) == ring
        if name_of(s) in ("gemm", "wgmma") and not self.has(s.value.args[2]):
            return False
        return any(self.program.schedule.ring_of.get(b) == ring for b in touched(s)[0])

    def readers(self, consumer: Any) -> dict[int, set[int]]:
        """Ring → the warpgroups that read it, where some ring is not read by all. Products say which
        warpgroups they are; whatever else touches a ring is all of them's."""
        rings, everyone = self.program.schedule.ring_of, range(self.threads // WARPGROUP)
        found: dict[int, set[int]] = {}
        for c in calls(consumer):
            mine = {rings[a.region.source] for a in effects_of(c) if a.region.source in rings}
            for group in everyone if mine else ():
                self.group = group
                self.lane = tirx.Var("lane", "int32")
                self.bind_range(self.lane, WARPGROUP)
                if c.op.name not in ("ts.gemm", "ts.wgmma") or self.has(c.args[2]):
                    for ring in mine:
                        found.setdefault(ring, set()).add(self.group)
        self.group = None
        loads: list[Any] = []
        structural_walk(consumer, (ir.TensorLoad, lambda e: loads.append(e) if e.source in rings else None))
        return {**found, **{rings[e.source]: set(everyone) for e in loads}}

    @contextlib.contextmanager
    def counted_from(self, first: int) -> Iterator[None]:
        """Inside, threads are counted from the one at which fragments begin whose first thread that is."""
        outer, self.first_thread = self.first_thread, first
        yield
        self.first_thread = outer

    def block_thread(self) -> Any:
        """The thread's number in the block, counted from where the current statement's fragments begin."""
        if self.group is not None:
            first = (self.group * WARPGROUP - self.first_thread) % self.threads
            return self.lane + first if first else self.lane
        return (
            (self.tid + (self.threads - self.first_thread)) % self.threads if self.first_thread else self.tid
        )

    def own(self, test: Any) -> bool | None:
        """Whether a test on threads holds for this warpgroup; None where it does not say."""
        if self.group is None:
            return None
        made = self.analyzer.simplify(test)
        return bool(made.value) if isinstance(made, tirx.IntImm) else None

    def skips(self, held: Fragment, shape: Any, thread: Any) -> bool:
        """Whether this warpgroup has nothing but padding of a fragment."""
        for p in held.pieces:
            reach = p.unit * p.extent
            if (
                p.axis is None
                or p.to != "thread"
                or p.stride < WARP
                or reach != held.shape[p.axis]
                or shape[p.axis] % p.unit
            ):
                continue
            mine = digit(thread, p.stride, p.extent, p.stride * p.extent == held.threads)
            if self.own(mine < int(shape[p.axis]) // p.unit) is False:
                return True
        return False

    def did(self, accesses: Sequence[Any], made: Any) -> None:
        """A statement, with its accesses, stands behind what was made so far of this warpgroup's text."""
        stores: list[Any] = []
        if self.group is not None:
            structural_walk(made, (tirx.BufferStore, stores.append))
            structural_walk(
                made, (tirx.Evaluate, lambda s: stores.append(s) if isinstance(s.value, ir.Call) else None)
            )
        for a in accesses if stores else ():
            if a.mode == "read":
                continue
            held = self.layouts.get(a.buffer)
            if isinstance(held, Fragment) and held.slots >= LARGE and element_dtype(a.buffer) == "float32":
                self.computed = a.buffer
            self.wrote = self.wrote or not in_registers(a.buffer)

    def before_barrier(self, proxy: bool) -> list[Any]:
        """What stands in front of a barrier: a proxy fence, where it asks for one and this warpgroup wrote
        since its last. ptxas moves arithmetic behind a barrier, where others wait for it; in front of it it
        fills the time that this warpgroup waits. (Not while products are under way, each of which would be
        awaited where a block ends.)"""
        held = None if self.computed is None else self.registers_of(self.computed)
        if self.group is not None:
            self.computed, proxy = None, proxy and self.wrote
            self.wrote = self.wrote and not proxy
        named = [] if self.group is None or held is None or any(self.flying) else wgmma.computed(held)
        return [*named, call("fence_proxy_async")] if proxy else named

    def has(self, tile: Any) -> bool:
        """Whether this warpgroup has a part of a tile."""
        held = self.layouts.get(tile.source)
        if not isinstance(held, Fragment):
            return True
        with self.counted_from(held.first_thread):
            return not self.skips(held, [int(e) for e in tile.source.ty.shape], self.block_thread())

    def await_own(self, pending: int) -> int | None:
        """How many of this warpgroup's products may still run where all but the last ``pending`` of the text
        are awaited; None where it issued none of those that are."""
        if self.group is None:
            return pending
        done, self.flying = (
            self.flying[: len(self.flying) - pending],
            self.flying[len(self.flying) - pending :],
        )
        return sum(self.flying) if any(done) else None
