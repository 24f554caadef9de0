"""What a tile program touches, signals and awaits, and under which conditions: the material of the static
checks.

The program is read once. Every access keeps its region as terms, the conditions of its path, the variables
whose values make different executions of it (rank, block, executors below the block, loops, lanes), and where
it stands.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from tilescale import packets
from tilescale.compiler.ir.operations import effects_of, find
from tilescale.compiler.ir.pointed import address_of
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.scales import SCALES, WIDTHS
from tilescale.compiler.ir.source import loc_of
from tilescale.compiler.static.prove import STEP, Budget
from tilescale.compiler.static.reading import Reading
from tilescale.compiler.static.terms import FALSE, ONE, ZERO, Cond, Poly, at_least, negation, number
from tilescale.compiler.tvm_compat import ir, structural_walk, tirx
from tilescale.errors import Loc
from tilescale.language.symbolic import Sym, SymExpr, settle


@dataclass
class Memory:
    """A buffer: a parameter, an allocation, or a view of one (``base``). ``nest``: the T.Parallel nest that
    it is allocated in. ``keep``: counters that hold more than the signals of this launch add."""

    name: str
    scope: str
    shape: list[Poly]
    nest: int = 0
    base: Memory | None = None
    keep: bool = False

    @property
    def is_global(self) -> bool:
        return self.scope.startswith("global")

    @property
    def root(self) -> Memory:
        return self if self.base is None else self.base.root


@dataclass
class Place:
    """A statement in the program: its conditions, the atoms that number its executions, its order in the
    text."""

    loc: Loc | None
    what: str
    conds: tuple[Cond, ...]
    scope: tuple[int, ...]
    order: int
    nest: int
    #: serial loops around it, outermost first
    loops: tuple[int, ...]
    #: accesses of one phase are ordered by nothing between executors of different blocks; None where
    #: something may order them
    phase: int | None
    #: inside a while loop, which runs nobody knows how often
    endless: bool


@dataclass
class Access:
    """A region that a statement reads, writes or updates (atomically); ``owner``: whose memory, None for
    one's own."""

    memory: Memory
    mode: str
    low: list[Poly]
    extent: list[Poly]
    at: Place
    owner: Poly | None = None
    reach: str = "block"


@dataclass
class Signal:
    """A statement that adds ``amount`` to (``op`` "set": stores it in) a counter."""

    memory: Memory
    index: list[Poly]
    amount: Poly
    op: str
    at: Place
    owner: Poly | None
    reach: str


@dataclass
class Wait:
    memory: Memory
    index: list[Poly]
    value: Poly
    cmp: str
    at: Place
    reach: str


@dataclass
class Peer:
    """A rank, or a block of the cluster, that a statement names."""

    owner: Poly
    count: Poly
    reach: str
    side: str
    at: Place


@dataclass
class Nest:
    """A T.Parallel (T.vectorized) nest. ``inner``: atoms made inside it. ``single``: no operations on tiles
    in its lanes."""

    number: int
    lanes: list[int]
    at: Place
    first_atom: int = 0
    last_atom: int = 0
    single: bool = True


@dataclass
class Facts:
    """All that was read from a program."""

    accesses: list[Access] = field(default_factory=list)
    signals: list[Signal] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    peers: list[Peer] = field(default_factory=list)
    nests: dict[int, Nest] = field(default_factory=dict)
    ranks: Poly = ONE
    #: executors below the block run at once, or blocks reach into one another's shared memory: the text's
    #: order is not that of time
    concurrent: bool = False


class Collector(Reading):
    """One reading of one program."""

    def __init__(
        self,
        program: TileProgram,
        ranks: int | None,
        world: int | None,
        values: dict[str, int],
        budget: Budget,
    ):
        super().__init__()
        self.program, self.found, self.budget = program, Facts(), budget
        self.memories: dict[Any, Memory] = {}
        t = self.terms
        self.symbols: dict[str, Poly] = {}
        alike = _shared_extents(program)
        for name, var in program.symbols.items():
            role = "extent" if name in alike else "own extent"
            self.symbols[name] = number(values[name]) if name in values else t.var(name, role, 1)
            self.names[var] = self.symbols[name]
        if ranks is None and not _names_ranks(program.func.body):
            ranks = 1  # what one rank does says all
        self.count = number(ranks) if ranks is not None else t.var("n", "ranks", 1, world)
        self.found.ranks = self.count
        self.rank = ZERO if ranks == 1 else t.var("rank", "rank", 0, self.count - 1)
        self.conds: list[Cond] = []
        self.scope: list[int] = [next(iter(self.rank.atoms))] if self.rank.terms else []
        self.loops: list[int] = []
        self.executors: list[tuple[str, Poly, Poly]] = []
        self.order = 0
        self.phase: int | None = 0
        self.endless = 0
        self.single = True
        self.here: Loc | None = None
        self.blocks: list[Poly] = []
        self._parameters(values)
        launch = program.launch
        self.cluster = launch.cluster[0] * launch.cluster[1] * launch.cluster[2]
        self.acquires = set(self._acquiring(program.func.body))

    def _parameters(self, values: dict[str, int]) -> None:
        for p in self.program.params:
            if hasattr(p.spec, "shape"):
                extents = p.spec.shape
                if getattr(p.spec, "kind", "") == "packets":  # its IR counts packets
                    *outer, last = p.spec.slots
                    extents = (*outer, last // packets.each(p.spec.of.bits))
                shape = [self._extent(e) for e in extents]
                keep = bool(getattr(p.spec, "keep", False))
                self.memories[p.var] = Memory(p.name, p.var.ty.storage_scope, shape, keep=keep)
            elif "int" in str(p.spec.dtype):
                given = p.name in values
                self.names[p.var] = (
                    number(int(values[p.name])) if given else self.terms.var(p.name, "arg", None)
                )

    def _extent(self, extent: Any) -> Poly:
        settled = settle(extent)
        if isinstance(settled, Sym):
            return self.symbols[settled.name]
        if isinstance(settled, SymExpr):
            a, b = (self._extent(x) for x in settled.args)
            if settled.op in ("//", "%"):
                return self.terms.div(a, b) if settled.op == "//" else self.terms.mod(a, b)
            return a + b if settled.op == "+" else a - b if settled.op == "-" else a * b
        return number(int(settled))

    def run(self) -> Facts:
        self.stmt(self.program.func.body)
        self.found.concurrent = self.found.concurrent or self.cluster > 1
        return self.found

    # -- where we are
    # ---------------------------------------------------------------------------------------------
    def place(self, node: Any, what: str) -> Place:
        self.order += 1
        self.budget.spend(STEP)
        self.here = loc_of(getattr(node, "span", None)) or self.here
        return Place(
            self.here,
            what,
            tuple(self.conds),
            tuple(self.scope),
            self.order,
            self.terms.nest,
            tuple(self.loops),
            self.phase,
            bool(self.endless),
        )

    @contextmanager
    def given(self, *conds: Cond) -> Iterator[None]:
        """Inside, the conditions hold."""
        before = len(self.conds)
        self.conds += [c for c in conds if c.kind != "true"]
        yield
        del self.conds[before:]

    # -- memory
    # ---------------------------------------------------------------------------------------------------
    def load(self, e: Any) -> None:
        """A single element that an expression reads."""
        self._single(self.memories[e.source], "read", e.indices, self.place(e, "read"))

    def _single(self, memory: Memory, mode: str, indices: Any, at: Place) -> None:
        if memory.scope == "global.signal" or memory.scope == "shared.signal":
            self._lose_order()
            memory.root.keep = memory.root.keep or mode != "read"
        low = [self.term(i) for i in indices]
        self.found.accesses.append(Access(memory, mode, low, [ONE] * len(low), at))

    def scale_value(self, name: str, which: int) -> Poly:
        """The own index (0) or the count (1) at a scale."""
        for scale, count, own in self.executors:
            if scale == name:
                return count if which else own
        if name == "device":
            return self.count if which else self.rank
        if name in ("grid", "block"):
            total, index = ONE, ZERO
            for block, extent in zip(self.blocks, self._grid()):
                index, total = index + block * total, total * extent
            return total if which else index
        if name == "cta_cluster" and self.cluster > 1:
            return (
                number(self.cluster)
                if which
                else self.terms.var("cluster_block", "unclear", 0, self.cluster - 1)
            )
        return number(which)

    def _grid(self) -> list[Poly]:
        grid = self.program.launch.grid
        return [number(e) if isinstance(e, int) else self.term(e) for e in grid]

    # -- statements
    # -----------------------------------------------------------------------------------------------
    def stmt(self, s: Any) -> None:
        method = getattr(self, "_s_" + type(s).__name__, None)
        if method is not None:
            method(s)

    def _s_SeqStmt(self, s: Any) -> None:
        before = len(self.conds)
        for x in s.seq:
            self.stmt(x)
        del self.conds[before:]  # what assertions in it said

    def _s_AllocBuffer(self, s: Any) -> None:
        ty = s.buffer.ty
        shape = [number(int(e)) for e in ty.shape]
        self.memories[s.buffer] = Memory(s.buffer.name, ty.storage_scope, shape, self.terms.nest)

    def _s_DeclBuffer(self, s: Any) -> None:
        old, ty = self.memories[s.data.args[0]], s.buffer.ty
        if address_of(s) is not None:
            shape = [self.term(e) for e in ty.shape]
            self.memories[s.buffer] = Memory(s.buffer.name, "global", shape, old.nest)
            return
        self.memories[s.buffer] = Memory(
            s.buffer.name, old.scope, [self.term(e) for e in ty.shape], old.nest, old
        )

    def _s_Bind(self, s: Any) -> None:
        self.visit(s.value)
        dtype = str(s.var.ty)
        if dtype == "bool":
            self.tests[s.var] = self.cond(s.value)
        elif "int" in dtype:
            made = self.names[s.var] = self.term(s.value)
            atoms = [k for k in made.atoms if self.terms.atoms[k].name == s.var.name + "_n"]
            if len(atoms) == 1:
                self.terms.atoms[atoms[0]].shown = (s.var.name, made)

    def _s_BufferStore(self, s: Any) -> None:
        self.visit(s.value)
        for i in s.indices:
            self.visit(i)
        self._single(self.memories[s.buffer], "write", s.indices, self.place(s, "assignment"))

    def _s_IfThenElse(self, s: Any) -> None:
        self.visit(s.condition)
        test = self.cond(s.condition)
        self._around(s)
        with self.given(test):
            self.stmt(s.then_case)
        if s.else_case is not None:
            with self.given(negation(test)):
                self.stmt(s.else_case)

    def _s_While(self, s: Any) -> None:
        self._lose_order()
        self.visit(s.condition)
        self.endless += 1
        with self.given(self.nobody_knows()):
            self.stmt(s.body)
        self.endless -= 1

    def _s_For(self, s: Any) -> None:
        if s.kind in (tirx.ForKind.PARALLEL, tirx.ForKind.VECTORIZED) and not self.terms.nest:
            self._nest(s)
            return
        self.visit(s.extent)
        self._around(s)
        with self._loop(s, "lane" if s.kind in (tirx.ForKind.PARALLEL, tirx.ForKind.VECTORIZED) else "loop"):
            self.stmt(s.body)

    def _number(self, name: str, role: str, extent: Poly) -> tuple[Poly, list[int], list[Cond]]:
        """A variable from 0 to ``extent`` - 1, its atom, and that there is such a number. Of one alone there
        is no variable."""
        if extent.const == 1:
            return ZERO, [], []
        var = self.terms.var(name, role, 0, extent - 1)
        known = extent.const
        return var, list(var.atoms), [at_least(extent - 1)] if known is None else [FALSE] if known < 1 else []

    @contextmanager
    def _loop(self, s: Any, role: str) -> Iterator[list[int]]:
        self.names[s.loop_var], atoms, conds = self._number(s.loop_var.name, role, self.term(s.extent))
        before = len(self.scope), len(self.loops)
        self.scope += atoms
        self.loops += atoms if role == "loop" else []
        with self.given(*conds):
            yield atoms
        del self.scope[before[0] :]
        del self.loops[before[1] :]

    def _nest(self, s: Any) -> None:
        """All loops of a nest at once; what reads memory inside is numbered as the nest's."""
        depth = int(s.annotations.get("ts.depth", 1)) if s.annotations else 1
        number_ = len(self.found.nests) + 1
        nest = Nest(
            number_, [], self.place(s, "T.Parallel" if s.kind == tirx.ForKind.PARALLEL else "T.vectorized")
        )
        self.found.nests[number_] = nest
        self._around(s)
        nest.first_atom = len(self.terms.atoms)
        outer, self.single = self.single, True
        self.terms.nest = number_
        self._lanes(s, depth, nest)
        self.terms.nest = 0
        nest.last_atom, nest.single = len(self.terms.atoms), self.single
        self.single = outer

    def _lanes(self, s: Any, depth: int, nest: Nest) -> None:
        self.visit(s.extent)
        with self._loop(s, "lane") as atoms:
            nest.lanes += atoms
            inner = s.body
            if depth > 1 and isinstance(inner, tirx.For):
                self._lanes(inner, depth - 1, nest)
            else:
                self.stmt(inner)

    def _s_AttrStmt(self, s: Any) -> None:
        if s.attr_key == "thread_extent":
            var, atoms, conds = self._number(s.node.var.name, "block", self.term(s.value))
            self.names[s.node.var] = var
            self.blocks.append(var)
            self.scope += atoms
            with self.given(*conds):
                self.stmt(s.body)
            return
        name = SCALES[int(s.value.value)] if s.attr_key == "ts.scale" else ""
        if name not in WIDTHS:
            self.stmt(s.body)
            return
        before = len(self.conds)
        self.found.concurrent = True
        outer = next((WIDTHS[scale] for scale, _, _ in reversed(self.executors)), self.program.launch.threads)
        count = number(outer // WIDTHS[name])
        index, atoms, _ = self._number(name, "exec", count)
        self.executors.insert(0, (name, count, index))
        depth = len(self.scope)
        self.scope += atoms
        self.stmt(s.body)
        del self.scope[depth:]
        self.executors.pop(0)
        del self.conds[before:]

    def _s_Evaluate(self, s: Any) -> None:
        if isinstance(s.value, ir.Call):
            self.visit(s.value)

    # -- operations
    # -----------------------------------------------------------------------------------------------
    def operation(self, op: Any, call: Any) -> None:
        """What an operation touches, by its effect table."""
        for arg in call.args:
            if isinstance(arg, ir.TensorRegion):
                for r in arg.region:
                    self.visit(r.min)
                    self.visit(r.extent)
            elif not isinstance(arg, ir.StringImm):
                self.visit(arg)
        at = self.place(call, op.written(call))
        reach = str(call.attrs["reach"]) if call.attrs is not None and "reach" in call.attrs else "block"
        owner: Poly | None = None
        named: Any = None
        for a in effects_of(call):
            whose = None if a.owner is None else self.term(a.owner)
            owner, named = (whose, a.owner) if whose is not None else (owner, named)
            memory = self.memories[a.region.source]
            if memory.scope.endswith("signal"):
                memory.root.keep = (
                    memory.root.keep or a.mode != "read" and op.name not in ("signal", "remote_copy")
                )
                continue
            low, extent = (
                [self.term(r.min) for r in a.region.region],
                [self.term(r.extent) for r in a.region.region],
            )
            when = () if a.when is None else (self.cond(a.when),)
            where = replace(at, conds=at.conds + when)
            if any(e.const != 1 for e in extent):
                self.single = False
            self.found.accesses.append(Access(memory, a.mode, low, extent, where, whose, reach))
        if owner is not None:
            count = self.count if reach == "device" else number(self.cluster)
            side = str(call.attrs.get("side", "dst"))
            if (
                isinstance(named, ir.Call) and named.op.name == "ts.scale_rank"
            ):  # the team's ranks are there: `Exists` asks for them
                self.found.peers.append(
                    Peer(self.term(named.args[0]), self.term(named.args[1]), reach, side, at)
                )
            else:
                self.found.peers.append(Peer(owner, count, reach, side, at))
            self.found.concurrent = self.found.concurrent or reach == "cta_cluster"
        if op.name == "signal":
            self._signal(call.args[0], call.args[1], str(call.attrs["op"]), at, owner, reach)
        elif op.name == "remote_copy" and len(call.args) > 3:
            to = owner if op.side(call) == "dst" else None
            self._signal(call.args[3], call.args[4], str(call.attrs["signal_op"]), at, to, reach)
        elif op.name == "wait":
            memory, index = self._counter(call.args[0])
            self.found.waits.append(
                Wait(memory, index, self.term(call.args[1]), str(call.attrs["cmp"]), at, reach)
            )
        elif op.name == "team":
            members, lowest, highest, ranks = (self.term(a) for a in call.args[2:])
            where = replace(at, conds=(*at.conds, at_least(members - 1)), what="T.Scale")
            self.found.peers += [Peer(rank, ranks, "device", "team", where) for rank in (lowest, highest)]
        if op.name in ("assert", "assume", "team"):
            self.conds += [c for c in (self.cond(call.args[0]),) if c.kind != "true"]
        self._barrier(op, call, reach, everyone=call.attrs is None or "team" not in call.attrs)

    def _counter(self, region: Any) -> tuple[Memory, list[Poly]]:
        return self.memories[region.source], [self.term(r.min) for r in region.region]

    def _signal(self, region: Any, amount: Any, op: str, at: Place, owner: Poly | None, reach: str) -> None:
        memory, index = self._counter(region)
        self.found.signals.append(Signal(memory, index, self.term(amount), op, at, owner, reach))

    # -- what orders blocks and ranks
    # -----------------------------------------------------------------------------
    def _barrier(self, op: Any, call: Any, reach: str, everyone: bool) -> None:
        """Behind a barrier that everyone comes to begins a new phase; behind anything else that may order, a
        team's barrier too, none is known."""
        if not op.acquires(call):
            return
        alone = self.loops or self.terms.nest or self.endless or self.executors or self._under_a_condition()
        straight = everyone and not alone
        if straight and op.name == "barrier" and reach == "device":
            self.phase = self.order
        elif straight and op.name in ("barrier", "team_sync") and self.phase is not None:
            self.phase = self.order
        else:
            self.phase = None

    def _under_a_condition(self) -> bool:
        """Whether executors may differ in whether they come here."""
        t = self.terms
        leaves = {a for c in self.conds for a in t.leaves_of_cond(c) if t.atoms[a].kind in ("var", "opaque")}
        return any(t.atoms[a].role not in ("ranks", "extent", "own extent") for a in leaves)

    def _around(self, s: Any) -> None:
        if s in self.acquires:
            self._lose_order()

    def _lose_order(self) -> None:
        self.phase = None

    def _acquiring(self, body: Any) -> list[Any]:
        """Loops and branches in which something may order what comes after it."""
        if not _acquires(body):
            return []
        found: list[Any] = []
        structural_walk(
            body, ((tirx.For, tirx.IfThenElse), lambda s: found.append(s) if _acquires(s) else None)
        )
        return found


def _acquires(body: Any) -> bool:
    found: list[Any] = []

    def look(call: Any) -> None:
        op = find(call)
        if op is not None and op.acquires(call):
            found.append(call)

    structural_walk(body, (ir.Call, look))
    structural_walk(body, (tirx.While, found.append))
    return bool(found)


def _shared_extents(program: TileProgram) -> set[str]:
    """Symbols in shapes of symmetric memory: a launch compares those between ranks."""
    out: set[str] = set()
    work = [
        e
        for p in program.params
        if getattr(p.spec, "kind", "tensor") in ("symm", "signal")
        for e in p.spec.shape
    ]
    while work:
        e = settle(work.pop())
        if isinstance(e, Sym):
            out.add(e.name)
        elif isinstance(e, SymExpr):
            work += e.args
    return out


def _names_ranks(body: Any) -> bool:
    """Whether a program says anything of other ranks."""
    found: list[Any] = []

    def look(call: Any) -> None:
        name = getattr(call.op, "name", "")
        if name in ("ts.scale_index", "ts.scale_count"):
            if str(call.args[0].value) == "device":
                found.append(call)
        elif (
            find(call) is not None
            and call.attrs is not None
            and "reach" in call.attrs
            and str(call.attrs["reach"]) == "device"
        ):
            found.append(call)

    structural_walk(body, (ir.Call, look))
    return bool(found)
