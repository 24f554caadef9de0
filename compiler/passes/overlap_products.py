"""Of a pipelined loop whose rounds end in products of what was computed from an earlier one,

    loop n: S = Q·Kₙ; softmax; O = O + P·Vₙ

the last products, and what follows them, are moved into the next round, behind the issue of the first one,
whose result they do not touch:

    S = Q·K₀; softmax; loop n > 0: S = Q·Kₙ; O = O + P·Vₙ₋₁; softmax; behind the loop: O = O + P·Vₙ₋₁

so that the softmax of round n runs under the product of round n - 1. The statements and each one's order
against those that it shares tiles or counters with are the same, for any number of rounds; `_head` looks that
none is moved across another that it depends on. The first round stands alone, and the others are one loop, or
several in a row where conditions such as ``n < 2`` change: inside they are decided, and no branch stands
between products.

The tail's stage is released behind the softmax then, and the next one is wanted soon after: a ring of one
stage would be filled while nothing else is done. Loops whose tail waits for such a ring stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilescale.compiler.ir.operations import name_of
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.passes.products import flat, has_producer, is_product, touched
from tilescale.compiler.passes.roles import calls, renewed
from tilescale.compiler.passes.skip_masks import always, is_mask, never, unmasked
from tilescale.compiler.tvm_compat import ir, structural_map, structural_walk, sym, tirx

#: of a loop that has been overlapped
DONE = "ts.overlapped"


def overlap_products(program: TileProgram) -> TileProgram:
    """The program, its loops overlapped where they have that form."""
    if not has_producer(program):
        return program
    depths = [r.depth for r in program.schedule.rings]
    return program.with_body(
        structural_map(
            program.func.body, (tirx.For, lambda f: (_overlap(f, depths) or f) if is_open(f) else f)
        )
    )


def is_open(loop: Any) -> bool:
    """Whether a loop is a pipelined one that no pass has arranged yet."""
    notes = loop.annotations or {}
    return str(notes.get("ts.kind", "")) == "pipelined" and not any(
        word in notes for word in ("ts.late", DONE)
    )


def split_rounds(program: TileProgram) -> TileProgram:
    """The program, whose other pipelined loops are several in a row where conditions on the round's number
    change, or where rounds begin to have masks."""
    if not has_producer(program):
        return program
    body = structural_map(program.func.body, (tirx.For, lambda f: _decided(f) if is_open(f) else f))
    return program.with_body(always(body))


def _overlap(loop: Any, depths: list[int]) -> Any | None:
    """A loop with its last products moved into the next round; None where it has not that form. ``depths``:
    the stages of each ring."""
    stmts = flat(loop.body)
    tail_at = _tail(stmts)
    if tail_at is None or not (isinstance(loop.min, tirx.IntImm) and int(loop.min.value) == 0):
        return None
    rest, tail = stmts[:tail_at], _spelt_out(stmts[:tail_at], stmts[tail_at:])
    if any(name_of(s) == "ring_wait" and depths[int(s.value.attrs["ring"])] < SPARE for s in tail):
        return None
    shared = _shared_rounds(rest, tail, {k for k, depth in enumerate(depths) if depth >= DEEP})
    head_end = None if shared is None else _head(rest, tail, shared)
    if head_end is None or shared is None:
        return None
    head = [_a_round_on(s, shared) for s in rest[:head_end]]
    span, var, count = loop.span, loop.loop_var, loop.extent
    first = _settled(renewed(sequence(rest), {var: tirx.IntImm(str(var.ty), 0)}), None, None)
    tail = [always(s) for s in tail]
    before = structural_map(
        sequence(tail), (ir.Var, lambda v: var - tirx.IntImm(str(var.ty), 1) if v.same_as(var) else v)
    )
    steady = [*head, *flat(before), *rest[head_end:]]
    again = _in_parts(loop, steady, 1, rest)
    last = renewed(sequence(tail), {var: count - tirx.IntImm(str(var.ty), 1)})
    made = sequence([*flat(first), *again, *flat(last)])
    return tirx.IfThenElse(count > tirx.IntImm(str(var.ty), 0), made, None, span)


def _decided(loop: Any) -> Any:
    """A loop as several in a row, in each of which the conditions on the round's number are decided."""
    stmts = flat(loop.body)
    begins = isinstance(loop.min, tirx.IntImm) and int(loop.min.value) == 0
    if not begins or not (any(map(is_mask, stmts)) or _turning_points(stmts, loop.loop_var)):
        return loop
    return sequence(_in_parts(loop, stmts, 0, stmts))


def _in_parts(loop: Any, stmts: list[Any], start: int, rest: list[Any]) -> list[Any]:
    """A loop's statements from round ``start`` on, several loops in a row where what ``rest`` of them say
    about the round changes: conditions on its number, or, where there is none, whether it has masks."""
    var = loop.loop_var
    points = [n for n in _turning_points(rest, var) if n > start]
    found = None if points else unmasked(rest, var)
    begin = tirx.IntImm(str(var.ty), start)
    if found is None:
        plain = [always(s) for s in stmts]
        return _one_by_one(loop, [plain] * (len(points) + 1), [begin, *points])
    at, before = found
    parts = [[never(s) for s in stmts], [always(s) for s in stmts]]
    return _one_by_one(loop, parts if before else parts[::-1], [begin, tirx.max(at, begin)])


def _one_by_one(loop: Any, parts: list[list[Any]], starts: list[Any]) -> list[Any]:
    """A loop, each part of whose statements is for the rounds from its start to the next one's. The loop has
    as many rounds as the first start says."""
    var, count, made = loop.loop_var, loop.extent, []
    zero = tirx.IntImm(str(var.ty), 0)
    starts = [tirx.IntImm(str(var.ty), n) if isinstance(n, int) else n for n in starts]
    for k, (low, stmts) in enumerate(zip(starts, parts, strict=True)):
        more = tirx.Var(var.name, str(var.ty))
        rounds = count - low if k + 1 == len(starts) else tirx.min(count, starts[k + 1]) - low
        body = _settled(renewed(sequence(stmts), {var: more + low}), more, rounds)
        rounds = rounds if not k else tirx.max(rounds, zero)
        made.append(
            tirx.For(
                more,
                zero,
                rounds,
                loop.kind,
                body,
                annotations={**dict(loop.annotations), DONE: 1},
                span=loop.span,
            )
        )
    return made


def _turning_points(stmts: list[Any], var: Any) -> list[int]:
    """The rounds behind the first from which on conditions on the round's number have another value: between
    them a loop has none."""
    found: set[int] = set()
    behind = {tirx.LT: (0,), tirx.GE: (0,), tirx.LE: (1,), tirx.GT: (1,), tirx.EQ: (0, 1), tirx.NE: (0, 1)}

    def compare(e: Any) -> None:
        if isinstance(e.b, tirx.IntImm) and e.a.same_as(var):
            found.update(int(e.b.value) + k for k in behind[type(e)])

    structural_walk(
        sequence(stmts), (tirx.IfThenElse, lambda s: structural_walk(s.condition, (tuple(behind), compare)))
    )
    return sorted(n for n in found if n > 0)


def _tail(stmts: list[Any]) -> int | None:
    """Where the end of a round begins that is its last products, one behind the other, and what follows them;
    None where there are none."""
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
    """The counters of rings from which both the first product and the last one of a round read; None where a
    ring of the tail is used by the rest otherwise. While the last product reads the stage of round n the
    first one reads that of n + 1 already, whose number the counter does not have yet; a third stage is what
    the producer fills meanwhile."""
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
    return structural_map(
        s, (ir.TensorLoad, lambda e: e + tirx.IntImm(str(e.ty), 1) if e.source in counters else e)
    )


def _head(rest: list[Any], tail: list[Any], shared: set[Any]) -> int | None:
    """How many statements of a round, up to its first product, come in front of the tail of the round before;
    None where the tail may not stand there: it and they share what one of them writes (``shared`` counters
    aside), or it needs a name or a tile of its round (``var`` aside, which is one more)."""
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
    """A statement whose conditions are decided where they are known, for ``var`` from 0 below ``extent``
    (None: of nothing)."""
    analyzer = sym.Analyzer()
    if var is not None:
        analyzer.bind(
            var,
            ir.Range.from_min_extent(
                tirx.IntImm(str(var.ty), 0), tirx.max(extent, tirx.IntImm(str(var.ty), 1))
            ),
        )

    def decide(x: Any) -> Any:
        loads: list[Any] = []
        structural_walk(x.condition, (ir.TensorLoad, loads.append))
        if not loads and analyzer.can_prove(x.condition):
            return x.then_case
        if not loads and analyzer.can_prove(tirx.Not(x.condition)):
            return sequence([]) if x.else_case is None else x.else_case
        return x

    return sequence(flat(structural_map(s, (tirx.IfThenElse, decide))))


#: stages of a ring from which two rounds' products may read at once
DEEP = 3
#: stages of a ring of which one may be held through the next round's softmax
SPARE = 2
