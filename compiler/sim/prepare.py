"""A tile program (or a scheduled one) → Python functions of an executor, made once and run by every executor
of every rank.

Each operation gives its own: ``TileOp.simulate`` in compiler/ops, beside its lowerings. What an operation
reads and writes is recorded here, from its effect table, so that the clocks read what the compiler derives
its fences from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from tilescale.compiler.ir.buffers import read_buffers, written_buffers
from tilescale.compiler.ir.contexts import Site, Value
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.operations import VOID, TileOp, effects_of, find, written
from tilescale.compiler.ir.pointed import address_of
from tilescale.compiler.ir.program import Launch, TileProgram
from tilescale.compiler.ir.scales import SCALES, WIDTHS
from tilescale.compiler.ir.source import loc_of
from tilescale.compiler.sim import bodies, flights, nest, rings
from tilescale.compiler.sim.expr import Expressions
from tilescale.compiler.sim.step import Step
from tilescale.compiler.sim.view import BufferInfo, View
from tilescale.compiler.tvm_compat import ir, structural_walk, tirx
from tilescale.errors import InternalError, TileSyntaxError
from tilescale.language.dtypes import BITS


@dataclass(frozen=True)
class Sending:
    """A statement that signals ``flag`` of ``peer`` (of the own rank or block without). index: of the
    counter, None where it is computed."""

    site: Site
    flag: View
    peer: Value | None
    index: tuple[int, ...] | None = None

    def target(self, ex: Any) -> tuple[Any, str] | None:
        """Home and name of the counter that it would signal by the variables of an executor as they are; None
        where one has no value."""
        try:
            counters = self.flag.storage(ex, None if self.peer is None else self.peer(ex))
            index = self.flag.index(ex)
        except (TypeError, LookupError):
            return None
        return counters.home, f"{counters.name}[{', '.join(map(str, index))}]"


@dataclass
class Prepared:
    """A program that a machine can run."""

    program: TileProgram
    launch: Launch
    cluster: tuple[int, int, int]
    site: Site
    body: Step = Step(lambda ex: None)
    variables: int = 0
    buffers: list[BufferInfo] = field(default_factory=list)
    #: executors of a block, those of all its scales
    executors: int = 1
    #: ring with asynchronous copies → where the places of its engines among the executors of a block begin,
    #: and how many they are; (ring, token) → where it stands
    units: dict[int, tuple[int, int]] = field(default_factory=dict)
    #: those of operations beside their executors (flights.py): their kind, and where their places begin and
    #: how many they are
    beside: list[tuple[str, int, int]] = field(default_factory=list)
    tokens: dict[tuple[int, str], list[Site]] = field(default_factory=dict)
    #: the role whose statement it is, by the statement's number (none: everyone's)
    role_of: dict[int, str] = field(default_factory=dict)
    #: loops around a statement, by the statement's number; the statements that signal a buffer, by its name
    loops_of: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    signalled: dict[str, list[Sending]] = field(default_factory=dict)
    #: by the name of a signal the counters that statements wait for, None where the index is computed
    awaited: dict[str, set[tuple[int, ...] | None]] = field(default_factory=dict)
    #: signals (by slot) in whose counters the order of additions may say something: some statement does more
    #: than add to them and wait for enough
    ordered: set[int] = field(default_factory=set)
    #: the T.Parallel nest around a statement, by the statement's number
    nest_of: dict[int, Any] = field(default_factory=dict)
    #: statements that stand under a condition, by number
    guarded: set[int] = field(default_factory=set)
    #: of those that stand under no condition but that of teams, by number: the places of these teams' T.Scale
    team_of: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    sites: list[Site] = field(default_factory=list)
    slots: dict[Any, int] = field(default_factory=dict)
    names: dict[Any, int] = field(default_factory=dict)
    #: parameters whose values decide nothing, by name: tensors that no statement reads
    unread: set[str] = field(default_factory=set)
    #: whether values of floats may decide what a launch does: some integer or condition is made of them
    floats_decide: bool = False
    grid: tuple[Value, Value, Value] = (lambda ex: 1, lambda ex: 1, lambda ex: 1)


def prepare(program: TileProgram) -> Prepared:
    """A traced program behind the passes of the tile level, or at the scheduled level."""
    return Preparation(program).run()


class Preparation(Expressions):
    """One program on its way to functions; what ``TileOp.simulate`` is given."""

    def __init__(self, program: TileProgram):
        self.program = program
        launch = program.launch
        x, y, z = (*launch.cluster, 1, 1, 1)[:3]
        self.made = Prepared(program, launch, (x, y, z), Site(program.name, launch.loc, 0))
        self.made.sites.append(self.made.site)
        self.slots: dict[Any, int] = self.made.slots
        self.buffers: list[BufferInfo] = self.made.buffers
        self.lane_buffers: set[Any] = set()
        self.contended: set[Any] = set()
        self.tested: set[Any] = set()
        self.kept: Any = None  # the load by which the store that is made ready keeps half a byte
        self.loops: list[Any] = []
        self.branches: list[
            Any
        ] = []  # around a statement: of a team's the place of its T.Scale, of an author's None
        self.scales: list[tuple[str, int]] = []
        self.first: dict[tuple[tuple[str, int], ...], int] = {}
        self.queues: dict[tuple[str, tuple[tuple[str, int], ...]], int] = {}
        self.quiet = False
        self.barrier_counts: dict[Any, list[int]] = {}

    def run(self) -> Prepared:
        func, program = self.program.func, self.program
        written, read = written_buffers(program), read_buffers(func.body)
        self.shared_tiles = bodies.forks(func.body) or self.made.cluster != (1, 1, 1)
        self._units(func.body)
        self.own = bodies.own_registers(func.body) if self.shared_tiles else set()
        cell_bits = bodies.cell_bits(func.body)
        for p in program.params:
            if hasattr(p.spec, "shape"):
                bits = BITS[str(p.spec.dtype)]
                cells = bits // cell_bits.get(p.var, bits)
                info = BufferInfo(
                    p.name, str(p.spec.dtype), (), p.var.ty.storage_scope, cells, p.var in written
                )
                self._add(p.var, info)
        self.cell_bits = cell_bits
        if (
            self.shared_tiles
        ):  # what executors of a block update atomically; all else of its tiles is seen by the clocks alone
            self.contended = bodies.updated(func.body)
        self.contended |= {
            p.var
            for p in program.params
            if hasattr(p.spec, "shape") and p.var in written and (p.spec.kind != "tensor" or p.var in read)
        }
        self.made.unread = {
            p.name
            for p in program.params
            if hasattr(p.spec, "shape") and p.spec.kind in ("tensor", "symm") and p.var not in read
        }
        self.made.floats_decide = bodies.floats_decide(func.body)
        grid = [*program.launch.grid, 1, 1][:3]
        x, y, z = (self.scalar(tirx.IntImm("int32", n) if isinstance(n, int) else n) for n in grid)
        self.made.grid = (x, y, z)
        self.made.body = self.stmt(func.body)
        self.made.variables = len(self.made.names)
        return self.made

    def _units(self, body: Any) -> None:
        """Looks for what runs beside the executors that issue it."""

        def look(call: Any) -> None:
            if find(call) is not None and any(a.asynchronous for a in effects_of(call)):
                beside.append(call)

        beside: list[Any] = []
        structural_walk(body, (ir.Call, look))
        self.shared_tiles = self.shared_tiles or bool(beside)

    def queue(self, kind: str) -> int:
        """Where the places of the engines of one kind begin, for the executors that run the current
        statement."""
        key = kind, tuple(self.scales)
        if key not in self.queues:
            count = prod(n for _, n in self.scales)
            self.queues[key] = self.made.executors
            self.made.beside.append((kind, self.made.executors, count))
            self.made.executors += count
        return self.queues[key]

    def unit(self, ring: int) -> None:
        """Places among a block's executors for who performs the asynchronous copies of a ring: one for each
        executor that has such a ring."""
        if ring not in self.made.units:
            below = self.program.schedule.rings[ring].below
            count = prod(n for _, n in self.scales) if below else 1
            self.made.units[ring] = self.made.executors, count
            self.made.executors += count

    def token(self, call: Any, kind: str, ring: int) -> Site:
        """The site of a ring's token."""
        made = self.site(call, f"T.Pipelined ({kind} of ring {ring})")
        self.made.tokens.setdefault((ring, kind), []).append(made)
        return made

    def _add(self, var: Any, info: BufferInfo) -> int:
        self.slots[var] = len(self.buffers)
        self.buffers.append(info)
        return self.slots[var]

    def slot(self, var: Any) -> int:
        """Where executors keep a variable."""
        return self.made.names.setdefault(var, len(self.made.names))

    def site(self, node: Any, what: str) -> Site:
        """A statement for findings, numbered in program order."""
        keeps = self.kept is not None and self.kept.same_as(node)
        made = Site(what, loc_of(getattr(node, "span", None)) or self.here, len(self.made.sites), keeps)
        self.made.sites.append(made)
        self.made.loops_of[made.number] = tuple(self.loops)
        if self.role is not None:
            self.made.role_of[made.number] = self.role
        if self.branches:
            self.made.guarded.add(made.number)
            if None not in self.branches:
                self.made.team_of[made.number] = tuple(self.branches)
        if self.nest is not None:
            self.made.nest_of[made.number] = self.nest
        return made

    def view(self, region: Any, call: Any) -> View:
        """A region that ``call`` touches."""
        reach = str(call.attrs["reach"]) if call.attrs is not None and "reach" in call.attrs else "block"
        return View(self, region, reach, self.site_of(call))

    def site_of(self, call: Any) -> Site:
        """The site of the operation that is made ready; a new one where none is."""
        return self.current if self.current is not None else self.site(call, written(call))

    def signalling(
        self, call: Any, region: Any, amount: Any, op: str, peer: Value | None
    ) -> Callable[..., None]:
        """A signal of a counter (that ``peer`` owns): ``signal(ex, owner)``. A release: everything that the
        executor posted has landed by then. A third argument is who signals in the executor's place."""
        flag, value, site = self.view(region, call), self.scalar(amount), self.site(call, written(call))
        self.made.signalled.setdefault(flag.info.name, []).append(
            Sending(site, flag, peer, _constant(region))
        )
        if op != "add" or not isinstance(amount, tirx.IntImm) or int(amount.value) < 0:
            self.made.ordered.add(flag.slot)

        def run(ex: Any, owner: int | None, by: Any = None) -> None:
            counter = flag.counter(ex, owner)
            if counter is not None:
                ex.flush()
                counter.signal(ex if by is None else by, value(ex), op, site)

        return run

    def awaiting(self, region: Any, call: Any) -> Site:
        """The site of a wait for a counter."""
        self.made.awaited.setdefault(self.buffers[self.slots[region.source]].name, set()).add(
            _constant(region)
        )
        if str(call.attrs["cmp"]) not in ("ge", "gt"):
            self.made.ordered.add(self.slots[region.source])
        return self.site(call, "T.wait")

    def peeking(self, region: Any) -> None:
        """A counter is looked at without a wait: that it is not there yet says something, too."""
        self.made.ordered.add(self.slots[region.source])

    def filling(self, region: Any) -> None:
        """The author's copies by TMA fill a buffer, and what it is a view of."""
        slot: int | None = self.slots[region.source]
        while slot is not None:
            self.buffers[slot].filled, slot = True, self.buffers[slot].base

    here: Any = None
    current: Site | None = None
    role: str | None = None
    nest: Any = None
    opened: Any = None  # where the innermost T.Scale("device") stands, whose branch is a team's

    # -- statements
    # -----------------------------------------------------------------------------------------------
    def stmt(self, s: Any, *, quiet: bool = False) -> Step:
        """A statement ready to run. ``quiet``: nothing inside is a point where others go on (the lanes of a
        nest are one step)."""
        method = getattr(self, "_s_" + type(s).__name__, None)
        if method is None:
            raise InternalError(
                f"the simulator does not know the statement {type(s).__name__}", loc=loc_of(s.span)
            )
        before, outer = self.here, self.quiet
        self.here, self.quiet = loc_of(s.span) or self.here, self.quiet or quiet
        try:
            made: Step = method(s)
            return made
        finally:
            self.here, self.quiet = before, outer

    def _visible(
        self, node: Any, run: Callable[[Any], Any], intent: str = "", pulls: Value | None = None
    ) -> Step:
        """A step that others may see: they get a turn before it. ``pulls``: the peer whose memory it
        reads."""
        if self.quiet or not self._seen(node):
            return Step(run)
        intent = intent or self._intent(node)

        def slowly(ex: Any) -> Iterator[str]:
            if pulls is not None:
                ex.pulls = pulls(ex)
            yield intent
            ex.pulls = None
            run(ex)

        return Step(slowly, True)

    def _intent(self, node: Any) -> str:
        """What a step is about to do: atomic updates other than loads release, and one of a peer's memory
        sees what it wrote there."""
        found: list[Any] = []

        def look(call: Any) -> None:
            if call.op.name == "ts.remote_atomic" or (
                call.op.name == "ts.atomic" and str(call.attrs["kind"]) != "load"
            ):
                found.append(call)

        structural_walk(node, (ir.Call, look))
        return "atomic" if found else "run"

    def _seen(self, node: Any) -> bool:
        found: list[Any] = []

        def look(buffer: Any) -> None:
            if buffer in self.contended:
                found.append(buffer)

        structural_walk(
            node,
            (
                (ir.Call, lambda c: found.append(c) if c.op.name == "ts.test" else None),
                ((ir.TensorRegion, ir.TensorLoad), lambda n: look(n.source)),
                (tirx.BufferStore, lambda n: look(n.buffer)),
            ),
        )
        return bool(found)

    def _s_SeqStmt(self, s: Any) -> Step:
        steps: list[Step] = []
        regions: list[Any] = []
        for x in s.seq:
            role = bodies.role(x)
            if regions and (
                role is None or int(x.value.value) == 0
            ):  # the first role begins a new set of regions
                steps.append(self._roles(regions))
                regions = []
            if role is None:
                steps.append(self.stmt(x))
            else:
                regions.append(x)
        return _sequence([*steps, self._roles(regions)] if regions else steps)

    def _roles(self, regions: list[Any]) -> Step:
        """Role regions that stand next to each other are executors of the block that run at once; behind them
        all have ended."""
        if len(regions) == 1 and bodies.role(regions[0]) == "all":
            return self.stmt(regions[0].body)
        site = self.site(regions[0], "the roles of T.Pipelined")
        first = self._reserve("role", len(regions))
        parts = []
        for region in regions:
            self.role = bodies.role(region)
            parts.append(((str(self.role), None), self.stmt(region.body)))
        self.role = None
        self.scales.pop()
        return Step(lambda ex: ex.machine.fork(ex, parts, first, site), True)

    def _s_Evaluate(self, s: Any) -> Step:
        op = find(s.value)
        if op is None:
            return Step(self.scalar(s.value)) if isinstance(s.value, ir.Call) else Step(lambda ex: None)
        run = self.performed(op, s.value)
        if not op.stops(s.value):
            return self._visible(
                s.value, run, "signal" if op.name == "signal" else "", self._pulled(op, s.value)
            )
        if op.waits:
            return Step(run, True)

        def slowly(ex: Any) -> Iterator[str]:
            yield "run"
            yield from run(ex)

        return Step(slowly, True)

    def _pulled(self, op: TileOp, call: Any) -> Value | None:
        """Whose memory (see View.peer) an operation reads; None for the own, and where finding that out reads
        memory itself."""
        access = next((a for a in effects_of(call) if a.owner is not None and a.mode == "read"), None)
        loads: list[Any] = []
        if (
            access is None
            or structural_walk(access.owner, (ir.TensorLoad, lambda e: loads.append(e)))
            or loads
        ):
            return None
        view, owner = self.view(access.region, call), self.scalar(access.owner)
        return lambda ex: view.peer(owner(ex))

    def performed(self, op: TileOp, call: Any) -> Any:
        """The operation between what it reads and writes being recorded: a function, a generator where the
        operation waits."""
        site = self.current = self.site(call, op.written(call))
        effects = effects_of(call)
        owner = next((self.scalar(a.owner) for a in effects if a.owner is not None), None)
        reach = str(call.attrs["reach"]) if "reach" in call.attrs else "block"
        accesses = [
            (
                self.view(a.region, call),
                a.half or a.mode,
                a.owner is not None,
                None if a.when is None else self.scalar(a.when),
            )
            for a in effects
            if not a.region.source.ty.storage_scope.endswith(("signal", "barrier", "packets"))
        ]
        ring = int(call.attrs["ring"]) if op.fills else None
        if ring is not None and any(a.asynchronous for a in effects):
            self.unit(ring)
        kind = op.queue(call)
        offset = self.queue(kind) if kind else 0
        accesses.sort(key=lambda a: a[1] != "read")  # what it reads is what was there before it wrote
        pulled = next((view for view, mode, remote, _ in accesses if remote and mode == "read"), None)
        simulate = op.simulate(call, self)
        self.current = None
        if not effects or op.completes:
            return simulate
        nothing = None if call.ty is None or str(call.ty) == str(VOID) else 0

        def run(ex: Any) -> Any:
            whose = None if owner is None else owner(ex)
            if whose is not None and not ex.machine.reaches(ex, whose, reach, site):
                return nothing
            if pulled is not None and whose is not None:
                ex.flush(pulled.peer(whose))  # it sees what it wrote there itself
            by = None if ring is None else rings.unit(ex, ring)
            reads, writes = flights.units(ex, kind, offset) if kind else (by, by)
            for view, mode, remote, when in accesses:
                by_whom = reads if mode == "read" else writes
                if when is None or ex.lanes is None:
                    if when is None or when(ex):
                        view.record(ex, mode, whose if remote else None, by_whom)
                    continue
                with nest.masked(ex, np.broadcast_to(when(ex), ex.lanes)) as some:
                    if some:
                        view.record(ex, mode, whose if remote else None, by_whom)
            for observer in ex.machine.observers:
                observer.performed(ex, op, site, whose, accesses)
            return simulate(ex, reads or writes) if kind else simulate(ex)

        if not op.stops(call):
            return run

        def slowly(ex: Any) -> Iterator[str]:
            waiting = run(ex)
            if waiting is not None:
                yield from waiting

        return slowly

    def _s_AllocBuffer(self, s: Any) -> Step:
        ty = s.buffer.ty
        dtype = str(getattr(ty.dtype, "dtype", ty.dtype))
        shape = tuple(int(e) for e in ty.shape)
        scope = ty.storage_scope
        cells = BITS[dtype] // self.cell_bits.get(s.buffer, BITS[dtype])
        tracked = self.shared_tiles and s.buffer not in self.own
        info = BufferInfo(s.buffer.name, dtype, shape, scope, cells, tracked, depth=self.depth, loc=self.here)
        slot = self._add(s.buffer, info)
        private, info = s.buffer in self.lane_buffers, self.buffers[slot]
        if scope == "shared.barrier":
            self.barrier_counts[s.buffer] = [int(n) for n in s.annotations["ts.counts"]]
        info.ring = self.program.schedule.ring_of.get(s.buffer) if self.program.schedule is not None else None

        def run(ex: Any) -> None:
            if scope.startswith("shared"):
                ex.mem[slot] = ex.block.own_tile(slot, ex, info.depth)
                return
            if private and ex.lanes is not None:
                info.shape = (*ex.lanes, *shape)
            ex.mem[slot] = ex.machine.allocate(slot, (ex.rank.number, ex.block.shown), ex.mem.__getitem__)

        return Step(run)

    def _s_DeclBuffer(self, s: Any) -> Step:
        if address_of(s) is not None:
            raise TileSyntaxError(
                "T.make_tensor is not there on the simulator: it has tensors, and no addresses",
                loc=loc_of(s.span),
                hint="one tensor with an axis for the groups",
            )
        old = self.slots[s.data.args[0]]
        info, ty = self.buffers[old], s.buffer.ty
        dtype = str(getattr(ty.dtype, "dtype", ty.dtype))
        cells = BITS[dtype] // self.cell_bits.get(s.buffer, BITS[dtype])
        extents = [self.scalar(e) for e in ty.shape]
        fixed = all(constant(e) is not None for e in ty.shape)
        shape = tuple(int(e) for e in ty.shape) if fixed else ()
        slot = self._add(
            s.buffer,
            BufferInfo(s.buffer.name, dtype, shape, info.scope, cells, info.tracked, old, depth=info.depth),
        )
        at: int | None = old
        while at is not None:
            self.buffers[at].viewed, at = True, self.buffers[at].base
        if s.data.args[0] in self.contended:
            self.contended.add(s.buffer)

        def run(ex: Any) -> None:
            shared = info.scope.startswith("shared")
            owner = (ex.rank.number, ex.block.shown)
            ex.mem[slot] = (
                ex.block.own_tile(slot, ex, info.depth)
                if shared
                else ex.machine.allocate(slot, owner, ex.mem.__getitem__)
                if fixed
                else ex.machine.view(slot, ex.mem[old], tuple(int(e(ex)) for e in extents))
            )

        return Step(run)

    def _s_Bind(self, s: Any) -> Step:
        slot, value = self.slot(s.var), self.scalar(s.value)

        def run(ex: Any) -> None:
            ex.v[slot] = value(ex)

        return self._visible(s.value, run)

    def _s_BufferStore(self, s: Any) -> Step:
        return self._visible(s, nest.store(self, s))

    def _s_IfThenElse(self, s: Any) -> Step:
        test = self.scalar(s.condition)
        at = loc_of(s.span)
        self.branches.append(at if at is not None and at == self.opened else None)
        then = self.stmt(s.then_case)
        other = Step(lambda ex: None) if s.else_case is None else self.stmt(s.else_case)
        self.branches.pop()

        def run(ex: Any) -> None:
            chosen = test(ex)
            if not isinstance(chosen, np.ndarray):
                (then if chosen else other).run(ex)
                return
            with nest.masked(ex, chosen) as some:
                if some:
                    then.run(ex)
            with nest.masked(ex, ~chosen) as some:
                if some:
                    other.run(ex)

        def slowly(ex: Any) -> Iterator[str]:
            if seen:
                yield intent
            step = then if test(ex) else other
            if step.yields:
                yield from step.run(ex)
            else:
                step.run(ex)

        seen, intent = not self.quiet and self._seen(s.condition), self._intent(s.condition)
        return Step(slowly, True) if seen or then.yields or other.yields else Step(run)

    def _s_While(self, s: Any) -> Step:
        self.loops.append(s)
        site = self.site(s, "while")
        test, body, loop = self.scalar(s.condition), self.stmt(s.body), len(self.made.sites)
        self.loops.pop()
        seen, intent = not self.quiet and self._seen(s.condition), self._intent(s.condition)

        def run(ex: Any) -> Iterator[str]:
            while True:
                if seen:
                    yield intent
                if not test(ex):
                    return
                ex.loop = site
                ex.machine.polling.turned(ex, loop)
                for observer in ex.machine.observers:
                    observer.turned(ex, loop)
                if not seen:
                    yield "run"  # a loop that polls must let those go on whom it polls for
                if body.yields:
                    yield from body.run(ex)
                else:
                    body.run(ex)

        return Step(run, True)

    def _s_For(self, s: Any) -> Step:
        if s.kind in (tirx.ForKind.PARALLEL, tirx.ForKind.VECTORIZED):
            outer, self.nest = self.nest, self.nest or loc_of(s.span) or self.here
            step = nest.parallel(self, s)
            self.nest = outer
            return step if step.yields else self._visible(s, step.run)
        slot, extent = self.slot(s.loop_var), self.scalar(s.extent)
        self.loops.append(s)
        body = self.stmt(s.body)
        self.loops.pop()

        def run(ex: Any) -> None:
            for i in range(extent(ex)):
                ex.v[slot] = i
                body.run(ex)

        def slowly(ex: Any) -> Iterator[str]:
            for i in range(extent(ex)):
                ex.v[slot] = i
                yield from body.run(ex)

        return Step(slowly, True) if body.yields else Step(run)

    def _s_AttrStmt(self, s: Any) -> Step:
        if s.attr_key == "thread_extent":
            slot, axis = self.slot(s.node.var), "xyz".index(s.node.thread_tag[-1])
            body = self.stmt(s.body)

            def enter(ex: Any) -> None:
                ex.v[slot] = ex.block.index[axis]

            return _sequence([Step(enter), body])
        if s.attr_key == "ts.scale" and SCALES[int(s.value.value)] in WIDTHS:
            return self._scale(SCALES[int(s.value.value)], s)
        before = self.opened
        if s.attr_key == "ts.scale" and SCALES[int(s.value.value)] == "device":
            self.opened = loc_of(s.span)
        body = self.stmt(s.body)
        self.opened = before
        return body

    def _scale(self, name: str, s: Any) -> Step:
        """Executors below the block are concurrent, whether or not they wait for one another; the statement
        ends when all have."""
        outer = next(
            (WIDTHS[scale] for scale, _ in reversed(self.scales) if scale in WIDTHS),
            self.program.launch.threads,
        )
        count = outer // WIDTHS[name]
        first, site = self._reserve(name, count), self.site(s, f'T.Scale("{name}")')
        body = self.stmt(s.body)
        self.scales.pop()
        parts = [((name, index), body) for index in range(count)]
        return Step(lambda ex: ex.machine.fork(ex, parts, first, site), True)

    def _reserve(self, name: str, count: int) -> int:
        """Enters a scale (or roles): ``count`` executors in each that is there; where their numbers begin
        within a block."""
        self.scales.append((name, count))
        path = tuple(self.scales)
        if path not in self.first:
            self.first[path] = self.made.executors
            total = 1
            for _, n in path:
                total *= n
            self.made.executors += total
        return self.first[path]

    @property
    def depth(self) -> int:
        """How many scales below the block stand around the current statement."""
        return sum(name in WIDTHS for name, _ in self.scales)

    def executor_count(self) -> int:
        """How many executors of a block run the current statement (it stands in one role)."""
        count = 1
        for name, n in self.scales:
            count *= 1 if name == "role" else n
        return count


def _sequence(steps: list[Step]) -> Step:
    if len(steps) == 1:
        return steps[0]
    if not any(s.yields for s in steps):
        runs = [s.run for s in steps]

        def run(ex: Any) -> None:
            for one in runs:
                one(ex)

        return Step(run)

    def slowly(ex: Any) -> Iterator[str]:
        for s in steps:
            if s.yields:
                yield from s.run(ex)
            else:
                s.run(ex)

    return Step(slowly, True)


def _constant(region: Any) -> tuple[int, ...] | None:
    """The index of a counter where it is constant."""
    mins = [r.min for r in region.region]
    return tuple(int(m.value) for m in mins) if all(isinstance(m, tirx.IntImm) for m in mins) else None
