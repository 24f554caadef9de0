"""T.print on a GPU: printf by one thread of the executor. A tile's rows are lines of their own, and lines of several blocks may mix."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.frontend.builder import sequence
from tilescale.compiler.frontend.source import loc_of
from tilescale.compiler.layout.loops import element_dtype, in_registers
from tilescale.compiler.tvm_compat import ir, tirx

ZERO = tirx.IntImm("int32", 0)


def stage(call: Any, cx: Any) -> list[Any] | None:
    """A tile in registers is printed from shared memory."""
    value = call.args[0]
    if not isinstance(value, ir.TensorRegion) or not in_registers(value.source):
        return None
    shape = [int(r.extent) for r in value.region]
    tile = cx.tile(f"{value.source.name}_shared", shape, element_dtype(value.source), "shared", call.span)
    return [cx.copy(value, tile, call), cx.again(call, [tile])]


def emit_print(cx: Any, call: Any) -> Any:
    value, label = call.args[0], str(call.attrs["msg"])
    loc = loc_of(call.span)
    head = f"block (%d, %d, %d) {loc.file}:{loc.line}: " if loc else "block (%d, %d, %d) "
    head, label = head.replace("%", "%%").replace("(%%d, %%d, %%d)", "(%d, %d, %d)"), label.replace("%", "%%")
    if isinstance(value, ir.StringImm):
        return cx.once(_printf(f"{head}{label}\n", *cx.block))
    if not isinstance(value, ir.TensorRegion):
        number, form = _number(cx.scalar(value), "%.9g")
        return cx.once(_printf(f"{head}{label} = {form}\n", *cx.block, number))
    kept = [k for k, d in enumerate(call.attrs["dropped"]) if not d]
    return cx.once(sequence([_printf(f"{head}{label} =\n", *cx.block), _rows(cx, value, kept)]))


def _rows(cx: Any, region: Any, kept: list[int]) -> Any:
    """The elements, the last axis in a line."""
    at = [cx.scalar(r.min) for r in region.region]
    counters = [(tirx.Var("ijkl"[n % 4], "int32"), cx.extent(region.region[k].extent)) for n, k in enumerate(kept)]
    for k, (var, extent) in zip(kept, counters, strict=True):
        cx.bind_range(var, extent)
        at[k] = at[k] + (var if str(at[k].ty) == "int32" else tirx.Cast(str(at[k].ty), var))
    place = cx.places[region.source]
    tests = [t for i, e in zip(at, place.shape, strict=True) for t in (i >= 0, i < e) if not cx.proven(t)]
    value = tirx.BufferLoad(place.buf, [cx.analyzer.simplify(place.flat(at))])
    for t in tests:
        value = tirx.if_then_else(t, value, tirx.const(0, str(value.ty)))
    number, form = _number(value, "%.6g")
    body: Any = _printf(f" {form}", number)
    for depth, (var, extent) in enumerate(reversed(counters)):
        count = tirx.IntImm("int32", extent) if isinstance(extent, int) else tirx.Cast("int32", extent)
        body = tirx.For(var, ZERO, count, tirx.ForKind.SERIAL, body)
        body = sequence([body, _printf("\n")]) if depth == 0 else body
    return body if counters else sequence([body, _printf("\n")])


def _number(value: Any, form: str) -> tuple[Any, str]:
    if "float" in str(value.ty):
        return tirx.Cast("float64", value), form
    return tirx.Cast("int64", value), "%lld"


def _printf(text: str, *args: Any) -> Any:
    return tirx.Evaluate(tirx.call_extern("int32", "printf", ir.StringImm(text), *args))
