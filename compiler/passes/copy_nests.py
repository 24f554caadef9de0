"""T.Parallel nests that do nothing but copy: each iteration stores one element of a tensor, as it is, or zero
where a condition does not hold, in a shared tile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilescale.compiler.ir.multiples import bound_in, spelt_out
from tilescale.compiler.ir.nests import is_nest, nest_of
from tilescale.compiler.ir.walks import mentions
from tilescale.compiler.layout.loops import bits_of, element_dtype
from tilescale.compiler.passes.products import flat
from tilescale.compiler.passes.roles import calls
from tilescale.compiler.tvm_compat import IF_THEN_ELSE, ir, same_expression, structural_map, sym, tirx


@dataclass(frozen=True)
class CopyNest:
    """``tile[into] = source[at]``, where ``condition`` holds, else zero, for all values of ``extents``: the
    variables of more than one value, with how many each has. Names of the nest's body are spelt out.
    ``width``: the most neighbours that one access may take, 0 where nobody bounds them."""

    extents: dict[Any, int]
    tile: Any
    into: tuple[Any, ...]
    source: Any
    at: tuple[Any, ...]
    condition: Any
    width: int
    node: Any


def copy_nest(s: Any) -> CopyNest | None:
    """The copy that a statement is; None for any other statement. Where the author says which thread does
    what, threads do it."""
    nest = nest_of(s) if is_nest(s) else None
    if nest is None or not nest.is_static or nest.layout:
        return None
    *binds, last = flat(nest.body) or [None]
    names = bound_in(nest.body)
    store = _one_of(last)
    if not isinstance(store, tirx.BufferStore) or not all(isinstance(b, tirx.Bind) for b in binds):
        return None
    found = _chosen(spelt_out(store.value, names))
    if found is None:
        return None
    load, condition = found
    tile, source = store.buffer, load.source
    if (
        tile.ty.storage_scope != "shared"
        or not source.ty.storage_scope.startswith("global")
        or element_dtype(tile) != element_dtype(source)
        or str(load.ty) != str(tile.ty.dtype)
        or bits_of(tile) < 8
    ):
        return None
    single = {
        v: tirx.const(0, str(v.ty)) for v, n in zip(nest.vars, nest.extents, strict=True) if int(n) == 1
    }

    def spelt(e: Any) -> Any:
        return structural_map(spelt_out(e, names), (ir.Var, lambda v: single.get(v, v)))

    extents = {v: int(n) for v, n in zip(nest.vars, nest.extents, strict=True) if int(n) != 1}
    return CopyNest(
        extents,
        tile,
        tuple(map(spelt, store.indices)),
        source,
        tuple(map(spelt, load.indices)),
        None if condition is None else spelt(condition),
        nest.width,
        s,
    )


def _one_of(s: Any) -> Any:
    """A statement; of one that stores one of two values in the same element, the store of what is chosen."""
    if not isinstance(s, tirx.IfThenElse):
        return s
    one, other = s.then_case, s.else_case
    if (
        not isinstance(one, tirx.BufferStore)
        or not isinstance(other, tirx.BufferStore)
        or not one.buffer.same_as(other.buffer)
        or any(not same_expression(i, j) for i, j in zip(one.indices, other.indices, strict=True))
    ):
        return s
    value = tirx.if_then_else(s.condition, one.value, other.value)
    return tirx.BufferStore(one.buffer, value, list(one.indices), s.span)


def _chosen(e: Any) -> tuple[Any, Any] | None:
    """``(the load, the condition on which it is the value)`` of an expression that is zero elsewhere; None
    for any other."""
    if isinstance(e, ir.TensorLoad):
        return e, None
    if (found := choice(e)) is None:
        return None
    test, one, other = found
    if _is_zero(one):
        test, one, other = tirx.Not(test), other, one
    under = _chosen(one) if _is_zero(other) else None
    if under is None:
        return None
    load, inner = under
    return load, test if inner is None else tirx.And(test, inner)


def choice(e: Any) -> tuple[Any, Any, Any] | None:
    """``(condition, one, other)`` of an expression that is one of two values; None for any other."""
    if isinstance(e, tirx.Select):
        return e.condition, e.true_value, e.false_value
    return tuple(e.args) if isinstance(e, ir.Call) and e.op.name == IF_THEN_ELSE else None


def _is_zero(e: Any) -> bool:
    """Whether an expression is zero, in bits too."""
    if isinstance(e, tirx.Cast):
        return _is_zero(e.value)
    return isinstance(e, (tirx.IntImm, tirx.FloatImm)) and str(e.value) in ("0", "0.0")


def keeps_places(loop: Any) -> bool:
    """Whether the author says of a loop which of its copies run ahead (passes/manual_stages.py)."""
    return any("pinned" in (c.attrs or {}) for c in calls(loop.body))


def first_of(e: Any, var: Any, analyzer: Any) -> Any:
    """``b`` where an index is ``b + var``, with a ``b`` that does not name ``var``; None where it is not."""
    if not mentions(e, var):
        return None
    base = structural_map(e, (ir.Var, lambda v: tirx.const(0, str(v.ty)) if v.same_as(var) else v))
    step = var if str(var.ty) == str(e.ty) else tirx.Cast(str(e.ty), var)
    rest = analyzer.simplify(e - base - step)
    return analyzer.simplify(base) if isinstance(rest, tirx.IntImm) and int(rest.value) == 0 else None


def box(indices: tuple[Any, ...], extents: dict[Any, int]) -> tuple[list[Any], list[Any]] | None:
    """The ranges of which indices name every element once, with the variables that walk along them, in the
    order of the axes; None where they name anything else."""
    analyzer = sym.Analyzer()
    ranges: list[Any] = []
    along: list[Any] = []
    for e in indices:
        used = [v for v in extents if mentions(e, v)]
        if not used:
            ranges.append(ir.Range.from_min_extent(e, tirx.const(1, str(e.ty))))
            continue
        start = first_of(e, used[0], analyzer) if len(used) == 1 else None
        if start is None or used[0] in along:
            return None
        ranges.append(ir.Range.from_min_extent(start, tirx.const(extents[used[0]], str(e.ty))))
        along.append(used[0])
    return (ranges, along) if len(along) == len(extents) else None
