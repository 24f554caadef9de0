"""Copies that a block's own threads start and await: cp.async and its groups (PTX ISA 9.0, "cp.async",
"cp.async.wait_group"), for rings whose one role copies ahead (passes/prefetch.py).

A thread's copies of a round are one group. It has arrived, for that thread alone, behind ``wait_group`` with
as many groups as it committed later; groups of other rings among them only make it wait longer. The barrier
that passes/insert_barriers.py puts behind the wait makes all threads' parts visible to all, and says
everyone that the stage of the round before has been read, which is filled next.

Of a ring whose rounds are issued early (passes/issue_early.py) the last round, which issues no copies,
commits an empty group, which is complete at once (PTX ISA 9.0, "cp.async.commit_group"). So in every round
one group was committed behind the one that is awaited, and the wait is the same: no branch stands there,
behind which alone ptxas would compute the addresses of what is read next.

cp.async writes by the generic proxy, as threads do; wgmma and TMA read by the asynchronous one (PTX ISA 9.0,
"Proxies"). Where these read a ring, each thread makes a proxy fence between its wait and that barrier: its
own copies have arrived for it and are there for engines then, and whoever issues a product behind the barrier
comes behind the fences of all threads. The other way round a stage is filled again behind the end of the
products that read it: every thread awaits them in front of what writes their operands
(passes/await_products.py), and the next round's barrier stands between that and the copies.

What says where gathered rows lie (`lower_elements`) each thread reads itself, in front of its copies: from
tensors that nobody writes, or tiles that were written in front of the loop, with a barrier between.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from tilescale.compiler.gpu.build import all_of, at, call
from tilescale.compiler.gpu.nests import at_once
from tilescale.compiler.ir.lowerings import lowers
from tilescale.compiler.ir.nests import Nest, long_axes
from tilescale.compiler.ir.operations import name_of
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.statements import sequence, statements
from tilescale.compiler.ir.walks import mentions
from tilescale.compiler.layout.chunks import chunk, integer_names
from tilescale.compiler.layout.loops import bits_of
from tilescale.compiler.passes.copy_nests import first_of
from tilescale.compiler.passes.roles import calls
from tilescale.compiler.passes.schedule import AHEAD
from tilescale.compiler.tvm_compat import ir, structural_walk, sym, tirx

#: bytes of a row that threads copy side by side: a line of the cache
WIDE = 128
#: copies of a thread that are laid out one by one
INLINE = 64
#: a place in front of any tensor's first number, by more than a row is long
BEFORE = -(1 << 30)

if TYPE_CHECKING:
    from tilescale.compiler.cuda.lower import Lowering as CudaLowering


@lowers("cuda", "cp_async")
def lower_cp_async(copy: Any, cx: CudaLowering) -> Any:
    """The threads share the tile's chunks, neighbours side by side; those outside the tensor arrive as zeros,
    of which nothing is read."""
    src, dst = copy.args[:2]
    bytes_ = chunk(copy, integer_names(cx.program.func.body))
    each = bytes_ * 8 // bits_of(dst.source)
    from_axes, to_axes = long_axes(src), [k for k in long_axes(dst) if k]
    sizes = [int(dst.region[k].extent) for k in to_axes]
    sizes[-1] //= each
    total, threads = prod(sizes), cx.executor.threads
    step, flat = tirx.Var("u", "int32"), tirx.Var("chunk", "int32")
    cx.bind_range(step, -(-total // threads))
    cx.bind_range(flat, total)
    target, source = [cx.scalar(r.min) for r in dst.region], [r.min for r in src.region]
    unit = 1
    for k in reversed(range(len(sizes))):
        index = flat // unit % sizes[k] if k else flat // unit
        index = cx.analyzer.simplify(index * each if k == len(sizes) - 1 else index)
        target[to_axes[k]] = target[to_axes[k]] + index
        name = tirx.Var(f"at{k}", "int32")
        cx.variables[name] = index
        source[from_axes[k]] = source[from_axes[k]] + tirx.Cast(str(source[from_axes[k]].ty), name)
        unit *= sizes[k]
    place = cx.shared_of(dst.source)
    frm, where, tests, _ = cx.access(src.source, source, copy, False)
    operands = [at(place.buf, cx.analyzer.simplify(place.flat(target))), at(frm, where)]
    if tests:
        operands.append(tirx.Select(all_of(tests), tirx.IntImm("int32", bytes_), tirx.IntImm("int32", 0)))
    body: Any = call(f"cp_async<{bytes_}>", *operands, span=copy.span)
    if total % threads:
        body = tirx.IfThenElse(flat < total, body, None)
    body = sequence([tirx.Bind(flat, cx.analyzer.simplify(step * threads + cx.thread())), body])
    return tirx.For(
        step,
        tirx.IntImm("int32", 0),
        tirx.IntImm("int32", -(-total // threads)),
        tirx.ForKind.UNROLLED,
        body,
        span=copy.span,
    )


def lower_elements(nest: Nest, element: Any, cx: CudaLowering) -> Any:
    """A nest whose iterations copy an element each: `_across` threads side by side share the chunks of a row,
    so that each of them looks up once where it lies, and 128 bytes of a row go together.

    Places of some rows are looked up before any of them is copied: a thread waits for memory once for all of
    them. A condition that does not hold puts a row in front of the tensor, where nothing is read; its place
    is not looked up then, since T.if_then_else evaluates what it chooses alone."""
    src, dst = element.args[:2]
    bytes_ = int(element.attrs["bytes"])
    extents = dict(zip(nest.vars, nest.extents, strict=True))
    *axes, inner = [r.min for r in dst.region if isinstance(r.min, ir.Var) and r.min in extents]
    each = bytes_ * 8 // bits_of(dst.source)
    rows, along, threads = (
        prod(int(extents[v]) for v in axes),
        int(extents[inner]) // each,
        cx.executor.threads,
    )
    across = _across(rows, along, threads, bytes_)
    together = threads // across
    rounds, steps = -(-rows // together), -(-along // across)
    batch = at_once(rounds)
    around, number, step = tirx.Var("v", "int32"), tirx.Var("u", "int32"), tirx.Var("w", "int32")
    row, chunk = tirx.Var("row", "int32"), tirx.Var("chunk", "int32")
    for var, extent in (
        (around, rounds // batch),
        (number, batch),
        (step, steps),
        (row, rows),
        (chunk, along),
    ):
        cx.bind_range(var, extent)
    unit: Any = 1
    for v in reversed(axes):
        _stands_for(cx, v, row // unit % int(extents[v]) if v is not axes[0] else row // unit)
        unit *= int(extents[v])
    _stands_for(cx, inner, chunk * each)

    def of_rows(body: Any) -> Any:
        """``body`` for every row of a batch that is this thread's."""
        at_ = number * together + cx.thread() // across
        at_ = at_ if rounds == batch else at_ + around * (batch * together)
        body = tirx.IfThenElse(row < rows, body, None) if rows % together else body
        body = sequence([tirx.Bind(row, cx.analyzer.simplify(at_)), body])
        return _loop(number, batch, tirx.ForKind.UNROLLED, body, element)

    places, source = _looked_up(element, inner, number, batch, cx)
    place = cx.shared_of(dst.source)
    frm, where, tests, _ = cx.access(src.source, source, element, False)
    target = cx.analyzer.simplify(place.flat([cx.scalar(r.min) for r in dst.region]))
    operands = [at(place.buf, target), at(frm, where)]
    if tests:
        operands.append(tirx.Select(all_of(tests), tirx.IntImm("int32", bytes_), tirx.IntImm("int32", 0)))
    copy: Any = call(f"cp_async<{bytes_}>", *operands, span=element.span)
    copy = tirx.IfThenElse(chunk < along, copy, None) if along % across else copy
    mine = cx.analyzer.simplify(step * across + cx.thread() % across)
    kind = tirx.ForKind.UNROLLED if batch * steps <= INLINE else tirx.ForKind.SERIAL
    copies = _loop(step, steps, kind, sequence([tirx.Bind(chunk, mine), copy]), element)
    allocated, found = [tirx.AllocBuffer(s.buffer) for s in places], sequence(places)
    body = sequence([*allocated, of_rows(found) if places else found, of_rows(copies)])
    return body if rounds == batch else _loop(around, rounds // batch, tirx.ForKind.SERIAL, body, element)


def _across(rows: int, along: int, threads: int, bytes_: int) -> int:
    """How many threads share the chunks of a row: enough for 128 bytes, more where there are few rows."""
    n = 1
    while (n < min(along, WIDE // bytes_) or n < along and threads // n > rows) and threads % (2 * n) == 0:
        n *= 2
    return n


def _stands_for(cx: CudaLowering, v: Any, value: Any) -> None:
    """A variable of a nest is this expression."""
    value = cx.analyzer.simplify(value)
    cx.variables[v] = value if str(v.ty) == "int32" else tirx.Cast(str(v.ty), value)


def _looked_up(
    element: Any, inner: Any, number: Any, count: int, cx: CudaLowering
) -> tuple[list[Any], list[Any]]:
    """The stores of what is looked up in memory for a row, as the ``number``-th of ``count`` in registers,
    and where the source lies by those. ``inner``: the variable along rows, which adds to where one begins."""
    source = [r.min for r in element.args[0].region]
    condition = element.args[2] if len(element.args) > 2 else None
    stores: list[Any] = []
    for k in [k for k, e in enumerate(source) if _loads(e)] or ([0] if condition is not None else []):
        along = mentions(source[k], inner)
        begins = first_of(source[k], inner, sym.Analyzer()) if along else source[k]
        kind, name = str(begins.ty), f"{element.args[0].source.name}_at"
        tile = tirx.decl_buffer((count,), kind, name, scope="local", layout=None)
        if condition is None:
            value = cx.scalar(begins)
        else:
            test = cx.scalar(condition)
            with cx.analyzer.constraint_scope(test):
                nowhere = tirx.const(BEFORE if along else -1, kind)
                value = tirx.if_then_else(test, cx.scalar(begins), nowhere)
        stores.append(tirx.BufferStore(tile, value, [number]))
        held = tirx.Var(name, kind)
        cx.variables[held] = tirx.BufferLoad(tile, [number])
        source[k] = held + (inner if kind == str(inner.ty) else tirx.Cast(kind, inner)) if along else held
    return stores, source


def _loop(var: Any, extent: int, kind: Any, body: Any, node: Any) -> Any:
    return tirx.For(var, tirx.IntImm("int32", 0), tirx.IntImm("int32", extent), kind, body, span=node.span)


def _loads(e: Any) -> bool:
    """Whether an index is looked up in memory."""
    found: list[Any] = []
    structural_walk(e, (ir.TensorLoad, found.append))
    return bool(found)


def token(cx: CudaLowering, made: Any) -> Any:
    """A token of a ring. Order, and the barrier behind each wait, say when a stage is empty: acquire and
    release are nothing."""
    number = int(made.attrs["ring"])
    ring = cx.program.schedule.rings[number]
    kind = made.op.name.removeprefix("ts.ring_")
    if ring.form != AHEAD or kind in ("acquire", "release"):
        return sequence([])
    if kind == "commit":
        return sequence([]) if made in cx.closed else call("cp_async_commit", span=made.span)
    if ring.early:
        return call("cp_async_wait<1>", span=made.span)
    everything, later = call("cp_async_wait<0>", span=made.span), ring.depth - 2
    if not later:
        return everything
    # towards the loop's end fewer rounds than `later` were committed behind this one: then all of them are
    # awaited
    behind = cx.scalar(_filled(cx.program, number)) - cx.scalar(made.args[0])
    return tirx.IfThenElse(behind > later, call(f"cp_async_wait<{later}>", span=made.span), everything)


def issued_early(s: Any, program: TileProgram) -> list[Any]:
    """The commits of an If around the copies of rounds that are issued early; none of any other."""
    if s.else_case is not None:
        return []
    found = [x.value for x in statements(s.then_case) if name_of(x) == "ring_commit"]
    return [c for c in found if program.schedule.rings[int(c.attrs["ring"])].early]


def _filled(program: TileProgram, ring: int) -> Any:
    """How many rounds of a ring have been committed."""
    return next(
        c.args[0]
        for c in calls(program.func.body)
        if c.op.name == "ts.ring_commit" and int(c.attrs["ring"]) == ring
    )
