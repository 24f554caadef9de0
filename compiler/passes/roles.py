"""Two roles of a block: a producer that fills the rings of pipelined loops, a consumer that does everything
else.

A role region is a statement cut in two, of which both parts run at once; what stands behind them waits for
both. The producer's part has the copies into the rings, the waits that guard them, and of the rest only what
decides whether, when and where they are made: loops, conditions, names and scalar variables, copied under
names of their own. The consumer's part is everything but those copies. Regions are as large as can be, best
the whole kernel, so that the producer runs ahead across tiles.

Why the order of the tile program still holds (docs/LANGUAGE.md, "Order"):

- What the consumer reads of stage n, and everything behind that, comes after the copies of round n: commit →
  wait.
- A copy into a stage comes after its readers of the round before: release → acquire.
- A wait goes to the producer where copies stand behind it, and they come after it there. Directly in front of
  the copies of its loop it goes there alone: the consumer awaits the round behind it, which the producer
  commits behind the wait. So does any other wait where the consumer touches nothing that it could be for
  (`_Cutter.unobserving`); else both make it, since the consumer's own accesses need it too. Both see it come
  true: only conditions that stay true are taken apart.
- Signals stay with the consumer. A signal must follow all earlier accesses of its block, the copies' reads of
  global memory among them: the consumer has awaited every earlier round, and an awaited round is complete.
  Copies of later rounds may be made before the signal; reads that move up across a release break nothing that
  the tile program promised.
- An atomic operation that is looked at stays with the consumer where nothing that is copied changes while the
  kernel runs: tensors of this rank alone that the kernel does not write. What it releases comes from blocks
  of the same launch (docs/LANGUAGE.md, "Order").
- A copy may run ahead of what the block itself writes, so no region holds both a copy and a local write of
  what it reads. A put to another rank's twin of it is allowed: what a remote copy wrote may be read only
  behind a wait or a barrier, which order the copies too.
- Under a condition around a loop's whole round both roles fill and read the same rounds: each decides by what
  does not change while the kernel runs (`known_early`), and a ring's counters count those rounds alone.
- Nobody waits for ever who did not before: the producer at any place waits for rounds and signals of earlier
  places only, and so does the consumer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilescale.compiler.ir.buffers import read_buffers, written_buffers
from tilescale.compiler.ir.operations import REGISTRY, VOID, effects_of, name_of, operations
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.scales import EXECUTORS, SCALES
from tilescale.compiler.ir.source import loc_of
from tilescale.compiler.ir.statements import sequence, statements
from tilescale.compiler.passes import remote_puts
from tilescale.compiler.passes.held import held_of_tensors, looked_up
from tilescale.compiler.passes.remote_puts import COMMUNICATOR, is_put, puts_of
from tilescale.compiler.tvm_compat import ir, structural_map, structural_walk, tirx

ROLES = ("producer", "consumer")
#: scales whose executors are parts of a block
BELOW = EXECUTORS[:-1]


class Unfit(Exception):
    """A statement cannot be cut in two; ``str`` says why, ``span`` where."""

    def __init__(self, reason: str, span: Any = None):
        super().__init__(reason)
        self.span = span


def below(s: Any) -> str:
    """The scale below the block that a statement opens; "" for any other."""
    scale = SCALES[int(s.value.value)] if isinstance(s, tirx.AttrStmt) and s.attr_key == "ts.scale" else ""
    return scale if scale in BELOW else ""


# ---- what a statement does


def calls(stmt: Any) -> list[Any]:
    """The operations of the language in a statement."""
    return [c for c, _ in operations(stmt)]


def synchronizes(call: Any) -> bool:
    """Whether a call is a barrier with other blocks."""
    return REGISTRY[call.op.name].synchronizes(call) != ""


def waits(stmt: Any) -> bool:
    return any(c.op.name == "ts.wait" or synchronizes(c) for c in calls(stmt))


def releases(stmt: Any) -> bool:
    """Whether others may go on behind a statement who waited for it."""
    return any(
        c.op.name in ("ts.atomic", "ts.remote_atomic") or REGISTRY[c.op.name].signals(c) or synchronizes(c)
        for c in calls(stmt)
    )


def conditional(body: Any) -> tuple[Any, ...]:
    """The names at the head of a loop's body, and the condition under which all that follows stands; () where
    there is none."""
    *names, last = statements(body)
    whole = isinstance(last, tirx.IfThenElse) and last.else_case is None
    return (*names, last) if whole and all(isinstance(s, tirx.Bind) for s in names) else ()


def of_round(loop: Any) -> list[Any]:
    """The statements of a loop's round, those under its condition where it is one."""
    under = conditional(loop.body)
    return statements(under[-1].then_case if under else loop.body)


def is_guard(stmt: Any) -> bool:
    """A wait, or waits under a condition."""
    if isinstance(stmt, tirx.IfThenElse):
        return is_guard(stmt.then_case) and (stmt.else_case is None or is_guard(stmt.else_case))
    if isinstance(stmt, tirx.SeqStmt):
        return all(is_guard(s) for s in stmt.seq)
    return name_of(stmt) == "wait"


def polls(call: Any) -> bool:
    """Whether a call acquires what others did, without waiting for it."""
    op = REGISTRY[call.op.name]
    return op.acquires(call) and not op.waits and str(call.ty) != str(VOID)


def steady(program: TileProgram, wait: Any) -> bool:
    """Whether the condition of a wait stays true once it is: a counter that only grows has come far enough.
    Such a wait may be made earlier, and twice."""
    if str(wait.attrs["cmp"]) not in ("ge", "gt"):
        return False
    flag = wait.args[0].source

    def grows(call: Any) -> bool:
        if call.op.name == "ts.signal":
            target, value, op = call.args[0], call.args[1], str(call.attrs["op"])
        elif call.op.name == "ts.remote_copy" and len(call.args) > 3:
            target, value, op = call.args[3], call.args[4], str(call.attrs["signal_op"])
        else:
            return True
        adds = op == "add" and isinstance(value, tirx.IntImm) and int(value.value) >= 0
        return not target.source.same_as(flag) or op == "max" or adds

    return all(grows(c) for c in calls(program.func.body))


def root(stmt: Any, buffer: Any) -> Any:
    """The buffer of which ``buffer`` is a view within ``stmt``, itself where it is none."""
    return root_in(views(stmt), buffer)


def views(stmt: Any) -> dict[Any, Any]:
    """The views that a statement declares, and what each is a view of."""
    bases: dict[Any, Any] = {}
    structural_walk(stmt, (tirx.DeclBuffer, lambda s: bases.__setitem__(s.buffer, s.data.args[0])))
    return bases


def root_in(bases: Mapping[Any, Any], buffer: Any) -> Any:
    """The buffer of which ``buffer`` is a view by ``bases``, itself where it is none."""
    while buffer in bases:
        buffer = bases[buffer]
    return buffer


def writes_locally(stmt: Any, buffers: set[Any]) -> Any:
    """A buffer of ``buffers`` that a statement writes in its own rank's memory, in its own name; None where
    there is none."""
    found: list[Any] = []
    bases = views(stmt)

    def note(buffer: Any) -> None:
        if (whole := root_in(bases, buffer)) in buffers:
            found.append(whole)

    for call in calls(stmt):
        if remote_puts.is_pull(call):
            continue  # who touches what is pulled awaits its signal (docs/LANGUAGE.md, "Order")
        for access in effects_of(call):
            if access.mode != "read" and access.owner is None:
                note(access.region.source)
    structural_walk(stmt, (tirx.BufferStore, lambda s: note(s.buffer)))
    return found[0] if found else None


def known_early(program: TileProgram, stmt: Any, own: set[Any], written: set[Any] | None = None) -> None:
    """That the scalar values in ``stmt`` may be computed before, or beside, the statements around it: from
    names, ``own`` variables and tensors that the kernel only reads.

    Raises:
        Unfit: one may not.
    """
    written = written_buffers(program) if written is None else written
    bad: list[Any] = []
    bases: list[dict[Any, Any]] = []

    def load(e: Any) -> None:
        if e.source in own:
            return
        if e.source.ty.storage_scope not in ("global", "global.symm"):
            bad.append(e)
            return
        if not bases:
            bases.append(views(program.func.body))
        if root_in(bases[0], e.source) in written:
            bad.append(e)

    structural_walk(stmt, (ir.TensorLoad, load))
    if bad:
        raise Unfit(
            f"what is copied, or when, depends on {bad[0].source.name}, which the computation may still "
            "change",
            bad[0].span,
        )


def renewed(stmt: Any, values: dict[Any, Any]) -> Any:
    """A copy of a statement in which every name that it defines is a new one, and those of ``values`` have
    these values."""
    made = dict(values)

    def name(v: Any) -> None:
        made.setdefault(v, tirx.Var(v.name, str(v.ty)))

    def buffer(v: Any) -> None:
        dt = str(getattr(v.ty.dtype, "dtype", v.ty.dtype))
        made.setdefault(
            v,
            tirx.decl_buffer(
                tuple(v.ty.shape), dt, v.name, scope=v.ty.storage_scope, data_alignment=64, layout=None
            ),
        )

    structural_walk(stmt, (tirx.Bind, lambda s: name(s.var)))
    structural_walk(stmt, (tirx.For, lambda s: name(s.loop_var)))
    structural_walk(stmt, (tirx.AllocBuffer, lambda s: buffer(s.buffer)))
    return structural_map(stmt, (ir.Var, lambda v: made.get(v, v)))


# ---- cutting in two


def split(program: TileProgram, body: Any, draft: Any) -> tuple[Any, dict[Any, Any], list[Any]]:
    """The body of a kernel with role regions around its rings.

    Returns:
        the body, the loops whose rings no region can hold (their variable → why), and where regions had to
        end (place and why).
    """
    cutter = _Cutter(program, draft)
    # what is outside the launch's axes is set up before there are blocks
    return cutter.descend(body), cutter.failed, cutter.notes


@dataclass
class _Part:
    """What the producer's part needs so far: names and variables."""

    role: str
    needed: set[Any]
    defined: set[Any]


class _Cutter:
    def __init__(self, program: TileProgram, draft: Any):
        self.program, self.plan = program, draft.plan
        self.numbers = {r.number for r in self.plan.rings if r.form == "roles"}
        self.counters = {c for c, _ in draft.counters}
        self.written = written_buffers(program)
        self.held = held_of_tensors(program.func.body, self.written)
        self.failed: dict[Any, Any] = {}
        self.notes: list[Any] = []

    # -- where regions stand
    # -----------------------------------------------------------------------------------------
    def descend(self, s: Any) -> Any:
        """A statement with regions as far outside as they can stand."""
        if not self.rings(s):
            return s
        above = isinstance(s, tirx.AttrStmt) and s.attr_key in ("ts.kernel", "thread_extent")
        if not above:
            try:
                return self.region(s)
            except Unfit as why:
                self._note(s, why)
        if isinstance(s, tirx.SeqStmt):
            return sequence([self.descend(x) for x in s.seq])
        return _around(s, [self.descend(x) for x in inside(s)])

    def _note(self, s: Any, why: Unfit) -> None:
        from tilescale.compiler.passes.schedule import Kept

        kept = Kept(loc_of(why.span) or loc_of(getattr(s, "span", None)), str(why))
        if isinstance(s, tirx.For) and any(self.ring_of(x, "acquire") is not None for x in of_round(s)):
            self.failed[s.loop_var] = kept
        elif kept not in self.notes:
            self.notes.append(kept)

    def region(self, s: Any) -> Any:
        """Both roles' parts of a statement.

        Raises:
            Unfit: it cannot be cut in two.
        """
        self._check(s)
        producer = self.part(s, ROLES[0])
        communicator, hands = self.communicator(s)
        own = s if communicator is None else without_puts(s, hands)
        consumer = self.rest(own)
        if waits(consumer) and self.unobserving(consumer):
            consumer = self.rest(self.without_waits(own, last=True))
        parts = [(ROLES[0], producer), (COMMUNICATOR, communicator), (ROLES[1], consumer)]
        held = [(r, p) for r, p in parts if p is not None]
        span = getattr(s, "span", None)
        return sequence(
            [
                *([] if hands is None else [tirx.AllocBuffer(hands.handed, {})]),
                *(
                    tirx.AttrStmt(ir.StringImm(r), "ts.role", tirx.IntImm("int32", k), p, span)
                    for k, (r, p) in enumerate(held)
                ),
            ]
        )

    def part(self, s: Any, role: str) -> Any:
        """A statement's part of those who run beside the consumer, under names of its own.

        Raises:
            Unfit: it cannot be cut out.
        """
        part = _Part(role, set(), set())
        while True:
            part.defined = set()
            made = looked_up(self.cut(s, part, last=True), self.held)
            needed = _used(made)
            if needed <= part.needed:
                break
            part.needed |= needed
        allocated: set[Any] = set()
        structural_walk(made, (tirx.AllocBuffer, lambda a: allocated.add(a.buffer)))
        self._check_part(s, made, allocated)
        for variable in allocated:
            if _stores(made, variable) != _stores(s, variable) or _operated(s, variable):
                raise Unfit(
                    f"{variable.name} decides what is copied, and not all that changes it is scalar code of "
                    "the block"
                )
        return renewed(made, {})

    def communicator(self, s: Any) -> tuple[Any, Hands | None]:
        """The part of the warps that make a statement's non-blocking puts, and how they learn of what the
        consumer wrote for them (None: they put nothing that it writes); no part where there are none, or they
        stay with the block's threads, which the program's notes then say with the reason."""
        puts = puts_of(s)
        if not puts or not self.program.launch.comm_warps:
            return None, None
        try:
            for call in puts:
                if self.program.target.remote:
                    raise Unfit("ranks are reached by a library's calls, which stage tiles", call.span)
                if (why := remote_puts.unfit(self.program, call)) is not None:
                    raise Unfit(why, call.span)
            made = self.part(s, COMMUNICATOR)
            sources = {c.args[0].source for c in puts if not remote_puts.is_pull(c)}
            if late := {b for b in sources if writes_locally(s, {b}) is not None}:
                hands = Hands(late)
                return hands.taking(made), hands
            return made, None
        except Unfit as why:
            loc = loc_of(why.span)
            place = f" (line {loc.line})" if loc else ""
            self.plan.puts_kept = f"{why}{place}"
            return None, None

    def _check(self, s: Any) -> None:
        """Raises Unfit where something in a statement orders copies in a way that roles would lose."""
        sources = {root(s, c.args[0].source) for c in calls(s) if self._fills(c)}
        changing = any(b in self.written or b.ty.storage_scope != "global" for b in sources)
        for call in calls(s):
            if synchronizes(call):
                raise Unfit("a barrier with other blocks is for all roles together", call.span)
            if polls(call) and changing:
                raise Unfit(
                    "an atomic operation that is looked at may say that memory is ready to be copied",
                    call.span,
                )
        if (buffer := writes_locally(s, sources)) is not None:
            raise Unfit(f"{buffer.name} is written here and copied into a ring, which would run ahead of it")

    def _check_part(self, s: Any, made: Any, allocated: set[Any]) -> None:
        known_early(self.program, made, allocated | self.counters | self._untouched(s), self.written)
        for call in calls(made):
            if call.op.name == "ts.wait" and not steady(self.program, call):
                raise Unfit(
                    "the condition of a wait may become false again, so that copies cannot run ahead of the "
                    "rest",
                    call.span,
                )
        declared: list[Any] = []
        structural_walk(s, (tirx.DeclBuffer, lambda d: declared.append(d.buffer)))
        for call in calls(made):
            if self._fills(call) and any(call.args[0].source.same_as(d) for d in declared):
                raise Unfit("what is copied has a view of its own here", call.span)

    def _untouched(self, s: Any) -> set[Any]:
        """Scalar variables from outside a statement that it only reads."""
        loaded: set[Any] = set()
        structural_walk(
            s,
            (
                ir.TensorLoad,
                lambda e: loaded.add(e.source) if e.source.ty.storage_scope == "local.var" else None,
            ),
        )
        inside: set[Any] = set()
        structural_walk(s, (tirx.AllocBuffer, lambda a: inside.add(a.buffer)))
        return {b for b in loaded - inside if writes_locally(s, {b}) is None}

    # -- the parts of those who run beside the consumer
    # -----------------------------------------------------------------------------------------
    def cut(self, s: Any, part: _Part, *, last: bool) -> Any:
        """The part of a statement of ``part``'s role, None where it has none. ``last``: none of what the role
        does follows behind the statement's own last of it."""
        if isinstance(s, tirx.SeqStmt):
            return self._cut_sequence(list(s.seq), part, last)
        if isinstance(s, tirx.Bind):
            if s.var not in part.needed or s.var in part.defined:
                return None
            part.defined.add(s.var)
            return s
        if isinstance(s, tirx.AllocBuffer):
            return s if s.buffer in part.needed and s.buffer.ty.storage_scope == "local.var" else None
        if isinstance(s, tirx.BufferStore):
            return s if s.buffer in part.needed and s.buffer.ty.storage_scope == "local.var" else None
        if isinstance(s, tirx.Evaluate):
            return s if name_of(s) and self._takes(s.value, part.role) else None
        if below(s):
            if waits(s):
                raise Unfit(
                    "an executor below the block waits here, which may guard copies behind it", s.span
                )
            return None
        if isinstance(s, tirx.For) and s.kind in (tirx.ForKind.PARALLEL, tirx.ForKind.VECTORIZED):
            return None
        if not inside(s):
            return None
        parts = [
            self.cut(x, part, last=last and not isinstance(s, (tirx.For, tirx.While))) for x in inside(s)
        ]
        return (
            None
            if all(p is None for p in parts)
            else _around(s, [sequence([]) if p is None else p for p in parts])
        )

    def _cut_sequence(self, stmts: list[Any], part: _Part, last: bool) -> Any:
        end = len(stmts)
        if last:  # what stands behind the last of it guards nothing
            end = max((k + 1 for k, s in enumerate(stmts) if self.guarded(s, part.role)), default=0)
        parts = [self.cut(s, part, last=last and k == end - 1) for k, s in enumerate(stmts[:end])]
        parts = [p for p in parts if p is not None]
        return sequence(parts) if parts else None

    def _takes(self, call: Any, role: str) -> bool:
        """Whether an operation is the role's (a wait may be others' as well)."""
        if call.op.name == "ts.wait":
            return True
        if role == COMMUNICATOR:
            return is_put(call)
        return self._fills(call) or self._token(call, ("acquire", "commit"))

    def guarded(self, s: Any, role: str) -> bool:
        """Whether a statement has some of what a role is for: waits in front of it are its own too."""
        return bool(puts_of(s)) if role == COMMUNICATOR else self.rings(s)

    # -- the consumer's part
    # -----------------------------------------------------------------------------------------
    def rest(self, s: Any) -> Any:
        """A statement without what the producer alone does: from each acquire to the counter behind its
        commit."""
        if isinstance(s, tirx.SeqStmt):
            out, skipping = [], None
            for x in s.seq:
                if skipping is None and (skipping := self.ring_of(x, "acquire")) is None:
                    out.append(self.rest(x))
                elif isinstance(x, tirx.BufferStore) and x.buffer in self.counters:
                    skipping = None
            return sequence(out)
        if not self.rings(s) or not inside(s):
            return s
        return _around(s, [self.rest(x) for x in inside(s)])

    def unobserving(self, made: Any) -> bool:
        """Whether a consumer's part touches nothing that a wait could be for: it tells nobody of anything,
        reads memory that nobody writes, and writes tensors of this rank alone that the kernel never reads.
        All signals are the communicator's then, or those of others, and tell of puts; what was put the
        consumer sees in its rings, whose copies come behind the producer's wait."""
        if releases(made) or any(polls(c) for c in calls(made)):
            return False
        read = {b for b in read_buffers(made) if _is_tensor(b)}
        if any(b.ty.storage_scope != "global" or b in self.written for b in read):
            return False
        everywhere = read_buffers(self.program.func.body)
        stored = {a.region.source for c in calls(made) for a in effects_of(c) if a.mode != "read"}
        structural_walk(made, (tirx.BufferStore, lambda x: stored.add(x.buffer)))
        wholes = {root(self.program.func.body, b) for b in stored}
        return all(
            not _is_tensor(b) or b.ty.storage_scope == "global" and b not in everywhere for b in wholes
        )

    def without_waits(self, s: Any, *, last: bool) -> Any:
        """A statement without the waits that the producer makes too, as `cut` finds them: those in front of
        a ring."""
        if name_of(s) == "wait":
            return sequence([])
        if isinstance(s, tirx.SeqStmt):
            stmts = list(s.seq)
            end = len(stmts)
            if last:
                end = max((k + 1 for k, x in enumerate(stmts) if self.rings(x)), default=0)
            kept = [self.without_waits(x, last=last and k == end - 1) for k, x in enumerate(stmts[:end])]
            return sequence([x for x in kept if not _is_empty(x)] + stmts[end:])
        if not waits(s) or not inside(s) or (last and not self.rings(s)):
            return s
        parts = [
            self.without_waits(x, last=last and not isinstance(s, (tirx.For, tirx.While))) for x in inside(s)
        ]
        return sequence([]) if all(map(_is_nothing, parts)) else _around(s, parts)

    # -- questions
    # ---------------------------------------------------------------------------------------------------
    def rings(self, s: Any) -> bool:
        """Whether a statement fills a ring by a producer."""
        return any(self._token(c, ("acquire",)) for c in calls(s))

    def ring_of(self, s: Any, kind: str) -> int | None:
        """The ring of which a statement is this token; None where it is none."""
        return int(s.value.attrs["ring"]) if name_of(s) and self._token(s.value, (kind,)) else None

    def _token(self, call: Any, kinds: tuple[str, ...]) -> bool:
        return call.op.name in [f"ts.ring_{k}" for k in kinds] and int(call.attrs["ring"]) in self.numbers

    def _fills(self, call: Any) -> bool:
        return REGISTRY[call.op.name].fills


class Hands:
    """How a communicator learns that the consumer has written what it is to put: a counter in the block's
    shared memory, to which the consumer adds one where such a put stands in the program.

    Both come to the same puts in the same order, so the communicator's n-th waits for n. The addition
    releases what all of the consumer's threads did before it, and the wait acquires that for all of the
    communicator's (passes/insert_barriers.py puts a barrier in front of one and behind the other). Nobody
    writes the source of a put before its signal is seen (docs/LANGUAGE.md, "Order"), so nothing goes the
    other way.
    """

    def __init__(self, late: set[Any]):
        self.late = late
        self.handed = tirx.decl_buffer((1,), "int64", "handed", scope="shared.signal", layout=None)
        self.taken = tirx.decl_buffer((1,), "int64", "taken", scope="local.var", layout=None)

    def counts(self, put: Any) -> bool:
        return put.args[0].source in self.late and not remote_puts.is_pull(put)

    def handing(self, put: Any) -> Any:
        """What the consumer does where a put stands."""
        return self._call("signal", [tirx.IntImm("int64", 1)], {"op": "add"}, put)

    def taking(self, part: Any) -> Any:
        """The communicator's part with its waits."""
        zero = tirx.IntImm("int32", 0)

        def leaf(e: Any) -> Any:
            if not is_put(e.value) or not self.counts(e.value):
                return e
            more = tirx.BufferLoad(self.taken, [zero]) + tirx.IntImm("int64", 1)
            count = tirx.BufferStore(self.taken, more, [zero], e.span)
            return sequence(
                [count, self._call("wait", [tirx.BufferLoad(self.taken, [zero])], {"cmp": "ge"}, e.value), e]
            )

        begin = [
            tirx.AllocBuffer(self.taken, {}),
            tirx.BufferStore(self.taken, tirx.IntImm("int64", 0), [zero]),
        ]
        return sequence([*begin, structural_map(part, (tirx.Evaluate, leaf))])

    def _call(self, name: str, args: list[Any], attrs: dict[str, Any], put: Any) -> Any:
        region = tirx.BufferRegion(
            self.handed, [ir.Range.from_min_extent(tirx.IntImm("int32", 0), tirx.IntImm("int32", 1))]
        )
        where = {"executor": "block", "reach": "block", **attrs}
        made = ir.Call(f"ts.{name}", [region, *args], attrs=where, ret_ty=VOID, span=put.span)
        return tirx.Evaluate(made, put.span)


def without_puts(s: Any, hands: Hands | None) -> Any:
    """A statement without its non-blocking puts, and without the loops and conditions that had nothing
    else; ``hands`` has what stands in the place of some of them."""
    if name_of(s) and is_put(s.value):
        return hands.handing(s.value) if hands is not None and hands.counts(s.value) else sequence([])
    if not puts_of(s):
        return s
    if isinstance(s, tirx.SeqStmt):
        parts = [without_puts(x, hands) for x in s.seq]
        rest = [t for t in parts if isinstance(t, tirx.Bind) or not _is_nothing(t)]
        return sequence([] if all(map(_is_nothing, rest)) else rest)
    parts = [without_puts(x, hands) for x in inside(s)]
    return sequence([]) if all(map(_is_nothing, parts)) else _around(s, parts)


def _is_empty(s: Any) -> bool:
    return isinstance(s, tirx.Evaluate) and isinstance(s.value, tirx.IntImm)


def _is_tensor(buffer: Any) -> bool:
    scope = buffer.ty.storage_scope
    return bool(scope.startswith("global") and scope != "global.signal")


def _is_nothing(s: Any) -> bool:
    """Whether a statement does nothing: names that nobody reads, and what `sequence` makes of none."""
    if isinstance(s, tirx.SeqStmt):
        return all(map(_is_nothing, s.seq))
    return isinstance(s, tirx.Bind) or _is_empty(s)


def _stores(stmt: Any, variable: Any) -> int:
    """How many assignments to a variable a statement has."""
    found: list[Any] = []
    structural_walk(
        stmt, (tirx.BufferStore, lambda s: found.append(s) if s.buffer.same_as(variable) else None)
    )
    return len(found)


def _operated(stmt: Any, variable: Any) -> bool:
    """Whether an operation writes a variable."""
    effects = [a for c in calls(stmt) for a in effects_of(c)]
    return any(a.mode != "read" and a.region.source.same_as(variable) for a in effects)


def _used(stmt: Any) -> set[Any]:
    """Names and scalar variables that a statement reads."""
    found: set[Any] = set()
    structural_walk(stmt, (ir.Var, lambda v: found.add(v)))
    structural_walk(stmt, (ir.TensorLoad, lambda e: found.add(e.source)))
    return found


def inside(s: Any) -> list[Any]:
    """The statements of which a statement is made, other than a sequence."""
    if isinstance(s, tirx.IfThenElse):
        return [s.then_case] if s.else_case is None else [s.then_case, s.else_case]
    return [s.body] if isinstance(s, (tirx.For, tirx.While, tirx.AttrStmt)) else []


def _around(s: Any, parts: list[Any]) -> Any:
    """A statement with other statements inside."""
    if isinstance(s, tirx.IfThenElse):
        return tirx.IfThenElse(s.condition, parts[0], parts[1] if len(parts) > 1 else None, s.span)
    if isinstance(s, tirx.For):
        return tirx.For(
            s.loop_var, s.min, s.extent, s.kind, parts[0], annotations=dict(s.annotations or {}), span=s.span
        )
    if isinstance(s, tirx.While):
        return tirx.While(s.condition, parts[0], s.span)
    return tirx.AttrStmt(s.node, s.attr_key, s.value, parts[0], s.span)
