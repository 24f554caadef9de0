"""Non-blocking copies to other ranks and from them (``T.copy(…, dst=rank, signal=s[i], blocking=False)``, or
``src=rank``): those that stand in the communicator's part (passes/roles.py) are puts and pulls of its warps;
any other is a copy by the block's threads and a signal behind it, which is right as well, and not beside
anything.

A put or pull by spare warps is plain loads and stores of at most 16 bytes, many under way at once: both sides
are rows of a tensor without strides of its own, of one dtype of whole bytes.
"""

from __future__ import annotations

from typing import Any

from tilescale.compiler.advice import note, reason
from tilescale.compiler.ir.multiples import bound_in, spelt_out
from tilescale.compiler.ir.nests import long_axes
from tilescale.compiler.ir.operations import find, operations
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.rewrite import rebuild
from tilescale.compiler.ir.scales import Executor
from tilescale.compiler.layout.loops import bits_of, element_dtype
from tilescale.compiler.ops.remote_put import remote_put
from tilescale.compiler.passes.split_puts import in_two
from tilescale.compiler.tvm_compat import ir, structural_map, structural_walk, sym, tirx

#: the role of warps beside the producer that make the block's non-blocking copies to other ranks
COMMUNICATOR = "communicator"


def remote_puts(program: TileProgram) -> TileProgram:
    """The program with each non-blocking put as what makes it, and a note that says who and why."""
    here, elsewhere = _puts(program.func.body)
    if not here and not elsewhere:
        return program
    warps, depth = program.launch.comm_warps, program.launch.comm_depth

    def role(s: Any) -> Any:
        if s.attr_key != "ts.role" or str(s.node.value) != COMMUNICATOR:
            return s
        body = structural_map(
            s.body, (tirx.Evaluate, lambda e: remote_put(e.value, warps, depth) if is_put(e.value) else e)
        )
        return tirx.AttrStmt(s.node, s.attr_key, s.value, body, s.span)

    body = structural_map(program.func.body, (tirx.AttrStmt, role))
    block = Executor("block", program.launch.threads)
    made = program.with_body(
        rebuild(
            body, block, lambda s, ex: in_two(s) if isinstance(s, tirx.Evaluate) and is_put(s.value) else None
        )
        if elsewhere
        else body
    )
    made.notes = [*program.notes, *_said(program, here, elsewhere)]
    return made


def _said(program: TileProgram, here: list[Any], elsewhere: list[Any]) -> list[Any]:
    name, warps = program.name, program.launch.comm_warps
    if here:
        who = f"{warps} warp{'s' * (warps > 1)} beside the producer"
        return [f"{name}: {len(here)} non-blocking cop{'ies' if len(here) > 1 else 'y'} by {who}"]
    plan = program.schedule
    why = (plan.puts_kept if plan is not None else "") or (
        "T.Kernel(comm_warps=0)"
        if not warps
        else "no producer fills rings, beside whom warps could make them"
    )
    return [note(f"{name}: the block's own threads make its non-blocking copies: {why}", why, None)]


def is_put(call: Any) -> bool:
    """Whether a call is a copy to another rank, or from one, that goes on beside its executor."""
    op = find(call)
    return op is not None and op.puts and op.queue(call) in ("put", "pull")


def is_pull(call: Any) -> bool:
    """Whether a call is a copy from another rank that goes on beside its executor."""
    op = find(call)
    return op is not None and op.puts and op.queue(call) == "pull"


def puts_of(s: Any) -> list[Any]:
    """The non-blocking puts in a statement."""
    return [call for call, op in operations(s) if op.puts and is_put(call)]


def _puts(body: Any) -> tuple[list[Any], list[Any]]:
    """The non-blocking puts in the communicator's part, and all others."""
    every, inside = puts_of(body), list[Any]()
    if not every:
        return [], []

    def role(s: Any) -> None:
        if s.attr_key == "ts.role" and str(s.node.value) == COMMUNICATOR:
            inside.extend(puts_of(s.body))

    structural_walk(body, (tirx.AttrStmt, role))
    return inside, [c for c in every if not any(c.same_as(d) for d in inside)]


def unfit(program: TileProgram, call: Any) -> str | None:
    """Why spare warps cannot make a put; None where they can. They leave out what lies outside of the
    destination, and never read outside of the source: along each axis of a part of it what is copied lies
    inside, or ends where it ends in the destination."""
    src, dst = call.args[:2]
    for r in (src, dst):
        name, var = r.source.name, r.source
        if all(not p.var.same_as(var) for p in program.params):
            return f"{name} is a view"
        if list(var.ty.strides):
            return reason(f"{name} has strides of its own", "a T.Tensor or T.SymmTensor without strides")
        if (axes := long_axes(r)) and axes[-1] != len(var.ty.shape) - 1:
            return f"{name}'s part is a column"
    kind = element_dtype(src.source)
    if kind != element_dtype(dst.source):
        return reason(f"the copy of {src.source.name} changes the dtype", f"two tensors of {kind}")
    if bits_of(src.source) % 8:
        return f"elements of {src.source.name} are smaller than a byte"
    names, ranges = bound_in(program.func.body), _ranges(program)
    pairs = dict(zip(long_axes(src), long_axes(dst), strict=True))
    for k, (r, size) in enumerate(zip(src.region, src.source.ty.shape, strict=True)):
        if k not in pairs:
            continue  # one place: it is there or it is not
        low = spelt_out(r.min, names)
        if ranges.can_prove(low >= 0) and ranges.can_prove(low + r.extent <= size):
            continue
        j = pairs[k]
        if not (
            ranges.can_prove(low - spelt_out(dst.region[j].min, names) == 0)
            and ranges.can_prove(size - dst.source.ty.shape[j] == 0)
        ):
            return f"its part of {src.source.name} may reach beyond the end of axis {k}"
    return None


def _ranges(program: TileProgram) -> Any:
    """An analyzer that knows the ranges of loops and blocks."""
    made = sym.Analyzer()

    def bind(var: Any, low: Any, extent: Any) -> None:
        if all(isinstance(x, tirx.IntImm) for x in (low, extent)):
            made.bind(var, ir.Range.from_min_extent(low, extent))

    structural_walk(program.func.body, (tirx.For, lambda f: bind(f.loop_var, f.min, f.extent)))
    for var, extent in zip(program.launch.block_vars, program.launch.grid, strict=False):
        bind(
            var,
            tirx.IntImm(str(var.ty), 0),
            tirx.IntImm(str(var.ty), extent) if isinstance(extent, int) else extent,
        )
    return made
