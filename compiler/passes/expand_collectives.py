"""Collectives become remote copies and barriers, traced in place of the call with its scales open and at its
line."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.builder import state as bld
from tilescale.compiler.builder.values import Buffer, Region
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.operations import find
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.regions import Regions
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.ops.collective import _Collective
from tilescale.compiler.ops.team import team_of_call
from tilescale.compiler.tvm_compat import structural_map, structural_walk, tirx


def expand_collectives(program: TileProgram) -> TileProgram:
    """Replaces every collective of a program by what it is made of."""
    found: list[Any] = []
    structural_walk(
        program.func.body, (tirx.Evaluate, lambda s: found.append(s) if _is_collective(s.value) else None)
    )
    if not found:
        return program
    # expanded here and not inside the map, whose callbacks would wrap a refusal in an error of TVM's
    regions = Regions(program.func.body)
    made = {s: _expanded(program, s, regions) for s in found}
    return program.with_body(structural_map(program.func.body, (tirx.Evaluate, lambda s: made.get(s, s))))


def _is_collective(call: Any) -> bool:
    return isinstance(find(call), _Collective)


def _expanded(program: TileProgram, stmt: Any, regions: Regions) -> Any:
    call = stmt.value
    op = find(call)
    assert isinstance(op, _Collective)
    b = bld.Builder(program.name)
    b.launch, b.fixed_span = program.launch, stmt.span
    b.scales = [str(call.attrs["executor"]), str(call.attrs["reach"])]
    among, _ = team_of_call(call)
    b.teams = [] if among is None else [among]
    with bld.tracing(b):
        src, dst = (
            _region(b, r, call.attrs[side])
            for r, side in zip(call.args[:2], ("src_dropped", "dst_dropped"), strict=True)
        )
        op.expand(call, src, dst, regions)
    return sequence(b.bodies[0])


def _region(b: bld.Builder, r: Any, dropped: Any) -> Region:
    """The author's view of a region of the IR."""
    var = r.source
    buffer = b.buffers.get(var)
    if buffer is None:
        ty = var.ty
        shape = tuple(constant(e) if constant(e) is not None else e for e in ty.shape)
        dt = str(getattr(ty.dtype, "dtype", ty.dtype))
        kind = {"global.symm": "symm", "global.signal": "signal"}.get(ty.storage_scope, "tensor")
        buffer = b.buffers[var] = Buffer(var, var.name, shape, dt, ty.storage_scope, kind)
    mins = tuple(x.min for x in r.region)
    extents = tuple(constant(x.extent) if constant(x.extent) is not None else x.extent for x in r.region)
    return Region(buffer, mins, extents, tuple(bool(d) for d in dropped))
