"""Every barrier of a block's threads, derived: two statements that touch the same memory, one of them
writing, need one between them unless each thread touches only what it touched itself.

The pass walks the program with the list of accesses since the last barrier. In front of a statement that
conflicts with one of them it puts ``ts.sync`` with the reason, and starts over. A loop's accesses conflict
with those of its next round: its body is walked until the list at its end brings nothing new; a barrier that
only what stands in front of a loop asks for goes there, and not into each round. Conditions are uniform among
an executor's threads (they compute them from the same values), so a barrier may stand in a branch. Inside
T.Scale below the block only the executor's own threads are ordered; executors among themselves are ordered by
what the author wrote, and by a barrier of the block in front of and behind the scale: there as well where one
of them tells others of what all threads did, or hears for them (counters, and barriers with phases).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tilescale.compiler.ir import numeric
from tilescale.compiler.ir.nests import nest_of
from tilescale.compiler.ir.operations import effects_of, find, name_of, operations
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.scales import SCALES, WARPGROUP, WIDTHS, Executor
from tilescale.compiler.ir.source import loc_of
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.ir.walks import scalar_reads
from tilescale.compiler.layout.loops import choose, in_registers, own_buffers
from tilescale.compiler.ops.cp_async import element_of
from tilescale.compiler.ops.fence import fence, proxy_fence
from tilescale.compiler.passes.owners import (
    COORDINATE,
    OwnCode,
    Owners,
    numbering,
    owners_by_index,
    owners_of,
    stored_by,
)
from tilescale.compiler.passes.remote_puts import COMMUNICATOR
from tilescale.compiler.passes.schedule import AHEAD, read_by_engines
from tilescale.compiler.tvm_compat import ir, structural_map, structural_walk, sym, tirx


@dataclass(frozen=True)
class Touch:
    """An access of a statement to memory that threads share. ``stale``: variables that have other values by
    now than they had then."""

    memory: Any
    mode: str
    owners: Owners | None
    what: str
    node: Any
    key: tuple[Any, int]
    stale: frozenset[Any] = frozenset()
    #: by an engine beside the threads; the threads have synchronized since, without a proxy fence
    engine: bool = False
    synchronized: bool = False
    #: the threads of each warpgroup have synchronized since; they have made what they wrote visible to
    #: engines in front of that
    grouped: bool = False
    fenced: bool = False
    #: a wait of some of the threads for a phase of a barrier: the others come behind what it is for with a
    #: barrier alone, whatever they touch. And a copy for whose end the author's threads wait
    heard: bool = False
    guarded: bool = False

    def conflicts(self, other: Touch) -> bool:
        """Whether ``self``, which comes first, and ``other`` may touch one byte in different threads, one of
        them writing, and the threads have not synchronized since."""
        if not self._collides(other):
            return False
        return not (self.grouped and (self.fenced or not _crosses(self, other)) and self.within(other))

    def within(self, other: Touch) -> bool:
        """Whether each byte that both touch is touched by threads of one warpgroup alone: its barrier is
        enough."""
        mine, theirs = self.owners, other.owners
        if (
            mine is None
            or theirs is None
            or not self.memory.same_as(other.memory)
            or not mine.comparable(theirs, self.stale)
        ):
            return False
        _, i, j = np.intersect1d(mine.ids, theirs.ids, assume_unique=True, return_indices=True)
        own, their = mine.threads[i], theirs.threads[j]
        return bool(((own >= 0) & (their >= 0) & (own // WARPGROUP == their // WARPGROUP)).all())

    def _collides(self, other: Touch) -> bool:
        if self.memory is not other.memory or (self.mode == "read" and other.mode == "read"):
            return False
        if self.synchronized or other.engine or self.engine:
            return self.engine != other.engine  # engines are ordered among themselves by what they are given
        if self.mode == other.mode == "update":
            return False  # atomic: any order is right
        mine, theirs = self.owners, other.owners
        if mine is None or theirs is None or not mine.comparable(theirs, self.stale):
            return True
        _, i, j = np.intersect1d(mine.ids, theirs.ids, assume_unique=True, return_indices=True)
        return bool(((mine.threads[i] < 0) | (mine.threads[i] != theirs.threads[j])).any())


def insert_barriers(program: TileProgram) -> TileProgram:
    """The program with every barrier that its accesses ask for."""
    done = program.with_body(_Walk(program).run())
    return done


class _Walk:
    def __init__(self, program: TileProgram):
        self.program = program
        self.layouts, self.arena = program.layouts, program.arena
        self.bases: dict[Any, Any] = {}
        self.cache: dict[Any, list[Touch]] = {}
        structural_walk(
            program.func.body, (tirx.DeclBuffer, lambda s: self.bases.__setitem__(s.buffer, s.data.args[0]))
        )
        self.analyzer = _knowing(program.func.body)
        self.own = OwnCode.of(program.func.body, program.launch.threads)
        for index in self.own.index:
            self.analyzer.bind(index, ir.Range.from_min_extent(0, self.own.threads))
        self.published = published(program)
        plan = program.schedule
        self.ringed = set(plan.ring_of) if plan is not None and len(plan.roles) > 1 else set()
        # A ring that has ended shares its bytes with what comes behind it (passes/allocate_shared.py): who
        # writes there waits until all have read.
        self.ringed -= {
            a for a in self.ringed for b in self.arena if not a.same_as(b) and self._overlap(a, b)
        }
        #: rings whose copies run ahead, and their tiles
        self.ahead = {r.number for r in plan.rings if r.form == AHEAD} if plan is not None else set()
        self.staged = (
            {b for b, number in plan.ring_of.items() if number in self.ahead} if plan is not None else set()
        )
        self.put = read_by_engines(program)
        self.pending: list[Touch] = []
        #: what rows touch that go to other ranks beside their executor
        self.late: list[Touch] = []
        #: what nests write by copies that their threads have begun
        self.begun: list[Touch] = []
        self.engines = _has_engines(program)
        #: what engines touch outside rings
        self.taken: set[Any] = set()
        #: what they write there: copies into other blocks, of which this may be one
        self.sent: set[Any] = set()

    def run(self) -> Any:
        whole = Executor("block", self.program.launch.threads)
        engines = [t for t in self._all(self.program.func.body, whole) if t.engine] if self.engines else []
        self.taken, self.sent = (
            {t.memory for t in engines},
            {t.memory for t in engines if t.mode != "read" and _is_shared(t.memory)},
        )
        return self.visit(self.program.func.body, whole)

    # -- memory
    # -------------------------------------------------------------------------------------------------------
    def _overlap(self, a: Any, b: Any) -> bool:
        """Whether two tiles share bytes of the arena."""
        if a not in self.arena or b not in self.arena:
            return False
        (first, length), (second, other) = self.arena[a], self.arena[b]
        return bool(first < second + other and second < first + length)

    def memory(self, buffer: Any) -> Any:
        """What an access touches: tiles of the arena that share bytes are one memory, tensors are one
        each."""
        while buffer in self.bases:
            buffer = self.bases[buffer]
        return buffer

    def clash(self, a: Touch, b: Touch) -> bool:
        if a.heard:
            return True
        if a.guarded and a.memory.same_as(b.memory):
            return False  # who touches the tile behind it has waited for the barrier that the copy names
        if a.synchronized and not b.engine:
            return False
        if a.memory in self.staged and a.memory.same_as(b.memory):
            return False  # guarded by the barrier behind each wait of the ring
        if a.memory is b.memory or a.memory.same_as(b.memory):
            return replace(a, memory=b.memory).conflicts(b)
        if _publishes(a, b, self.published) or _publishes(b, a, self.published):
            return True
        return not (a.mode == b.mode == "read") and self._overlap(a.memory, b.memory)

    # -- what a statement touches
    # -------------------------------------------------------------------------------------
    def touches(self, s: Any, ex: Executor) -> list[Touch]:
        if s not in self.cache:
            self.cache[s] = self._touches(s, ex)
        return self.cache[s]

    def _touches(self, s: Any, ex: Executor) -> list[Touch]:
        nest = nest_of(s)
        found: list[tuple[Any, str, Owners | None, str, bool]] = []
        if nest is not None:
            # Which thread makes which of a ring's copies is the lowering's choice (cuda/ops/cp_async.py).
            loop = None if element_of(s) is not None else choose(nest, self.layouts, ex.threads)[0]
            own = own_buffers(nest)
            for a in nest.accesses:
                if not in_registers(a.buffer) and a.buffer not in own:
                    if ex.name == "thread":
                        owners = owners_by_index(a, self.own, self.analyzer)
                    else:
                        by = stored_by(self.program, nest, loop, a) if a.mode == "write" else None
                        owners = owners_of(nest, loop, a, self.analyzer, by)
                    found.append((a.buffer, a.mode, owners, nest.what, False))
        elif isinstance(s, tirx.Evaluate) and (op := find(s.value)) is not None:
            for access in effects_of(s.value):
                buffer = access.region.source
                # Stages that a producer fills are guarded by their ring's barriers alone.
                if not in_registers(buffer) and not op.guarded and buffer not in self.ringed:
                    owners = _leaders(buffer, s.value)
                    found.append((buffer, access.mode, owners, f"T.{op.spelling}", access.proxy == "async"))
        for r in scalar_reads(s) if nest is None else ():
            if not in_registers(r.buffer):
                mine = owners_by_index(r, self.own, self.analyzer) if ex.name == "thread" else None
                found.append((r.buffer, "read", mine, "a scalar", False))
        fills = nest is None and _fills_by_hand(s)
        return [
            Touch(
                self.memory(b), mode, owners, what, s, (s, k), engine=engine,
                guarded=fills and mode == "write" and _is_shared(b),
            )
            for k, (b, mode, owners, what, engine) in enumerate(found)
            if not b.ty.storage_scope.endswith(("signal", "barrier", "packets"))
        ]  # fmt: skip

    # -- statements
    # ---------------------------------------------------------------------------------------------------
    def visit(self, s: Any, ex: Executor) -> Any:
        if isinstance(s, tirx.SeqStmt):
            return sequence([self.visit(x, ex) for x in s.seq])
        if isinstance(s, tirx.AttrStmt):
            return self._attribute(s, ex)
        if nest_of(s) is None and isinstance(s, tirx.For):
            before = self.in_front(self.touches(s, ex), ex)
            notes = dict(s.annotations) if s.annotations else {}
            runs = isinstance(s.extent, tirx.IntImm) and int(s.extent.value) > 0
            start = list(self.pending)
            body = self._rounds(s.body, ex, [], runs, s.loop_var)
            if (pairs := self._outside(s, ex, start, body)) is not None:
                self.pending = start
                before += self._barrier(pairs, ex)
                body = self._rounds(s.body, ex, [], runs, s.loop_var)
            made = tirx.For(s.loop_var, s.min, s.extent, s.kind, body, annotations=notes, span=s.span)
            return sequence([*before, made])
        if isinstance(s, tirx.While):
            before = self.in_front(self.touches(s, ex), ex)
            body = self._rounds(s.body, ex, self.touches(s, ex), False)
            return sequence([*before, tirx.While(s.condition, body, s.span)])
        if isinstance(s, tirx.IfThenElse):
            before = self.in_front(self.touches(s, ex), ex)
            start = list(self.pending)
            then = self.visit(s.then_case, ex)
            after, self.pending = self.pending, start
            other = None if s.else_case is None else self.visit(s.else_case, ex)
            self.pending = _union(after, self.pending)
            return sequence([*before, tirx.IfThenElse(s.condition, then, other, s.span)])
        releases, acquires = _order(s)
        if releases or acquires:
            return self._ordered(s, ex, releases, acquires)
        name = name_of(s)
        if name in ("barrier", "sync_threads"):
            self.pending = self._behind(False)
            return s
        if name == "sync" and str(s.value.attrs["scope"]) == ex.name:
            self.pending = self._behind(bool(s.value.attrs["proxy"]))
            return s
        if name == "ring_wait" and (ring := int(s.value.attrs["ring"])) in self.ahead:
            # Each thread waited for its own copies of the round: now all see all of them; and all have read
            # the stage of the round before, which the next copies overwrite, where none has done so.
            where = f"ring {ring}: this round's stage has arrived"
            if not self.program.schedule.rings[ring].early:
                where += ", the one before has been read"
            put = ring in self.put
            self.pending = self._behind(put)
            return sequence([s, fence(ex.name, where, s.span, put)])
        if name == "await_rows" and int(s.value.attrs["complete"]):
            # Each thread waited for the rows that it began: only a barrier behind that says to the others,
            # one of whom may tell of them, that all are complete.
            self.pending = _union(self.pending, self.late)
            return s
        touches = self.touches(s, ex)
        if (element := element_of(s)) is not None and element.op.name == "ts.thread_copy_element":
            self.begun = _union(self.begun, [t for t in touches if t.mode != "read"])
        if name == "peer_rows" and "late" in s.value.attrs:
            self.late = _union(self.late, [t for t in touches if t.mode != "read"])
        before = self.in_front(touches, ex)
        return sequence([*before, s]) if before else s

    def in_front(self, touches: list[Touch], ex: Executor, whole: bool = False) -> list[Any]:
        """The barrier in front of a statement, if it needs one; its accesses are pending from here.
        ``whole``: of all threads."""
        out: list[Any] = []
        if ex.threads > 1:
            out = self._barrier(
                [(a, b) for b in touches for a in self.pending if self.clash(a, b)], ex, whole
            )
        self.pending = _union(self.pending, touches)
        return out

    def _ordered(self, s: Any, ex: Executor, releases: bool, acquires: bool) -> Any:
        """What one thread does for its executor: the threads synchronize in front where it releases what
        they did, and behind where they may go on only because of what it acquired."""
        what = find(s.value).name.replace("_", " ")  # type: ignore[union-attr]
        before, behind = self.in_front(self.touches(s, ex), ex, whole=True), []
        told = any(not t.guarded for t in self.pending)
        if releases and ex.threads > 1 and not before and (told or ex.name != "block"):
            before = [fence(ex.name, f"the {what} tells of what all threads did", s.span)]
            self.pending = self._behind(False)
        if acquires and ex.threads > 1:
            behind = [fence(ex.name, f"behind the {what}", s.span)]
            self.pending = self._behind(False)
        return sequence([*before, s, *behind])

    def _barrier(self, pairs: list[tuple[Touch, Touch]], ex: Executor, whole: bool = False) -> list[Any]:
        """The barrier that pairs of accesses ask for, behind which none of them is pending; of each warpgroup
        where that is enough."""
        if not pairs:
            return []
        crossing = next((p for p in pairs if _crosses(*p)), None)
        first = crossing or pairs[0]
        # A product that reads what is written in front of this barrier would have one of its own behind it,
        # for the proxy fence alone.
        fenced = crossing is not None or any(
            t.mode != "read"
            and not t.engine
            and not t.fenced
            and t.memory in self.taken
            or t.memory in self.sent
            for t in self.pending
            if not t.guarded
        )
        parts = self.program.target.named_barriers and ex.name == "block" and ex.threads > WARPGROUP
        if parts and not whole and all(a.within(b) for a, b in pairs):
            self.pending = [
                t if t.owners is None else replace(t, grouped=True, fenced=t.fenced or fenced)
                for t in self.pending
            ]
            return [fence("warpgroup", _reason(*first), first[1].node.span, fenced)]
        self.pending = self._behind(fenced)
        return [fence(ex.name, _reason(*first), first[1].node.span, fenced)]

    def _outside(
        self, loop: Any, ex: Executor, start: list[Touch], made: Any
    ) -> list[tuple[Touch, Touch]] | None:
        """The pairs for which a loop has a barrier in each round that it would not have if threads
        synchronized in front of it."""
        pairs = (
            [(a, b) for b in self._all(loop.body, ex) for a in start if self.clash(a, b)]
            if ex.threads > 1
            else []
        )
        if not pairs:
            return None
        after, self.pending = self.pending, start
        self._barrier(pairs, ex)
        alone = self._rounds(loop.body, ex, [], False, loop.loop_var)
        self.pending = after
        return pairs if _count(alone) < _count(made) else None

    def _behind(self, fenced: bool) -> list[Touch]:
        """What is pending behind a barrier: without a proxy fence what threads wrote to shared memory is not
        there for engines yet."""
        if fenced or not self.engines:
            return []
        kept = [t for t in self.pending if not t.engine and not t.guarded and _is_shared(t.memory)]
        return [replace(t, synchronized=True) for t in kept if t.mode != "read" or t.memory in self.sent]

    def _rounds(self, body: Any, ex: Executor, again: list[Touch], runs: bool, index: Any = None) -> Any:
        """A loop's body. ``again``: what its condition touches, once more at its end. ``runs``: it has at
        least one round."""
        start = list(self.pending)
        defined = _defined(body, index)
        carried: list[Touch] = []
        while True:
            self.pending = _union(start, carried)
            made = self.visit(body, ex)
            tail = self.in_front(again, ex) if again else []
            late = [replace(t, stale=t.stale | defined) for t in self.pending]
            if all(any(_knows_less(c, t) for c in carried) for t in late):
                break
            carried = _union(carried, late)
        self.pending = late if runs else _union(start, late)
        return sequence([made, *tail]) if tail else made

    def _attribute(self, s: Any, ex: Executor) -> Any:
        name = SCALES[int(s.value.value)] if s.attr_key == "ts.scale" else ""
        if s.attr_key == "ts.role" and (made := self._beside(str(s.node.value), s.body)) is not None:
            return tirx.AttrStmt(s.node, s.attr_key, s.value, made, s.span)
        if name not in WIDTHS:
            return tirx.AttrStmt(s.node, s.attr_key, s.value, self.visit(s.body, ex), s.span)
        inner = ex.within(name)
        every = self._all(s.body, inner, own=ex.name == "block" and name == "thread")
        pairs = [(a, b) for b in every for a in self.pending if self.clash(a, b)]
        pair = next((p for p in pairs if _crosses(*p)), pairs[0] if pairs else None)
        crossing = pair is not None and _crosses(*pair)
        before = [fence(ex.name, _reason(*pair), s.span, crossing)] if pair is not None else []
        releases, acquires = _orders(s.body)
        arrives = any(op.name == "mbarrier_arrive" for _, op in operations(s.body))
        told = self.pending if arrives else [t for t in self.pending if not t.guarded]
        releases = releases or arrives
        if releases and not before and told and ex.threads > 1:
            before = [fence(ex.name, f"a {name} tells of what all threads did", s.span)]
        outer = self._behind(crossing) if before else self.pending
        self.pending = []
        body = self.visit(s.body, inner)
        behind = (
            [fence(ex.name, f"behind what a {name} heard", s.span)] if acquires and ex.threads > 1 else []
        )
        if behind:
            self.pending = self._behind(False)
            return sequence([*before, tirx.AttrStmt(s.node, s.attr_key, s.value, body, s.span), *behind])
        # whatever an executor did is unordered to what all threads do behind the scale, though its own
        # threads have synchronized since; a thread's own accesses are in its order, and known as its own
        # Each thread waited for the copies that it began: the same as of rows above.
        begun = self.begun if any(_awaits_copies(c) for c, _ in operations(s.body)) else []
        self.pending = _union(outer, [*every, *_waits(s.body), *begun])
        return sequence([*before, tirx.AttrStmt(s.node, s.attr_key, s.value, body, s.span)])

    def _beside(self, role: str, s: Any) -> Any:
        """The part of those who run beside the block's threads; None where it is theirs."""
        if role == "producer":
            return self._produced(s)
        return self._communicated(s) if role == COMMUNICATOR else None

    def _communicated(self, s: Any) -> Any:
        """The communicator's part: warps that wait, and put what the block itself does not write
        (passes/roles.py). One thread acquires for all of them, so they synchronize behind each wait: its
        acquire comes before what each of them reads behind that barrier (causality order is transitive
        across barriers of the block, PTX ISA, "Memory Consistency Model"). A put has its own barrier, in
        front of its signal (cuda/ops/remote_put.py). Their registers and scalars are each thread's own."""

        def synchronized(x: Any) -> Any:
            return sequence([x, fence(COMMUNICATOR, "behind the wait", x.span)]) if _order(x)[1] else x

        return structural_map(s, (tirx.Evaluate, synchronized))

    def _produced(self, s: Any) -> Any:
        """The producer's part: one thread, which meets nobody. It fills rings, whose barriers guard their
        tiles, from tensors that the block itself does not write (passes/roles.py).

        What others wrote is there behind its waits: their release and its acquire, both by threads. TMA reads
        by another proxy, so a proxy fence stands behind each wait: what the thread acquired comes before the
        copies that it issues behind the fence (PTX ISA, "Memory Consistency Model", "Proxy-preserved base
        causality order"). Its other scalars are its own registers, or tensors that nobody writes."""

        def fenced(x: Any) -> Any:
            if not _order(x)[1]:
                return x
            return sequence([x, proxy_fence("what the wait acquired comes before the copies", x.span)])

        return structural_map(s, (tirx.Evaluate, fenced))

    def _all(self, s: Any, ex: Executor, own: bool = False) -> list[Touch]:
        """Everything that is touched in a statement. ``own``: it is what each thread of the block does by
        itself, so that owners are threads of the block."""
        from tilescale.compiler.ir.walks import walk

        every = [t for inner, e in walk(s, ex) for t in self.touches(inner, e)]
        return every if own else [replace(t, owners=None) for t in every]


def _awaits_copies(call: Any) -> bool:
    """Whether a thread waits for copies that it began, at a call."""
    return bool(call.op.name == "ts.thread_copies" and int(call.attrs["pending"]) >= 0)


def _count(s: Any) -> int:
    """How many barriers stand in a statement."""
    found: list[Any] = []
    structural_walk(
        s, (ir.Call, lambda c: found.append(c) if find(c) is not None and c.op.name == "ts.sync" else None)
    )
    return len(found)


def _publishes(a: Touch, b: Touch, seen: set[Any]) -> bool:
    """Whether ``a`` is an atomic update that orders ``b`` for other blocks: what all threads did before must
    be done before it, and what they read behind it must come behind it."""
    return a.mode == "update" and a.memory.ty.storage_scope.startswith("global") and b.memory in seen


def published(program: TileProgram) -> set[Any]:
    """Tensors that a kernel both writes and reads: through those blocks can signal each other."""
    from tilescale.compiler.ir.walks import walk

    bases: dict[Any, Any] = {}
    structural_walk(
        program.func.body, (tirx.DeclBuffer, lambda s: bases.__setitem__(s.buffer, s.data.args[0]))
    )
    modes: dict[Any, set[str]] = {}

    def note(buffer: Any, mode: str) -> None:
        while buffer in bases:
            buffer = bases[buffer]
        if buffer.ty.storage_scope.startswith("global"):
            modes.setdefault(buffer, set()).add(mode)

    for s, _ in walk(program.func.body, Executor("block", program.launch.threads)):
        nest = nest_of(s)
        if nest is not None:
            for a in nest.accesses:
                note(a.buffer, a.mode)
            continue
        for access in effects_of(s.value) if isinstance(s, tirx.Evaluate) else ():
            note(access.region.source, access.mode)
        for r in scalar_reads(s):
            note(r.buffer, r.mode)
    return {b for b, m in modes.items() if "read" in m and m != {"read"}}


def _is_shared(buffer: Any) -> bool:
    return str(buffer.ty.storage_scope).startswith("shared")


def _crosses(a: Touch, b: Touch) -> bool:
    """Whether ``a``, by threads, conflicts with an engine's access ``b``, one of them writing: a proxy fence
    must stand between them."""
    return b.engine and not a.engine and (a.mode, b.mode) != ("read", "read") and _is_shared(a.memory)


def _has_engines(program: TileProgram) -> bool:
    """Whether anything in a kernel touches memory by the asynchronous proxy outside its rings."""
    return any(a.proxy == "async" for c, op in operations(program.func.body) for a in effects_of(c))


def _waits(body: Any) -> list[Touch]:
    """The waits for phases of barriers in what some of the threads do, as what stands in front of all that
    the others do behind it."""
    found: list[Touch] = []

    def look(s: Any) -> None:
        if name_of(s) == "mbarrier_wait_parity":
            barrier, what = s.value.args[0].source, "T.mbarrier_wait_parity"
            found.append(Touch(barrier, "write", None, what, s, (s, -1), engine=True, heard=True))

    structural_walk(body, (tirx.Evaluate, look))
    return found


def _fills_by_hand(s: Any) -> bool:
    """Whether a statement is a T.tma_copy into a tile, whose end a barrier of the author's tells."""
    return name_of(s) == "tma_copy" and len(s.value.args) > 2


def _order(s: Any) -> tuple[bool, bool]:
    """Whether a statement releases what its executor did, and whether it acquires what others did."""
    op = find(s.value) if isinstance(s, (tirx.Evaluate, tirx.Bind, tirx.BufferStore)) else None
    return (False, False) if op is None else op.order(s.value)


def _orders(body: Any) -> tuple[bool, bool]:
    found = [(False, False)]
    structural_walk(body, ((tirx.Evaluate, tirx.Bind, tirx.BufferStore), lambda s: found.append(_order(s))))
    return any(releases for releases, _ in found), any(acquires for _, acquires in found)


def _defined(body: Any, index: Any) -> frozenset[Any]:
    """The variables that have a new value in every round of a loop."""
    found: set[Any] = set() if index is None else {index}
    structural_walk(body, (tirx.Bind, lambda s: found.add(s.var)))
    structural_walk(body, (tirx.For, lambda s: found.add(s.loop_var)))
    return frozenset(found)


def _union(a: Iterable[Touch], b: Iterable[Touch]) -> list[Touch]:
    """Both lists; of the same access of a statement the one that knows less is kept."""
    out: dict[Any, Touch] = {}
    for t in (*a, *b):
        before = out.get(t.key)
        if before is None:
            out[t.key] = t
        else:
            owners = None if before.owners is None or t.owners is None else t.owners
            grouped, fenced = t.grouped and before.grouped, t.fenced and before.fenced
            out[t.key] = replace(
                t,
                stale=t.stale | before.stale,
                owners=owners,
                synchronized=t.synchronized and before.synchronized,
                grouped=grouped,
                fenced=fenced,
            )
    return list(out.values())


def _knows_less(a: Touch, b: Touch) -> bool:
    """Whether all that ``b`` conflicts with ``a``, of the same access, conflicts with too."""
    return (
        a.key == b.key
        and b.stale <= a.stale
        and a.synchronized <= b.synchronized
        and a.grouped <= b.grouped
        and a.fenced <= b.fenced
    )


def _leaders(buffer: Any, call: Any) -> Owners | None:
    """Who touches a tile by an operation that the first thread of each warpgroup does for its share of rows
    (passes/stores_by_warpgroup.py); None for any other operation."""
    if "groups" not in (call.attrs or {}) or not _is_shared(buffer):
        return None
    rows, cols = (int(e) for e in buffer.ty.shape)
    row, col = np.divmod(np.arange(rows * cols), cols)
    threads = row // (rows // int(call.attrs["groups"])) * WARPGROUP
    ids = ((row + (1 << COORDINATE - 1)) << COORDINATE) + col + (1 << COORDINATE - 1)
    return Owners(ids, threads, (numbering(buffer), "", ""), frozenset())


def _knowing(body: Any) -> Any:
    """An analyzer that knows what the integer names of a program stand for."""
    analyzer = sym.Analyzer()

    def learn(s: Any) -> None:
        if str(s.var.ty).startswith("int") and None not in numeric.variables(s.value):
            analyzer.bind(s.var, s.value)

    structural_walk(body, (tirx.Bind, learn))
    return analyzer


def _reason(first: Touch, second: Touch) -> str:
    """``reads a after T.copy (kernel.py:12) writes it``."""
    loc = loc_of(getattr(first.node, "span", None))
    place = f", line {loc.line}" if loc else ""
    verb = {"read": "reads", "write": "writes", "update": "updates"}
    if first.heard:
        waited = f"{first.what}{place}, of some threads"
        return f"{second.what} {verb[second.mode]} {second.memory.name} behind {waited}"
    name = (
        second.memory.name
        if first.memory.same_as(second.memory)
        else f"{second.memory.name}, where {first.memory.name} was,"
    )
    return f"{second.what} {verb[second.mode]} {name} that {first.what}{place} {verb[first.mode]}"
