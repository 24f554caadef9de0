"""Masks that hold for a whole tile are decided once for the tile. Of

    for i, j in T.Parallel(M, N):
        S[i, j] = T.if_then_else(n * N + j < length, S[i, j], -T.infinity("float32"))

each thread compares and selects for every element that it holds, in every round, though nothing but a last
tile has an element that is masked. A comparison of sums of the nest's indices, each times a constant, is
hardest to meet in one corner of the nest. Where it holds there, it holds everywhere:

    if not n * N + (N - 1) < length: the nest as it is            (where it holds: nothing)

What is written in place of the nest where the mask holds everywhere is the value that is not masked: nothing
if that is the element itself, else a constant, such as the zero that a product is added to. Whatever the
author calls the mask, it is the side that is a constant of the two, and of two constants the larger one in
magnitude. Nests that compute something besides stay whole: they have registers enough for one such loop.
"""

from __future__ import annotations

import functools
from math import prod
from typing import Any

from tilescale.compiler.ir.multiples import bound_in, spelt_out
from tilescale.compiler.ir.nests import is_nest, loops_of, nest_of
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.rewrite import around
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.passes.copy_nests import choice
from tilescale.compiler.passes.products import flat
from tilescale.compiler.passes.roles import below, renewed
from tilescale.compiler.tvm_compat import (
    ir,
    same_expression,
    structural_map,
    structural_walk,
    sym,
    tirx,
)

#: elements of a nest from which a branch of the whole block pays
WORTH = 2048
#: of a nest that is a mask
MASK = "ts.mask"
COMPARISONS = (tirx.LT, tirx.LE, tirx.GT, tirx.GE)
OPPOSITE = {tirx.LT: tirx.GE, tirx.GE: tirx.LT, tirx.LE: tirx.GT, tirx.GT: tirx.LE}


def skip_masks(program: TileProgram) -> TileProgram:
    """The program with such branches around the masks of the block's fragments in its loops. Behind them, a
    loop whose products run beside its threads is cut where its rounds begin to have masks, or end to
    (overlap_products.py): ptxas awaits products where ways part."""
    narrower: set[Any] = set()

    def scope(s: Any) -> None:
        if below(s):
            structural_walk(s, (tirx.For, narrower.add))

    structural_walk(program.func.body, (tirx.AttrStmt, scope))

    def rounds(loop: Any) -> Any:
        if is_nest(loop) or loop in narrower:
            return loop
        stmts = flat(loop.body)
        made = [_decided(s) if is_nest(s) else s for s in stmts]
        if all(one is other for one, other in zip(made, stmts, strict=True)):
            return loop
        return around(loop, sequence(made))

    return program.with_body(structural_map(program.func.body, (tirx.For, rounds)))


def always(s: Any) -> Any:
    """A statement whose masks are applied in every round."""
    return structural_map(s, (tirx.IfThenElse, lambda x: x.then_case if is_mask(x) else x))


def never(s: Any) -> Any:
    """The same in rounds in which every mask holds everywhere."""
    return structural_map(s, (tirx.IfThenElse, lambda x: x.else_case or sequence([]) if is_mask(x) else x))


def is_mask(s: Any) -> bool:
    """Whether a statement is one that `skip_masks` has made: what it does under its condition is also what it
    would do without one."""
    return (
        isinstance(s, tirx.IfThenElse)
        and isinstance(s.then_case, tirx.For)
        and MASK in (s.then_case.annotations or {})
    )


def unmasked(stmts: list[Any], var: Any) -> tuple[Any, bool] | None:
    """Of a loop's statements, in rounds ``var``, some of which are masks: ``(n, True)`` where all of those
    hold everywhere in the rounds before n, ``(n, False)`` where they do in those from n on; None where no
    number of rounds says so, or there is no mask. n may be more than there are rounds."""
    names, analyzer = bound_in(sequence(stmts)), sym.Analyzer()
    wanted = [c for s in stmts if is_mask(s) for c in _all_of(spelt_out(s.condition.a, names))]
    found: list[tuple[Any, bool]] = []
    for holds in wanted:
        loads: list[Any] = []
        structural_walk(holds, (ir.TensorLoad, loads.append))
        if loads or not isinstance(holds, COMPARISONS):
            return None
        low, high = (holds.a, holds.b) if isinstance(holds, tirx.LT | tirx.LE) else (holds.b, holds.a)
        step = analyzer.simplify(_put(high - low, {var: var + tirx.const(1, str(var.ty))}) - (high - low))
        if not isinstance(step, tirx.IntImm) or not int(step):
            return None
        # By how much it holds in round 0, in 64 bits: a difference of two numbers of 32 may have 33.
        zero, each = tirx.IntImm("int64", 0), tirx.IntImm("int64", abs(int(step)))
        high, low = (_wide(_put(e, {var: tirx.const(0, str(var.ty))})) for e in (high, low))
        over = high - low - tirx.IntImm("int64", int(isinstance(holds, tirx.LT | tirx.GT)))
        falls = int(step) < 0
        rounds = tirx.floordiv(tirx.max(over + each if falls else each - 1 - over, zero), each)
        most = tirx.IntImm("int64", 2**31 - 1)
        found.append((tirx.Cast(str(var.ty), analyzer.simplify(tirx.min(rounds, most))), falls))
    if not found or len({before for _, before in found}) > 1:
        return None
    before = found[0][1]
    return functools.reduce(tirx.min if before else tirx.max, [n for n, _ in found]), before


def _wide(e: Any) -> Any:
    return e if str(e.ty) == "int64" else tirx.Cast("int64", e)


def _all_of(e: Any) -> list[Any]:
    return [*_all_of(e.a), *_all_of(e.b)] if isinstance(e, tirx.And) else [e]


def _decided(s: Any) -> Any:
    nest = nest_of(s)
    if nest is None or not nest.is_static or prod(int(e) for e in nest.extents) < WORTH:
        return s
    *binds, store = flat(nest.body)
    if not isinstance(store, tirx.BufferStore) or not all(isinstance(b, tirx.Bind) for b in binds):
        return s
    if any(a.buffer.ty.storage_scope != "local.fragment" for a in nest.accesses):
        return s
    found = _choice(store.value)
    if found is None:
        return s
    condition, kept = found
    itself = _is_element(kept, store)
    if not itself and _magnitude(kept) < 0:
        return s
    names = bound_in(nest.body)
    corner = _everywhere(spelt_out(condition, names), dict(zip(nest.vars, nest.extents, strict=True)))
    if corner is None or isinstance(sym.Analyzer().simplify(corner), tirx.IntImm):
        return s
    plain = None
    if not itself:
        plain = _with(s, [*binds, tirx.BufferStore(store.buffer, kept, list(store.indices), store.span)])
    return tirx.IfThenElse(tirx.Not(corner), around(s, s.body, {MASK: 1}), plain, s.span)


def _choice(value: Any) -> tuple[Any, Any] | None:
    """``(the condition under which an element is not masked, its value then)``; None where a value is no such
    choice."""
    if (found := choice(value)) is None:
        return None
    test, one, other = found
    first, second = _magnitude(one), _magnitude(other)
    if second > first:
        return test, one
    return (tirx.Not(test), other) if first > second else None


def _magnitude(e: Any) -> float:
    """How far a constant is from zero; less than any, where a value is none."""
    if isinstance(e, tirx.Cast):
        return _magnitude(e.value)
    return abs(float(e.value)) if isinstance(e, tirx.IntImm | tirx.FloatImm) else -1.0


def _everywhere(e: Any, extents: dict[Any, Any]) -> Any | None:
    """An expression without the nest's variables that is true only where a condition is, for all of their
    values; None where there is none. It names nothing but integers: what memory holds may differ between
    threads."""
    loads: list[Any] = []
    structural_walk(e, (ir.TensorLoad, loads.append))
    return None if loads else _corner(e, extents, False)


def _corner(e: Any, extents: dict[Any, Any], negated: bool) -> Any | None:
    if isinstance(e, tirx.Not):
        return _corner(e.a, extents, not negated)
    if isinstance(e, tirx.And | tirx.Or):
        sides = [_corner(x, extents, negated) for x in (e.a, e.b)]
        both = isinstance(e, tirx.And) != negated
        return None if None in sides else (tirx.And if both else tirx.Or)(*sides)
    if not isinstance(e, COMPARISONS):
        return None
    kind = OPPOSITE[type(e)] if negated else type(e)
    more = e.b - e.a if kind in (tirx.LT, tirx.LE) else e.a - e.b  # the condition wants this to be large
    analyzer = sym.Analyzer()
    at: dict[Any, Any] = {}
    for var, extent in extents.items():
        step = analyzer.simplify(_put(more, {var: var + tirx.const(1, str(var.ty))}) - more)
        if not isinstance(step, tirx.IntImm):
            return None
        at[var] = tirx.const(0 if int(step) >= 0 else int(extent) - 1, str(var.ty))
    return kind(_put(e.a, at), _put(e.b, at))


def _put(e: Any, values: dict[Any, Any]) -> Any:
    return structural_map(e, (ir.Var, lambda v: values.get(v, v)))


def _is_element(value: Any, store: Any) -> bool:
    return (
        isinstance(value, ir.TensorLoad)
        and value.source.same_as(store.buffer)
        and all(same_expression(i, j) for i, j in zip(value.indices, store.indices, strict=True))
    )


def _with(nest: Any, body: list[Any]) -> Any:
    """A nest's loops around another body, with names of their own."""
    made: Any = tirx.SeqStmt(body) if len(body) > 1 else body[0]
    for f in reversed(loops_of(nest)):
        made = around(f, made)
    return renewed(made, {})
