"""T.Pipelined becomes rings and roles: which copies run ahead, through how many stages, who issues them.

A ring takes the shared buffers that a pipelined loop fills by copies at its head and only reads behind them.
Its buffers get a leading stage axis. A schedule is data (`Schedule`), asked for by a target in three words:

    depth   the most stages that a ring may have (a loop's num_stages asks for at most that many) roles
    ("all",): one role does everything. ("producer", "consumer"): a producer fills the rings, see roles.py
    ahead   one role that issues the copies of round n + depth - 1 before it computes round n (cp.async and
    its groups)

and in a fourth, which goes with a producer: ``by_reader``, where a loop has a ring for the copies of each
first reader, awaited in front of it and released behind their last one, so that a tile that is read early
gives its stage back early. Otherwise one ring has all of a loop's copies. Loops with a producer that fill the
same tiles share their ring (`_shared`): what one of them copies follows in the stages behind what another one
did, as far ahead as all stages reach. ``alone`` says of a copy outside such loops, or under a condition in
them, whether it may go through a ring; outside through one of its own, as a tile does that is filled once and
read by many products: of one stage, or where it is filled again and again of ``single_depth``, so that the
next tile is under way while this one is read.

The loop's body becomes, where order alone is the guard (form "in_order", all that the CPU asks for, since its
copies are not asynchronous),

    acquire(ring, n); copies into stage n % depth; commit(ring, n); wait(ring, n); the rest, reading that
    stage; release(ring, n); n += 1

with n a variable that lives across loops and tiles. In the other forms two variables count, one those rounds
that were filled, one those that were read, and the copies are asynchronous (``tma_load``, ``cp_async``),
complete where their ring's round is awaited. A loop of which this cannot be done rightly keeps the form
"in_order", and the schedule says why (`Schedule.kept`). One in a T.Scale below the block, where each executor
goes through it by itself, has a ring for each warp or warpgroup where copies run ahead, with the variables at
the head of that T.Scale; else it has none and stays as it is, which is said too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tilescale.compiler.advice import reason
from tilescale.compiler.ir import spec
from tilescale.compiler.ir.buffers import buffer_uses, written_buffers
from tilescale.compiler.ir.nests import is_nest
from tilescale.compiler.ir.operations import effects_of, operations
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.rewrite import around
from tilescale.compiler.ir.source import loc_of
from tilescale.compiler.ir.statements import sequence, statements
from tilescale.compiler.ir.tokens import token
from tilescale.compiler.layout.chunks import integer_names
from tilescale.compiler.ops import peer_rows
from tilescale.compiler.ops.copy import filling
from tilescale.compiler.ops.fence import fence
from tilescale.compiler.ops.shuffle import OF_WARPS
from tilescale.compiler.passes import prefetch
from tilescale.compiler.passes import roles as splitting
from tilescale.compiler.passes.await_rows import MEETINGS as TELLING
from tilescale.compiler.passes.copy_nests import keeps_places
from tilescale.compiler.passes.filled import Pipeline, filled_tile, pipeline_of
from tilescale.compiler.passes.gathers import Gather, gather
from tilescale.compiler.tvm_compat import ir, structural_map, structural_walk, tirx

ZERO = tirx.IntImm("int32", 0)
#: what a ring's loop looks like: copies in turn, by a producer, or ahead of the loop's own computation
IN_ORDER, ROLES, AHEAD = "in_order", "roles", "ahead"
#: what a copy into a ring becomes, where it is not made in turn: a producer's by an engine, those of all
#: threads by themselves
FILLED_BY = {ROLES: "tma_load", AHEAD: "cp_async"}
#: why a loop has no ring where it could have one in the block
BELOW = reason(
    "the loop runs once for each executor below the block, and a producer fills rings of blocks alone",
    "T.Pipelined outside of the T.Scale, which stands in the loop around what each executor does in a round",
)
#: by which an executor below the block knows what others of the block did, or they what it did
MEETINGS = tuple(f"ts.{name}" for name in (*TELLING, "mbarrier_wait_parity"))
#: scales below the block whose executors have rings of their own, where copies run ahead
OWNERS = ("warpgroup", "warp")


@dataclass
class Ring:
    """Buffers that are filled and emptied together, ``depth`` stages of them, in one of the forms above."""

    number: int
    depth: int
    buffers: list[str]
    form: str = IN_ORDER
    #: it is filled outside pipelined loops, and has a number of stages of its own
    single: bool = False
    #: the stages that the author asked for, and where
    asked: int = 1
    loc: Any = None
    #: on GPUs: where the barriers of its stages lie in the arena, in bytes
    barriers: int = -1
    #: the cluster's axes along which blocks copy for each other (passes/multicast.py): some of "xyz"
    shared: str = ""
    #: how many T.Scale below the block stand around it: each executor there has a ring like this one
    below: int = 0
    #: a round's copies are issued in front of the wait for those of the round before (issue_early.py)
    early: bool = False


def read_by_engines(program: TileProgram) -> set[int]:
    """The rings of which TMA stores stages that threads have filled, or wgmma reads them; none where a
    producer fills all."""
    plan = program.schedule
    if plan is None or len(plan.roles) > 1:
        return set()
    return {
        plan.ring_of[a.region.source]
        for c, _ in operations(program.func.body)
        for a in effects_of(c)
        if a.mode == "read" and a.proxy == "async" and a.region.source in plan.ring_of
    }


@dataclass(frozen=True)
class Kept:
    """A place whose copies stay with the computation though the target asked otherwise, and why."""

    loc: Any
    reason: str


@dataclass
class Schedule:
    """What the pass decided, kept beside the IR."""

    roles: list[str] = field(default_factory=lambda: ["all"])
    rings: list[Ring] = field(default_factory=list)
    #: staged buffer → the number of its ring
    ring_of: dict[Any, int] = field(default_factory=dict)
    #: staged buffer → how many times the stages that the author asked for exceed those that it got
    stages: dict[Any, int] = field(default_factory=dict)
    kept: list[Kept] = field(default_factory=list)
    #: why the block's own threads make its non-blocking puts, where it has a producer
    puts_kept: str = ""


def schedule(
    program: TileProgram,
    depth: int = 1,
    roles: tuple[str, ...] = ("all",),
    ahead: bool = False,
    by_reader: bool = False,
    alone: Callable[[Any], bool] | None = None,
    single_depth: int = 1,
    gathers: bool = True,
) -> TileProgram:
    """The program at the scheduled level. ``depth``, ``roles``, ``ahead``, ``by_reader``, ``alone`` and
    ``single_depth``: see above. ``gathers``: loops of T.Parallel are copies that run ahead, too (gathers.py).

    Raises:
        ValueError: roles that this pass does not know, a producer together with ``ahead``, ``by_reader``
        without one.
    """
    if (
        roles not in (("all",), splitting.ROLES)
        or (ahead and roles != ("all",))
        or (by_reader and roles != splitting.ROLES)
    ):
        asked = f"roles={roles!r}, ahead={ahead}, by_reader={by_reader}"
        raise ValueError(f"{asked}: one role, one role that copies ahead, or {splitting.ROLES!r}")
    wanted = ROLES if roles == splitting.ROLES else AHEAD if ahead else IN_ORDER
    reasons: dict[Any, Kept] = {}  # loops whose copies must stay in turn, by their variable
    while True:
        draft = _Draft(program, depth, wanted, reasons, by_reader, gathers, alone)
        body = structural_map(program.func.body, (tirx.For, draft.visit))
        body = body if alone is None else draft.singles(body, alone, single_depth)
        if wanted != ROLES:
            break
        body, failed, notes = splitting.split(program, body, draft)
        draft.plan.kept += notes
        if not failed:
            break
        # a loop that no role region can hold stays in turn, which may make a larger region possible around it
        reasons |= failed
    draft.plan.kept += reasons.values()
    return _finished(program, body, draft)


class _Draft:
    """One attempt: the loops as rings, with what is still to be allocated."""

    def __init__(
        self,
        program: TileProgram,
        depth: int,
        wanted: str,
        reasons: dict[Any, Kept],
        by_reader: bool,
        gathers: bool,
        alone: Callable[[Any], bool] | None,
    ):
        self.alone = alone
        self.depth, self.wanted, self.reasons, self.by_reader = depth, wanted, reasons, by_reader
        self.gathering = gathers
        self.plan = Schedule()
        self.uses = buffer_uses(program.func.body)
        self.views: set[Any] = set()
        structural_walk(program.func.body, (tirx.DeclBuffer, lambda s: self.views.add(s.buffer)))
        self.narrow = below_the_block(program.func.body)
        self.program, self.names = program, integer_names(program.func.body)
        self.counters: list[tuple[Any, Ring]] = []
        self.staged: dict[Any, Any] = {}
        self.shared = _shared(self) if by_reader and program.launch.cluster == (1, 1, 1) else set()

    def visit(self, loop: Any) -> Any:
        notes = loop.annotations or {}
        if str(notes.get("ts.kind", "")) != "pipelined" or int(notes.get("ts.num_stages", 0)) < 1:
            return loop
        by_reader = self.by_reader and loop.loop_var not in self.reasons
        branches = by_reader and self.program.launch.cluster == (1, 1, 1)
        ahead = self.wanted == AHEAD and loop.loop_var not in self.reasons
        narrow = self._scales(loop)
        gathers = self._gathers(loop) if ahead and not narrow and not keeps_places(loop) else {}
        pipeline = pipeline_of(loop, self.uses, self.views, by_reader, branches, self.shared, ahead, gathers)
        pipeline = pipeline if pipeline is not None and self.able(pipeline) else None
        if pipeline is not None and not narrow:
            return self._by_reader(pipeline) if by_reader else self._ring(pipeline)
        if pipeline is not None:
            kept = self._below(pipeline, narrow)
            if kept is None:
                return self._ring(pipeline)
            self.plan.kept.append(kept)
        elif self.wanted != IN_ORDER and loop.loop_var not in self.reasons:
            why = (
                "no copy at the head of the loop fills the whole of a shared tile that only the "
                "statements behind it read"
            )
            self.plan.kept.append(Kept(loc_of(loop.span), why))
        return loop

    def able(self, p: Pipeline) -> bool:
        """Whether the producer can make a loop's copies, where a round is one condition: else they stay with
        the computation, and other loops keep their producer."""
        copies = [c for s in p.stmts if p.filled(s) in p.fills for c in splitting.calls(s)]
        return not p.under or self.alone is None or all(self.alone(c) for c in copies)

    def _gathers(self, loop: Any) -> dict[Any, Gather]:
        """The loops of T.Parallel among a loop's statements that copies beside the threads can be."""
        stmts = statements(loop.body) if self.gathering else []
        made = {s: gather(self.program, stmts, s, self.names) for s in stmts if is_nest(s)}
        return {s: g for s, g in made.items() if g is not None}

    def _below(self, p: Pipeline, scales: tuple[str, ...]) -> Kept | None:
        """Why the executors of the T.Scale around a loop have no rings of their own; None where they have."""
        if self.wanted != AHEAD or scales[-1] not in OWNERS:
            return Kept(loc_of(p.loop.span), BELOW)
        if (why := self._meets(p)) is not None:
            return Kept(loc_of(p.loop.span), why)
        return self._unfit(p, self._planned(p))

    def _meets(self, p: Pipeline) -> str | None:
        """Why copies must not run ahead of where a loop's executor meets others of the block; None where they
        may, or it meets none."""
        met = [c for c in splitting.calls(p.loop.body) if c.op.name in MEETINGS]
        if all(c.op.name == "ts.sync_threads" and int(c.attrs["barrier"]) == OF_WARPS for c in met):
            return None
        if splitting.waits(p.loop.body):
            return "the copies wait for others, who may wait for whom they meet in the loop"
        copies = [s.value.args[0].source for s in p.stmts if p.filled(s) in p.fills]
        sources = [splitting.root(self.program.func.body, b) for b in copies]
        written = written_buffers(self.program)
        changed = next((b.name for b in sources if b in written), None)
        return changed and f"another part of the block may write {changed} before the two meet in the loop"

    def _scales(self, loop: Any) -> tuple[str, ...]:
        """The scales below the block around a loop."""
        return next((s for v, s in self.narrow.items() if loop.loop_var.same_as(v)), ())

    def _ring(self, p: Pipeline) -> Any:
        kept = p.loop.loop_var in self.reasons
        if not kept and self.wanted != IN_ORDER and (why := self._unfit(p, self._planned(p))) is not None:
            self.reasons[p.loop.loop_var] = why
            return self.visit(p.loop)
        ring, staged = self._new_ring(p, list(p.fills))
        number = ring.number
        if kept or ring.form == IN_ORDER:
            ring.form = IN_ORDER
            return self._in_turn(p, ring, staged)
        filled, read = self._counter(ring, "_filled"), self._counter(ring, "_read")
        p = p.with_guards()
        head, rest, span = p.stmts[p.first : p.last + 1], p.stmts[p.last + 1 :], p.loop.span
        copies = [s for s in head if not _consumed(s, p)]
        fill = [
            token("acquire", number, now(filled), span),
            *[_in_stage(_asynchronous(s, p, ring), staged, _stage(filled, ring.depth)) for s in copies],
            token("commit", number, now(filled), span),
            tirx.BufferStore(filled, now(filled) + 1, [ZERO], span),
        ]
        # What stands among the copies and is none of them may signal that those before it are complete: it
        # follows the wait.
        others = [s for s in head if _consumed(s, p) or isinstance(s, tirx.Bind)]
        read_stage = _stage(read, ring.depth)
        awaited = token("wait", number, now(read), span)
        compute = [
            *[_in_stage(s, staged, read_stage) for s in (*others, *rest)],
            token("release", number, now(read), span),
            tirx.BufferStore(read, now(read) + 1, [ZERO], span),
        ]
        before = p.stmts[: p.first]
        if ring.form == ROLES:
            return _loop(p.loop, [*before, *fill, awaited, *compute])
        put = self._puts(compute, staged) if ring.below else None
        if put is None:
            return prefetch.prefetched(p.loop, before, fill, awaited, compute, ring.depth)
        # A stage is filled again where TMA has read it: behind this round's copies, so that these are under
        # way meanwhile. Who issued them waits for the round before's, for all that fill.
        owner = self._scales(p.loop)[-1]
        read_by_tma = f"ring {number}: TMA has read the stage of the round before"
        fill = [peer_rows.awaited(owner, span, 1, False), fence(owner, read_by_tma, span), *fill]
        compute = [*put[:-2], peer_rows.grouped(owner, span), *put[-2:]]
        return prefetch.prefetched(p.loop, before, fill, awaited, compute, ring.depth, behind=True)

    def _puts(self, compute: list[Any], staged: dict[Any, Any]) -> list[Any] | None:
        """Statements whose copies by TMA, of stages of a ring, go on until the stage is filled again; None
        where none goes on beside its executor."""
        stages, found = set(staged.values()), list[Any]()

        def late(c: Any) -> Any:
            if c.op.name != "ts.peer_rows" or "late" not in c.attrs or c.args[0].source not in stages:
                return c
            found.append(c)
            attrs = {**dict(c.attrs), "late": peer_rows.RING}
            return ir.Call(c.op, c.args, attrs=attrs, ret_ty=c.ty, span=c.span)

        made = [structural_map(s, (ir.Call, late)) for s in compute]
        return made if found else None

    def _planned(self, p: Pipeline) -> Ring:
        """The ring that a loop asks for."""
        return Ring(-1, min(self.depth, int(p.loop.annotations["ts.num_stages"])), [], self.wanted)

    def _new_ring(self, p: Pipeline, buffers: list[Any]) -> tuple[Ring, dict[Any, Any]]:
        """A ring for some of a loop's buffers, and these with a stage axis."""
        asked = int(p.loop.annotations["ts.num_stages"])
        place = loc_of(p.loop.span)
        ring = Ring(
            len(self.plan.rings),
            min(self.depth, asked),
            [b.name for b in buffers],
            self.wanted,
            asked=asked,
            loc=place,
            below=len(self._scales(p.loop)),
        )
        self.plan.rings.append(ring)
        staged = {b: _staged(b, ring.depth) for b in buffers}
        self.staged.update(staged)
        self.plan.ring_of.update(dict.fromkeys(staged.values(), ring.number))
        self.plan.stages.update(dict.fromkeys(staged.values(), asked // ring.depth))
        return ring, staged

    def _ring_for(self, p: Pipeline, buffers: list[Any]) -> tuple[Ring, dict[Any, Any]]:
        """The ring that another loop shares with this one for these buffers, else a new one."""
        if buffers[0] not in self.staged:
            return self._new_ring(p, buffers)
        staged = {b: self.staged[b] for b in buffers}
        return self.plan.rings[self.plan.ring_of[staged[buffers[0]]]], staged

    def _by_reader(self, p: Pipeline) -> Any:
        """The loop with a ring for each first reader, in the order of their copies."""
        guarded = p.with_guards()
        head = guarded.stmts[guarded.first : guarded.last + 1]
        why = self._unfit(p, Ring(-1, 1, [], self.wanted))
        groups = _first_readers(p)
        if why is None and len(groups) > 1 and any(splitting.waits(s) for s in head):
            why = Kept(loc_of(p.loop.span), "copies that wait for others have several first readers")
        if why is not None:
            self.reasons[p.loop.loop_var] = why
            return self.visit(p.loop)
        span, p = p.loop.span, guarded
        copies = [s for s in head if not _consumed(s, p)]
        fill: list[Any] = []
        compute = [s for s in (*head, *p.stmts[p.last + 1 :]) if _consumed(s, p) or isinstance(s, tirx.Bind)]
        before: list[list[Any]] = [[] for _ in range(len(compute) + 1)]
        behind: list[list[Any]] = [[] for _ in range(len(compute) + 1)]
        for k, buffers in enumerate(groups):
            ring, staged = self._ring_for(p, buffers)
            filled, read = self._counter(ring, "_filled"), self._counter(ring, "_read")
            mine = [s for s in copies if p.filled(s) in buffers or k == 0 and p.filled(s) not in p.fills]
            fill += [
                token("acquire", ring.number, now(filled), span, tiles=_tiles(ring, buffers)),
                *[_in_stage(_asynchronous(s, p, ring), staged, _stage(filled, ring.depth)) for s in mine],
                token("commit", ring.number, now(filled), span),
                tirx.BufferStore(filled, now(filled) + 1, [ZERO], span),
            ]
            readers = [i for i, s in enumerate(compute) if staged.keys() & buffer_uses(s).keys()]
            readers = readers or [len(compute)]
            compute = [_in_stage(s, staged, _stage(read, ring.depth)) for s in compute]
            before[readers[0]].append(token("wait", ring.number, now(read), span))
            behind[readers[-1]] += [
                token("release", ring.number, now(read), span),
                tirx.BufferStore(read, now(read) + 1, [ZERO], span),
            ]
        out = [t for i in range(len(compute) + 1) for t in (*before[i], *compute[i : i + 1], *behind[i])]
        return _loop(p.loop, [p.body([*p.stmts[: p.first], *fill, *out])])

    def singles(self, s: Any, alone: Callable[[Any], bool], single_depth: int, again: bool = False) -> Any:
        """A statement in which copies outside pipelined loops fill rings of their own, where ``alone`` allows
        it and nothing but products, of which one has its other operand in a ring, reads what they fill,
        behind them in their sequence. ``again``: a loop stands around it, so that such a ring may have
        ``single_depth`` stages; else it has one."""
        if isinstance(s, tirx.AttrStmt) and s.attr_key != "ts.scale":
            return tirx.AttrStmt(
                s.node, s.attr_key, s.value, self.singles(s.body, alone, single_depth, again), s.span
            )
        if isinstance(s, tirx.For) and str((s.annotations or {}).get("ts.kind", "")) in (
            "serial",
            "persistent",
        ):
            return _loop(s, [self.singles(s.body, alone, single_depth, True)])
        if not isinstance(s, tirx.SeqStmt):
            return s
        stmts = [self.singles(x, alone, single_depth, again) for x in s.seq]
        for k in reversed(range(len(stmts))):
            buffer = filled_tile(stmts[k])
            if (
                buffer is not None
                and buffer not in self.views
                and alone(stmts[k].value)
                and self._only_products(stmts[k:], buffer)
            ):
                stmts[k:] = self._single(stmts[k], stmts[k + 1 :], buffer, single_depth if again else 1)
        return sequence(stmts)

    def _only_products(self, stmts: list[Any], buffer: Any) -> bool:
        """Whether a buffer is touched in these statements alone; the first fills it, the others multiply it,
        some by tiles of rings."""
        rings = set(self.staged.values())
        products = [c for s in stmts[1:] for c in splitting.calls(s) if c.op.name == "ts.gemm"]
        mine = [
            [r.source for r in c.args[:2]]
            for c in products
            if any(r.source.same_as(buffer) for r in c.args[:2])
        ]
        reads = sum(b.same_as(buffer) for pair in mine for b in pair)
        return (
            bool(mine) and reads + 1 == self.uses[buffer] and any(b in rings for pair in mine for b in pair)
        )

    def _single(self, copy: Any, rest: list[Any], buffer: Any, depth: int) -> list[Any]:
        """A copy and what follows it, with the buffer as a ring of its own."""
        ring, span = Ring(len(self.plan.rings), depth, [buffer.name], self.wanted, single=True), copy.span
        self.plan.rings.append(ring)
        staged = {buffer: _staged(buffer, depth)}
        self.staged.update(staged)
        self.plan.ring_of[staged[buffer]], self.plan.stages[staged[buffer]] = ring.number, 1
        filled, read = self._counter(ring, "_filled"), self._counter(ring, "_read")
        readers = [k for k, s in enumerate(rest) if buffer in buffer_uses(s)]
        rest = [_in_stage(s, staged, _stage(read, depth)) for s in rest]
        made = tirx.Evaluate(filling(FILLED_BY[self.wanted], copy.value, ring.number), span)
        fill = [
            token("acquire", ring.number, now(filled), span),
            _in_stage(made, staged, _stage(filled, depth)),
            token("commit", ring.number, now(filled), span),
            tirx.BufferStore(filled, now(filled) + 1, [ZERO], span),
        ]
        awaited = token("wait", ring.number, now(read), span)
        done = [
            token("release", ring.number, now(read), span),
            tirx.BufferStore(read, now(read) + 1, [ZERO], span),
        ]
        first, last = readers[0], readers[-1] + 1
        return [*fill, *rest[:first], awaited, *rest[first:last], *done, *rest[last:]]

    def _in_turn(self, p: Pipeline, ring: Ring, staged: dict[Any, Any]) -> Any:
        counter = self._counter(ring)
        stage, span = _stage(counter, ring.depth), p.loop.span
        inner = [_in_stage(s, staged, stage) for s in p.stmts]
        body = [
            *inner[: p.first],
            token("acquire", ring.number, now(counter), span),
            *inner[p.first : p.last + 1],
            token("commit", ring.number, now(counter), span),
            token("wait", ring.number, now(counter), span),
            *inner[p.last + 1 :],
            token("release", ring.number, now(counter), span),
            tirx.BufferStore(counter, now(counter) + 1, [ZERO], span),
        ]
        return _loop(p.loop, body)

    def _unfit(self, p: Pipeline, ring: Ring) -> Kept | None:
        """Why the copies of a loop must stay in turn, by the loop alone; None where they need not."""
        loc = loc_of(p.loop.span)
        if ring.form == AHEAD and ring.depth == 1:
            return Kept(loc, "a ring of one stage has none to copy ahead into")
        guarded = p.with_guards()
        head = guarded.stmts[guarded.first : guarded.last + 1]
        if any(splitting.releases(s) for s in head) and any(splitting.waits(s) for s in head):
            return Kept(loc, "a wait among the copies may be for what a signal among them sets off")
        if any(_consumed(s, guarded) and _sets_variables(s) for s in head):
            hint = "the assignment in front of the copies, or behind them"
            return Kept(loc, reason("a variable changes among the copies", hint))
        if ring.form == AHEAD:
            stmts = p.asynchronous(guarded.stmts)
            why = prefetch.unfit(self.program, p.loop, stmts, guarded.first, guarded.last, list(p.fills))
            return None if why is None else Kept(loc, why)
        return None

    def _counter(self, ring: Ring, which: str = "") -> Any:
        name = f"ring{ring.number}{which}"
        for known, _ in self.counters:
            if known.name == name:  # of a ring that another loop has, too
                return known
        made = tirx.decl_buffer((1,), "int32", name, scope="local.var", data_alignment=64, layout=None)
        self.counters.append((made, ring))
        return made


def _shared(draft: _Draft) -> set[Any]:
    """The tiles that several pipelined loops fill, and nobody touches elsewhere: these loops have one ring.
    Each fills them before it reads them, asks for as many stages, and copies what has one first reader there
    from tiles that had one in the first of these loops, whose ring it is."""
    loops: list[Any] = []
    structural_walk(draft.program.func.body, (tirx.For, loops.append))
    loops = [
        f
        for f in loops
        if str((f.annotations or {}).get("ts.kind", "")) == "pipelined"
        and not any(f.loop_var.same_as(v) for v in (*draft.narrow, *draft.reasons))
    ]
    inside = {f.loop_var: buffer_uses(f.body) for f in loops}
    found = {
        b
        for b, uses in draft.uses.items()
        if b.ty.storage_scope == "shared"
        and sum(b in u for u in inside.values()) > 1
        and sum(u.get(b, 0) for u in inside.values()) == uses
    }
    while True:
        first: dict[Any, tuple[frozenset[Any], int]] = {}  # tile → those of its ring, and its stages
        bad: set[Any] = set()
        for f in loops:
            mine = found & inside[f.loop_var].keys()
            p = pipeline_of(f, draft.uses, draft.views, True, True, found) if mine else None
            p = p if p is not None and draft.able(p) else None
            bad |= mine - (p.fills.keys() if p is not None else set())
            for group in map(frozenset, [] if p is None else _first_readers(p)):
                asked = int(f.annotations["ts.num_stages"])
                whole = next((first[b] for b in group if b in first), None)
                if whole is None:
                    first |= dict.fromkeys(group, (group, asked))
                elif not group <= whole[0] or asked != whole[1]:
                    bad |= group
        if not bad & found:
            return found
        found -= bad


def _tiles(ring: Ring, buffers: list[Any]) -> int | None:
    """Which of a ring's tiles a round fills, a bit each; None where it fills all of them."""
    mine = {b.name for b in buffers}
    return None if mine == set(ring.buffers) else sum(1 << k for k, b in enumerate(ring.buffers) if b in mine)


def _first_readers(p: Pipeline) -> list[list[Any]]:
    """The buffers that a loop fills, those together that the same statement is the first to read, in the
    order of their copies. Vectors, which are small, come with what is copied in front of them: a ring of
    their own would cost more than their memory."""
    found: dict[int, list[Any]] = {}
    before = -1
    for b, k in sorted(p.fills.items(), key=lambda item: item[1]):
        first = next((i for i in range(k + 1, len(p.stmts)) if b in buffer_uses(p.stmts[i])), len(p.stmts))
        if len(b.ty.shape) == 1 and before in found and first not in found:
            first = before
        found.setdefault(first, []).append(b)
        before = first
    return list(found.values())


def _loop(loop: Any, body: list[Any]) -> Any:
    return around(loop, sequence(body))


def now(counter: Any) -> Any:
    """A counter's value."""
    return tirx.BufferLoad(counter, [ZERO])


def _stage(counter: Any, depth: int) -> Any:
    return ZERO if depth == 1 else tirx.floormod(now(counter), tirx.IntImm("int32", depth))


def _consumed(stmt: Any, p: Pipeline) -> bool:
    """Whether a statement among the copies is none of them, nor what they need."""
    return p.filled(stmt) not in p.fills and not splitting.is_guard(stmt) and not isinstance(stmt, tirx.Bind)


def _sets_variables(stmt: Any) -> bool:
    found: list[Any] = []
    structural_walk(
        stmt,
        (tirx.BufferStore, lambda s: found.append(s) if s.buffer.ty.storage_scope == "local.var" else None),
    )
    structural_walk(stmt, (tirx.DeclBuffer, found.append))
    return bool(found)


def _asynchronous(stmt: Any, p: Pipeline, ring: Ring) -> Any:
    """A copy into a ring's stage as one that is complete only where its round is awaited."""
    if p.filled(stmt) not in p.fills:
        return stmt
    if stmt in p.gathers:
        return p.gathers[stmt].asynchronous(ring.number)
    if isinstance(stmt, tirx.IfThenElse):
        one, other = (_asynchronous(s, p, ring) for s in (stmt.then_case, stmt.else_case))
        return tirx.IfThenElse(stmt.condition, one, other, stmt.span)
    return tirx.Evaluate(filling(FILLED_BY[ring.form], stmt.value, ring.number), stmt.span)


def below_the_block(body: Any) -> dict[Any, tuple[str, ...]]:
    """The variables of loops inside scales below the block, and these scales, the outermost first."""
    found: dict[Any, tuple[str, ...]] = {}

    def look(s: Any) -> None:
        if scale := splitting.below(s):
            inside: list[Any] = []
            structural_walk(s.body, (tirx.For, lambda f: inside.append(f.loop_var)))
            found.update({v: (scale, *found.get(v, ())) for v in inside})

    structural_walk(body, (tirx.AttrStmt, look))
    return found


def _finished(program: TileProgram, body: Any, draft: _Draft) -> TileProgram:
    """Allocations and roles in their places: counters, and stages that are filled elsewhere than they are
    read, at the head of the kernel, or of the T.Scale whose executors have rings of their own (a tile may be
    allocated in the very loop that fills it)."""
    plan, heads = draft.plan, list[Any]()
    own: dict[int, list[Any]] = {ring.number: [] for ring in plan.rings if ring.below}
    for counter, ring in draft.counters:
        head = own.get(ring.number, heads)
        head += [tirx.AllocBuffer(counter, {}), tirx.BufferStore(counter, ZERO, [ZERO])]
    found: set[str] = set()
    structural_walk(
        body, (tirx.AttrStmt, lambda s: found.add(str(s.node.value)) if s.attr_key == "ts.role" else None)
    )
    plan.roles = [r for r in spec.ROLES if r in found] or ["all"]

    def place(s: Any) -> Any:
        new = draft.staged.get(s.buffer)
        if new is None:
            return s
        made = tirx.AllocBuffer(new, dict(s.annotations), s.span)
        ring = plan.rings[plan.ring_of[new]]
        if ring.form == IN_ORDER:
            return made
        own.get(ring.number, heads).append(made)
        return tirx.Evaluate(ZERO)

    body = structural_map(body, (tirx.AllocBuffer, place))

    def enter(s: Any) -> Any:
        inner = s.body
        if s.attr_key == "ts.kernel" and len(plan.roles) == 1:
            inner = tirx.AttrStmt(ir.StringImm(plan.roles[0]), "ts.role", ZERO, inner, s.span)
        innermost = s.attr_key == "thread_extent" and not (
            isinstance(inner, tirx.AttrStmt) and inner.attr_key == "thread_extent"
        )
        if heads and innermost:
            inner = tirx.SeqStmt([*heads, inner])
        if splitting.below(s):  # the innermost scale around a ring comes first
            mine = [own.pop(n, []) for n in _rings_in(inner) if own]
            inner = sequence([*(x for head in mine for x in head), inner])
        return s if inner is s.body else tirx.AttrStmt(s.node, s.attr_key, s.value, inner, s.span)

    done = program.with_body(structural_map(body, (tirx.AttrStmt, enter)))
    done.schedule = plan
    return done


def _rings_in(s: Any) -> list[int]:
    """The rings whose tokens stand in a statement."""
    found: list[int] = []
    structural_walk(
        s,
        (ir.Call, lambda c: found.append(int(c.attrs["ring"])) if c.op.name == "ts.ring_wait" else None),
    )
    return list(dict.fromkeys(found))


def _staged(buffer: Any, depth: int) -> Any:
    dt = str(getattr(buffer.ty.dtype, "dtype", buffer.ty.dtype))
    return tirx.decl_buffer(
        (depth, *buffer.ty.shape), dt, buffer.name, scope="shared", data_alignment=64, layout=None
    )


def _in_stage(stmt: Any, staged: dict[Any, Any], stage: Any) -> Any:
    """A statement with every access to a staged buffer directed to ``stage``."""
    if not staged.keys() & buffer_uses(stmt).keys():
        return stmt

    def region(r: Any) -> Any:
        new = staged.get(r.source)
        if new is None:
            return r
        return tirx.BufferRegion(new, [ir.Range.from_min_extent(stage, 1), *r.region])

    def load(e: Any) -> Any:
        new = staged.get(e.source)
        return e if new is None else tirx.BufferLoad(new, [stage, *e.indices])

    return structural_map(structural_map(stmt, (ir.TensorRegion, region)), (ir.TensorLoad, load))
