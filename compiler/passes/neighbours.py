"""Updates of several neighbours in an iteration become an iteration each.

``for i, j in T.Parallel(M, N // 4): T.atomic_addx4(C[i, 4 * j], f[i, 4 * j])`` is ``for i, j in T.Parallel(M,
N)`` with a ``T.atomic_add`` of one element: what fragments are indexed with are plain loop variables then, so
that layouts follow them, and a target that can add neighbours at once finds them itself, whoever wrote them.
"""

from __future__ import annotations

from typing import Any

from tilescale.compiler.ir.nests import is_nest
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.operations import find
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.layout import asked
from tilescale.compiler.tvm_compat import ir, structural_map, structural_walk, sym, tirx


def neighbours(program: TileProgram) -> TileProgram:
    """The program with an iteration for each neighbour, where a nest does nothing but update neighbours."""
    found: list[Any] = []
    structural_walk(
        program.func.body,
        (ir.Call, lambda c: found.append(c) if find(c) is not None and _count(c) > 1 else None),
    )
    if not found:
        return program
    return program.with_body(structural_map(program.func.body, (tirx.For, lambda s: _rewritten(s) or s)))


def _count(call: Any) -> int:
    return int(call.attrs["neighbours"]) if call.attrs is not None and "neighbours" in call.attrs else 1


def _rewritten(s: Any) -> Any:
    """A nest's outermost loop made longer; None where the nest does something else as well, or where an index
    is not a multiple."""
    if not is_nest(s) or "ts.kind" not in (s.annotations or {}):  # inner loops go with the outermost one
        return None
    loops = [s]
    while is_nest(loops[-1].body):
        loops.append(loops[-1].body)
    body, test = loops[-1].body, None
    if isinstance(body, tirx.IfThenElse) and body.else_case is None:
        body, test = body.then_case, body.condition
    calls = (
        [t.value for t in body.seq if isinstance(t, tirx.Evaluate)] if isinstance(body, tirx.SeqStmt) else []
    )
    count = _count(calls[0]) if calls and isinstance(calls[0], ir.Call) else 1
    if count == 1 or len(calls) != count or len(body.seq) != count or any(_count(c) != count for c in calls):
        return None
    dst, value = calls[0].args
    read = value.value if isinstance(value, tirx.Cast) else value
    for loop in reversed(loops):
        at = _run(dst.region, loop.loop_var, count, lambda r: r.min)
        of = (
            _run(read.indices, loop.loop_var, count, lambda e: e) if isinstance(read, ir.TensorLoad) else None
        )
        if at is None or of is None:
            continue
        region = [*dst.region[:-1], ir.Range.from_min_extent(at, 1)]
        load = tirx.BufferLoad(read.source, [*read.indices[:-1], of])
        load = load if read.same_as(value) else tirx.Cast(str(value.ty), load)
        attrs = {k: v for k, v in dict(calls[0].attrs).items() if k != "neighbours"}
        to = tirx.BufferRegion(dst.source, region)
        one: Any = tirx.Evaluate(
            ir.Call(calls[0].op, [to, load], attrs=attrs, ret_ty=calls[0].ty, span=calls[0].span),
            calls[0].span,
        )
        if test is not None:
            of_group = tirx.floordiv(loop.loop_var, tirx.IntImm(str(loop.loop_var.ty), count))
            named = structural_map(
                test, (ir.Var, lambda v, x=loop.loop_var, g=of_group: g if v.same_as(x) else v)
            )
            one = tirx.IfThenElse(named, one, None)
        return _around(loops, loop, count, one)
    return None


def _run(indices: Any, var: Any, count: int, index: Any) -> Any:
    """The last index, which is ``count * var + rest``, as ``var + rest``; None where it is none, or others
    depend on the variable."""
    *outer, last = (index(e) for e in indices)
    rest = sym.Analyzer().simplify(last - var * tirx.IntImm(str(var.ty), count))
    used: list[Any] = []
    for e in (*outer, rest):
        structural_walk(e, (ir.Var, lambda v: used.append(v) if v.same_as(var) else None))
    return None if used else var + rest if constant(rest) != 0 else var


def _around(loops: list[Any], longer: Any, count: int, body: Any) -> Any:
    """The nest with one loop ``count`` times as long."""
    for loop in reversed(loops):
        extent = (
            loop.extent * tirx.IntImm(str(loop.extent.ty), count) if loop.same_as(longer) else loop.extent
        )
        notes = dict(loop.annotations) if loop.annotations else {}
        if "ts.layout" in notes:
            notes["ts.layout"] = asked.longer(
                str(notes["ts.layout"]), next(k for k, x in enumerate(loops) if x.same_as(longer)), count
            )
        body = tirx.For(loop.loop_var, loop.min, extent, loop.kind, body, annotations=notes, span=loop.span)
    return body
