"""Atomic updates on a GPU (include/ts/atomic.cuh, red.cuh)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilescale.compiler.gpu.build import all_of, cast
from tilescale.compiler.gpu.places import Global
from tilescale.compiler.ir.lowerings import lowers
from tilescale.compiler.ir.operations import VOID
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.layout.loops import element_dtype
from tilescale.compiler.tvm_compat import tirx

if TYPE_CHECKING:
    from tilescale.compiler.gpu.lower import Lowering as GpuLowering
    from tilescale.compiler.gpu.state import State

#: dtype → its name in PTX, of those that vectors are added of
NAMES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


@lowers("gpu", "atomic")
def lower_atomic(call: Any, cx: GpuLowering) -> Any:
    """The update of one element: a statement, or the value before it.

    An update releases what its block did before and acquires what earlier updates of the element released:
    the block's threads have met (passes/insert_barriers.py), and this one's fences carry what it saw then
    (PTX ISA, "Memory Consistency Model": causality order through barriers is cumulative). Where a kernel
    updates a tensor and writes nothing else that others read, there is nothing to carry.
    """
    region, value = call.args
    if (moved := cx.in_vector(call)) is not None:  # added with its neighbours, behind their loop
        return tirx.BufferStore(
            moved.source, cast(cx.scalar(value), element_dtype(region.source)), list(moved.indices), call.span
        )
    buf, flat, tests, place = cx.access(region.source, [r.min for r in region.region], call, True)
    dtype = element_dtype(buf)
    operand = cast(cx.scalar(value), dtype)
    where = tirx.address_of(tirx.BufferLoad(buf, [flat]))
    kind = "publishing" if isinstance(place, Global) and cx.publishes else "atomic"
    kind = "system_red" if cx.remote is not None else kind  # a put that adds (ops/copy.py) orders nothing
    name = f"ts::{kind}_{call.attrs['kind']}{_suffix(cx, call, dtype)}"
    done = tirx.call_extern(dtype if cx.remote is None else "void", name, where, operand)
    test = all_of(tests) if tests else None
    if str(call.ty) != str(VOID):
        return done if test is None else tirx.if_then_else(test, done, tirx.const(0, dtype))
    made: Any = tirx.Evaluate(done, call.span)
    if test is not None:
        failed = (
            None
            if isinstance(place, Global)
            else cx.fail("bounds", call, f"an index of {place.name} lies outside")
        )
        made = tirx.IfThenElse(test, made, failed)
    return cx.once(made)


def emit_neighbours(cx: State, call: Any, count: int, at: Any, values: Any) -> Any:
    """``count`` neighbours of a tensor from the element ``at`` on, each added atomically, by one instruction;
    ``values`` is the first of the registers that are added. It carries what was written before as
    :func:`lower_atomic`'s update does; it returns nothing, so there is nothing that it could be ordered
    behind. Ranks that are not addressed are added to by the library, element by element."""
    if cx.remote is not None and cx.target.remote:
        suffix = {"float16": "_f16", "bfloat16": "_bf16"}.get(element_dtype(at.source), "")
        places = [
            [tirx.BufferLoad(e.source, [*e.indices[:-1], e.indices[-1] + k]) for e in (at, values)]
            for k in range(count)
        ]
        name = f"ts::system_red_add{suffix}"
        return sequence(
            [
                tirx.Evaluate(tirx.call_extern("void", name, tirx.address_of(a), v), call.span)
                for a, v in places
            ]
        )
    how = "remote_" if cx.remote is not None else "publishing_" if cx.publishes else ""
    name = f"{how}red_add{count}_{NAMES[element_dtype(at.source)]}"
    return tirx.Evaluate(
        tirx.call_extern("void", f"ts::{name}", tirx.address_of(at), tirx.address_of(values)), call.span
    )


def _suffix(cx: GpuLowering, call: Any, dtype: str) -> str:
    """Sums of 16-bit floats have an instruction (PTX ISA 9.0, "atom": float16 from sm_70 on, bfloat16 from
    sm_90 on), which rounds once as a sum in float32 does."""
    own = str(call.attrs["kind"]) == "add" and (
        dtype == "float16" or dtype == "bfloat16" and cx.target.wide_atomics
    )
    return f"_{NAMES[dtype]}" if own else ""
