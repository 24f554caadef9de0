"""Copies that a block's own threads start and await: cp.async and its groups (PTX ISA 9.0, "cp.async",
"cp.async.wait_group"), for rings whose one role copies ahead (passes/prefetch.py).

A thread's copies of a round are one group. It has arrived, for that thread alone, behind ``wait_group`` with
as many groups as it committed later; groups of other rings among them only make it wait longer. The barrier
that passes/insert_barriers.py puts behind the wait makes all threads' parts visible to all, and says
everyone that the stage of the round before has been read, which is filled next.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from tilescale.compiler.gpu.build import all_of, at, call
from tilescale.compiler.ir.lowerings import lowers
from tilescale.compiler.ir.nests import long_axes
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.layout.chunks import chunk, integer_names
from tilescale.compiler.layout.loops import bits_of
from tilescale.compiler.passes.roles import calls
from tilescale.compiler.passes.schedule import AHEAD
from tilescale.compiler.tvm_compat import tirx

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


def token(cx: CudaLowering, made: Any) -> Any:
    """A token of a ring. Order, and the barrier behind each wait, say when a stage is empty: acquire and
    release are nothing."""
    number = int(made.attrs["ring"])
    ring = cx.program.schedule.rings[number]
    kind = made.op.name.removeprefix("ts.ring_")
    if ring.form != AHEAD or kind in ("acquire", "release"):
        return sequence([])
    if kind == "commit":
        return call("cp_async_commit", span=made.span)
    everything, later = call("cp_async_wait<0>", span=made.span), ring.depth - 2
    if not later:
        return everything
    # towards the loop's end fewer rounds than `later` were committed behind this one: then all of them are
    # awaited
    behind = cx.scalar(_filled(cx.program, number)) - cx.scalar(made.args[0])
    return tirx.IfThenElse(behind > later, call(f"cp_async_wait<{later}>", span=made.span), everything)


def _filled(program: TileProgram, ring: int) -> Any:
    """How many rounds of a ring have been committed."""
    return next(
        c.args[0]
        for c in calls(program.func.body)
        if c.op.name == "ts.ring_commit" and int(c.attrs["ring"]) == ring
    )
