"""When the products of a consumer, which the tensor cores compute beside its threads, are awaited, and what stands between.

**Awaiting** (`awaited`). A product is issued where it stands, and awaited in front of the first statement that touches its accumulator or
writes what it reads. Products are complete in the order of their issue, so the wait names how many of the later ones may still run. A
ring's release behind a product means that its stage has been read: it goes behind that product's wait. Nothing is in flight where ways
part or meet (loops, branches), since ptxas awaits every product there (warning C7515). What is computed between issue and wait should
run beside the product: the wait names the largest tile among it, so that the machine's compiler does not move it up.

**Overlapping** (`overlapped`). Of a pipelined loop whose rounds end in products of what was computed from an earlier one,

    loop n: S = Q·Kₙ; softmax; O = O + P·Vₙ

the last products, and what follows them, are moved into the next round, behind the issue of the first one, whose result they do not touch:

    S = Q·K₀; softmax; loop n > 0: S = Q·Kₙ; O = O + P·Vₙ₋₁; softmax; behind the loop: O = O + P·Vₙ₋₁

so that the softmax of round n runs under the product of round n - 1. The statements and each one's order against those that it shares
tiles or counters with are the same, for any number of rounds; `_head` looks that none is moved across another that it depends on. The first
round stands alone, and the others are one loop, or several in a row where conditions such as ``n < 2`` change: inside they are decided, and
no branch stands between products.

Several warpgroups of consumers fall into turns by themselves in such loops, since they compete for the tensor cores: turns that named
barriers force were tried there on an H200 and cost 1 to 3 % (attention forward; head dimension 256 without a mask gained 1.5 %). In
loops whose rounds are products and then what is computed from them (`_in_turns`) they take turns at issuing products (`ops.wgmma.Turn`):
side by side, all would wait for the tensor cores and then all compute, while the tensor cores have nothing to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from tilescale.compiler.ir.nests import nest_of
from tilescale.compiler.ir.operations import REGISTRY, find
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.layout.loops import element_dtype
from tilescale.compiler.ops.wgmma import FREE, await_products, turn
from tilescale.compiler.passes.gpu_stage import whole
from tilescale.compiler.passes.roles import calls, renewed
from tilescale.compiler.tvm_compat import ir, structural_map, structural_walk, sym, tirx

#: stages of a ring from which two rounds' products may read at once
DEEP = 3


def is_product(s: Any) -> bool:
    """Whether a statement is a product that has to be awaited."""
    op = find(s.value) if isinstance(s, tirx.Evaluate) else None
    return op is not None and op.multiplies and "pending" in op.attributes and int(s.value.attrs["pending"]) == FREE


def operands_of(call: Any) -> list[Any]:
    """What a product reads beside its accumulator."""
    return [*call.args[:2], *call.args[4:]]


def name_of(s: Any) -> str:
    """The operation that a statement is; empty where it is none."""
    op = find(s.value) if isinstance(s, tirx.Evaluate) else None
    return "" if op is None else op.name


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
        for a in REGISTRY[call.op.name].effects(call):
            (read if a.mode == "read" else written).add(a.region.source)
    return read, written


# ---- awaiting


@dataclass
class Flight:
    """A product under way. ``held``: releases that follow its end, with the counters that they move on."""

    call: Any
    held: list[Any] = field(default_factory=list)
    counters: set[Any] = field(default_factory=set)

    @property
    def result(self) -> Any:
        return self.call.args[2].source

    @property
    def operands(self) -> set[Any]:
        return {r.source for r in operands_of(self.call)}


def awaited(program: Any, body: Any) -> Any:
    """The body with every product awaited."""
    bases: dict[Any, Any] = {}
    structural_walk(body, (tirx.DeclBuffer, lambda s: bases.__setitem__(s.buffer, s.data.args[0])))
    single = {k for k, r in enumerate(program.schedule.rings) if r.depth == 1}
    turns = {c.args[2].source: int(c.attrs["turn"]) for c in calls(body) if "turn" in c.attrs}
    return _Awaiting(program.schedule.ring_of, bases, single, turns).around(body)


class _Awaiting:
    def __init__(self, rings: dict[Any, int], bases: dict[Any, Any], single: set[int], turns: dict[Any, int]):
        """``single``: rings of one stage. ``turns``: accumulators that one warpgroup alone has."""
        self.rings, self.bases, self.single, self.turns = rings, bases, single, turns

    def around(self, s: Any) -> Any:
        """A statement at whose ends nothing is in flight."""
        if not any(is_product(tirx.Evaluate(c)) for c in calls(s)) or "ts.late" in (getattr(s, "annotations", None) or {}):
            return s
        if isinstance(s, tirx.IfThenElse):
            other = None if s.else_case is None else self.around(s.else_case)
            return tirx.IfThenElse(s.condition, self.around(s.then_case), other, s.span)
        if isinstance(s, tirx.For):
            return tirx.For(s.loop_var, s.min, s.extent, s.kind, self.around(s.body), annotations=dict(s.annotations or {}), span=s.span)
        if isinstance(s, tirx.While):
            return tirx.While(s.condition, self.around(s.body), s.span)
        if isinstance(s, tirx.AttrStmt):
            return tirx.AttrStmt(s.node, s.attr_key, s.value, self.around(s.body), s.span)
        return self.in_order(flat(s))

    def in_order(self, stmts: list[Any]) -> Any:
        out: list[Any] = []
        flying: list[Flight] = []
        skipped: set[int] = set()
        since: list[Any] = []  # behind the last product
        for k, s in enumerate(stmts):
            if k in skipped:
                continue
            if name_of(s) == "ring_release" and (f := self._reader(flying, int(s.value.attrs["ring"]))) is not None:
                counter = s.value.args[0].source
                f.held.append(s)
                if k + 1 < len(stmts) and isinstance(stmts[k + 1], tirx.BufferStore) and stmts[k + 1].buffer.same_as(counter):
                    skipped.add(k + 1)
                    f.held.append(stmts[k + 1])
                    f.counters.add(counter)
                continue
            self._land(flying, self._needed(flying, s), out, s, since)
            since = [] if is_product(s) else [*since, s]
            if is_product(s):
                flying.append(Flight(s.value))
            out.append(s if is_product(s) else self.around(s))
        self._land(flying, len(flying), out, None, since if self.turns else [])
        return sequence(out)

    def _reader(self, flying: list[Flight], ring: int) -> Flight | None:
        """The last product under way that reads a stage of a ring."""
        return next((f for f in reversed(flying) if any(self.rings.get(b) == ring for b in f.operands)), None)

    def _needed(self, flying: list[Flight], s: Any) -> int:
        """How many of the products under way must be complete in front of a statement."""
        if isinstance(s, (tirx.While, tirx.AttrStmt, tirx.IfThenElse)) or isinstance(s, tirx.For) and nest_of(s) is None:
            return len(flying)
        if name_of(s) == "barrier":  # what stands in front of a meeting that the author wrote is done there
            return len(flying)
        if (nest := nest_of(s)) is not None and any(a.conditional and a.mode == "write" for a in nest.accesses):
            return self._branching(flying, {a.buffer for a in nest.accesses})
        read, written = ({self._root(b) for b in buffers} for buffers in touched(s))
        if is_product(s):  # products into one accumulator follow one another by themselves
            own = s.value.args[2].source
            read, written = read - {own}, written - {own}
        for k in reversed(range(len(flying))):
            f = flying[k]
            if f.result in read | written or written & f.operands or (read | written) & f.counters:
                return k + 1
        return 0

    def _branching(self, flying: list[Flight], buffers: set[Any]) -> int:
        """In front of a branch: all, or those of the one warpgroup that has what it computes."""
        own = {self.turns[b] for b in buffers if b in self.turns}
        concerned = [k for k, f in enumerate(flying) if len(own) != 1 or self.turns.get(f.result) in {None, *own}]
        return concerned[-1] + 1 if concerned else 0

    def _root(self, b: Any) -> Any:
        while b in self.bases:
            b = self.bases[b]
        return b

    def _land(self, flying: list[Flight], count: int, out: list[Any], s: Any, since: list[Any]) -> None:
        """The first products end here, in front of ``s``, and what waited for them follows. ``since``: the statements behind the last
        product, which run beside it."""
        if not count:
            return
        done, flying[:] = flying[:count], flying[count:]
        by = {self.turns.get(f.result) for f in done}  # what other warpgroups compute beside their products says nothing
        others = {b for b, turn in self.turns.items() if by.isdisjoint((turn, None))}
        beside = [] if flying else [whole(b) for b in _beside(since, others)[: None if self.turns else 1]]
        parts = self._apart(done)
        for k, part in enumerate(parts, 1):
            later = [f for p in parts[k:] for f in p] + flying
            tiles = list({f.result: f.call.args[2] for f in part}.values())
            kept = {*self.rings, *(b for f in later for b in f.operands)}
            operands = list({r.source: r for f in part for r in operands_of(f.call) if r.source not in kept}.values())
            straight = part is parts[-1] and _is_straight(s)
            out.append(await_products(tiles, part[-1].call.span, operands, len(later), beside, straight))
            out += [s for f in part for s in f.held]

    def _apart(self, done: list[Flight]) -> list[list[Flight]]:
        """Products that end here, in parts that are awaited one by one: a stage that the next copy waits for, since its ring has no other,
        is free as soon as it has been read."""
        parts: list[list[Flight]] = [[]]
        for k, f in enumerate(done):
            parts[-1].append(f)
            free = any(int(s.value.attrs["ring"]) in self.single for s in f.held if name_of(s) == "ring_release")
            if free and k + 1 < len(done) and not {x.result for x in done[: k + 1]} & {x.result for x in done[k + 1 :]}:
                parts.append([])
        return parts


def _beside(stmts: list[Any], but: set[Any]) -> list[Any]:
    """The largest fragments of float32 that statements write, of others than those: the ones whose computation takes longest."""
    written = [b for s in stmts for b in touched(s)[1] if b.ty.storage_scope == "local.fragment" and element_dtype(b) == "float32"]
    sizes = {b: prod(int(e) for e in b.ty.shape) for b in written if b not in but}
    return [b for b, size in sizes.items() if size == max(sizes.values())]


def _is_straight(s: Any) -> bool:
    """Whether a statement becomes instructions without a branch: a nest over fragments alone."""
    nest = None if s is None else nest_of(s)
    return nest is not None and all(a.buffer.ty.storage_scope == "local.fragment" and not a.conditional for a in nest.accesses)


# ---- overlapping


def overlapped(program: Any, body: Any) -> Any:
    """The body, its loops overlapped where they have that form."""
    groups = program.launch.threads // 128
    turned: list[Any] = []
    deep = {k for k, r in enumerate(program.schedule.rings) if r.depth >= DEEP}

    def visit(loop: Any) -> Any:
        if str((loop.annotations or {}).get("ts.kind", "")) != "pipelined" or "ts.late" in loop.annotations:
            return loop
        made = _overlap(loop, deep)
        if made is None and groups > 1:
            made = _in_turns(loop) or _a_round_each(loop)
            turned.extend([] if made is None else [made])
        return _decided(loop) if made is None else made

    body = structural_map(body, (tirx.For, visit))
    return structural_map(body, (tirx.AttrStmt, _first_and_last)) if turned else body


def _overlap(loop: Any, deep: set[int]) -> Any | None:
    """A loop with its last products moved into the next round; None where it has not that form. ``deep``: rings of `DEEP` stages."""
    stmts = flat(loop.body)
    tail_at = _tail(stmts)
    if tail_at is None or not (isinstance(loop.min, tirx.IntImm) and int(loop.min.value) == 0):
        return None
    rest, tail = stmts[:tail_at], _spelt_out(stmts[:tail_at], stmts[tail_at:])
    shared = _shared_rounds(rest, tail, deep)
    head_end = None if shared is None else _head(rest, tail, shared)
    if head_end is None or shared is None:
        return None
    head = [_a_round_on(s, shared) for s in rest[:head_end]]
    span, var, count = loop.span, loop.loop_var, loop.extent
    first = _settled(renewed(sequence(rest), {var: tirx.IntImm(str(var.ty), 0)}), None, None)
    before = structural_map(sequence(tail), (ir.Var, lambda v: var - tirx.IntImm(str(var.ty), 1) if v.same_as(var) else v))
    steady = [*head, *flat(before), *rest[head_end:]]
    again = _one_by_one(loop, steady, [1, *(n for n in _turning_points(rest, var) if n > 1)])
    last = renewed(sequence(tail), {var: count - tirx.IntImm(str(var.ty), 1)})
    made = sequence([*flat(first), *again, *flat(last)])
    return tirx.IfThenElse(count > tirx.IntImm(str(var.ty), 0), made, None, span)


def _decided(loop: Any) -> Any:
    """A loop as several in a row, in each of which the conditions on the round's number are decided."""
    stmts = flat(loop.body)
    points = _turning_points(stmts, loop.loop_var)
    if not points or not (isinstance(loop.min, tirx.IntImm) and int(loop.min.value) == 0):
        return loop
    return sequence(_one_by_one(loop, stmts, [0, *points]))


def _one_by_one(loop: Any, stmts: list[Any], starts: list[int]) -> list[Any]:
    """A loop's statements for the rounds from each start to the next. The loop has as many rounds as the first start says."""
    var, count, made = loop.loop_var, loop.extent, []
    zero = tirx.IntImm(str(var.ty), 0)
    for k, start in enumerate(starts):
        low, more = tirx.IntImm(str(var.ty), start), tirx.Var(var.name, str(var.ty))
        rounds = count - low if k + 1 == len(starts) else tirx.min(count, tirx.IntImm(str(var.ty), starts[k + 1])) - low
        body = _settled(renewed(sequence(stmts), {var: more + low}), more, rounds)
        rounds = rounds if not k else tirx.max(rounds, zero)
        made.append(tirx.For(more, zero, rounds, loop.kind, body, annotations=dict(loop.annotations), span=loop.span))
    return made


def _in_turns(loop: Any) -> Any | None:
    """A loop of products, each followed by what is computed from it, the warpgroups one after the other; None where it has another form, or
    where all threads may have to meet in a round, since who has the turn would wait for who waits for it."""
    stmts, span = flat(loop.body), loop.span
    if any(not b.ty.storage_scope.startswith("local") for s in stmts for b in touched(s)[1]):
        return None
    at = [k for k, s in enumerate(stmts) if is_product(s)]
    if not at or len([c for c in calls(loop.body) if REGISTRY[c.op.name].multiplies]) != len(at):
        return None
    firsts = [k for k in at if k - 1 not in at]
    body = stmts[: at[0]]
    for k, after in zip(firsts, [*firsts[1:], len(stmts)], strict=True):
        end = next(n for n in range(k, after + 1) if n not in at)
        results = {s.value.args[2].source for s in stmts[k:end]}
        if not any(nest_of(s) is not None and results & set().union(*touched(s)) for s in stmts[end:after]):
            return None
        body += [turn("take", span), *stmts[k:end], turn("pass", span), *stmts[end:after]]
    return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, sequence(body), annotations=dict(loop.annotations), span=span)


def _a_round_each(loop: Any) -> Any | None:
    """A loop in whose rounds several products run beside what is computed from the one in front: a warpgroup has the turn from the first of
    them until the last one alone is under way. So the tensor cores begin with the next warpgroup's while this one computes what is left of
    the round, in which it has nothing for them. None where the loop has another form, as in `_in_turns`, and where threads compute what the
    products read, which keeps the warpgroups apart anyway: W4A16 of 128 rows took 15 % longer in turns."""
    stmts, span = flat(loop.body), loop.span
    if any(not b.ty.storage_scope.startswith("local") for s in stmts for b in touched(s)[1]):
        return None
    at = [k for k, s in enumerate(stmts) if is_product(s)]
    if len(at) < 2 or len([c for c in calls(loop.body) if REGISTRY[c.op.name].multiplies]) != len(at):
        return None
    if any(r.source.ty.storage_scope.startswith("local") for k in at for r in operands_of(stmts[k].value)):
        return None
    results = [stmts[k].value.args[2].source for k in at]
    end = next((k for k in range(at[-1] + 1, len(stmts)) if results[-1] in set().union(*touched(stmts[k]))), len(stmts))
    beside = [s for s in stmts[at[-1] + 1 : end] if nest_of(s) is not None and results[-2] in set().union(*touched(s))]
    if not beside or results[-1] is results[-2]:
        return None
    body = [*stmts[: at[0]], turn("take", span), *stmts[at[0] : end], turn("pass", span), *stmts[end:]]
    return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, sequence(body), annotations=dict(loop.annotations), span=span)


def _first_and_last(role: Any) -> Any:
    """The consumers with the turn given to the first warpgroup in front of it, and taken back behind it. Not around each loop: the last
    warpgroup, done with one loop, would give the first one the turn for the next before that one has taken back the turn of this."""
    if role.attr_key != "ts.role" or str(role.node.value) != "consumer":
        return role
    body = sequence([turn("first", role.span), role.body, turn("last", role.span)])
    return tirx.AttrStmt(role.node, role.attr_key, role.value, body, role.span)


def _turning_points(stmts: list[Any], var: Any) -> list[int]:
    """The rounds behind the first from which on conditions on the round's number have another value: between them a loop has none."""
    found: set[int] = set()
    behind = {tirx.LT: (0,), tirx.GE: (0,), tirx.LE: (1,), tirx.GT: (1,), tirx.EQ: (0, 1), tirx.NE: (0, 1)}

    def compare(e: Any) -> None:
        if isinstance(e.b, tirx.IntImm) and e.a.same_as(var):
            found.update(int(e.b.value) + k for k in behind[type(e)])

    structural_walk(sequence(stmts), (tirx.IfThenElse, lambda s: structural_walk(s.condition, (tuple(behind), compare))))
    return sorted(n for n in found if n > 0)


def _tail(stmts: list[Any]) -> int | None:
    """Where the end of a round begins that is its last products, one behind the other, and what follows them; None where there are none."""
    k = len(stmts)
    while k and not is_product(stmts[k - 1]):
        k -= 1
    if not k:
        return None
    while k and (is_product(stmts[k - 1]) or name_of(stmts[k - 1]) == "ring_wait"):
        k -= 1
    return k


def _spelt_out(rest: list[Any], tail: list[Any]) -> list[Any]:
    """The end of a round with the values of the round's names in their place, as far as they are no loads."""
    values: dict[Any, Any] = {}
    for s in rest:
        loads: list[Any] = []
        structural_walk(s, (ir.TensorLoad, loads.append))
        if isinstance(s, tirx.Bind) and not loads:
            values[s.var] = structural_map(tirx.Evaluate(s.value), (ir.Var, lambda v: values.get(v, v))).value
    return [structural_map(s, (ir.Var, lambda v: values.get(v, v))) for s in tail]


def _product_at(stmts: Sequence[Any]) -> int:
    return next(k for k, s in enumerate(stmts) if is_product(s))


def _shared_rounds(rest: list[Any], tail: list[Any], deep: set[int]) -> set[Any] | None:
    """The counters of rings from which both the first product and the last one of a round read; None where a ring of the tail is used by
    the rest otherwise. While the last product reads the stage of round n the first one reads that of n + 1 already, whose number the
    counter does not have yet; a third stage is what the producer fills meanwhile."""
    rings = {int(s.value.attrs["ring"]): s.value.args[0].source for s in tail if name_of(s) == "ring_release"}
    rings |= {int(s.value.attrs["ring"]): None for s in tail if name_of(s) == "ring_wait"}
    if not any(is_product(s) for s in rest):
        return None
    end = _product_at(rest) + 1
    shared: set[Any] = set()
    for k, s in enumerate(rest):
        for c in calls(s):
            if not c.op.name.startswith("ts.ring_") or int(c.attrs["ring"]) not in rings:
                continue
            ring = int(c.attrs["ring"])
            if k >= end or c.op.name != "ts.ring_wait" or ring not in deep or rings[ring] is None:
                return None
            shared.add(rings[ring])
    return shared


def _a_round_on(s: Any, counters: set[Any]) -> Any:
    """A statement of the round after the one that the counters are in."""
    if not counters:
        return s
    return structural_map(s, (ir.TensorLoad, lambda e: e + tirx.IntImm(str(e.ty), 1) if e.source in counters else e))


def _head(rest: list[Any], tail: list[Any], shared: set[Any]) -> int | None:
    """How many statements of a round, up to its first product, come in front of the tail of the round before; None where the tail may not
    stand there: it and they share what one of them writes (``shared`` counters aside), or it needs a name or a tile of its round (``var``
    aside, which is one more)."""
    end = _product_at(rest) + 1
    names: set[Any] = set()
    structural_walk(sequence(rest), (tirx.Bind, lambda s: names.add(s.var)))
    structural_walk(sequence(rest), (tirx.AllocBuffer, lambda s: names.add(s.buffer)))
    used: set[Any] = set()
    structural_walk(sequence(tail), (ir.Var, used.add))
    reads, writes = _all(tail)
    if names & (used | reads | writes):
        return None
    for s in rest[:end]:
        read, written = _all([s])
        if written & (reads | writes) or read & (writes - shared):
            return None
    return end


def _all(stmts: Sequence[Any]) -> tuple[set[Any], set[Any]]:
    read: set[Any] = set()
    written: set[Any] = set()
    for s in stmts:
        r, w = touched(s)
        read |= r
        written |= w
    return read, written


def _settled(s: Any, var: Any, extent: Any) -> Any:
    """A statement whose conditions are decided where they are known, for ``var`` from 0 below ``extent`` (None: of nothing)."""
    analyzer = sym.Analyzer()
    if var is not None:
        analyzer.bind(var, ir.Range.from_min_extent(tirx.IntImm(str(var.ty), 0), tirx.max(extent, tirx.IntImm(str(var.ty), 1))))

    def decide(x: Any) -> Any:
        loads: list[Any] = []
        structural_walk(x.condition, (ir.TensorLoad, loads.append))
        if not loads and analyzer.can_prove(x.condition):
            return x.then_case
        if not loads and analyzer.can_prove(tirx.Not(x.condition)):
            return sequence([]) if x.else_case is None else x.else_case
        return x

    return sequence(flat(structural_map(s, (tirx.IfThenElse, decide))))


