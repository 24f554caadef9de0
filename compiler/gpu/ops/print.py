"""T.print on a GPU: printf by one thread of the executor. What one printf prints stays together and no more
does, so each line of a tile is one, and says which block and which elements it is about."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilescale.compiler.ir.contexts import StageContext
from tilescale.compiler.ir.lowerings import Lowering, lowers
from tilescale.compiler.ir.source import loc_of
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.layout.loops import element_dtype, in_registers
from tilescale.compiler.tvm_compat import ir, tirx
from tilescale.errors import utf8

if TYPE_CHECKING:
    from tilescale.compiler.gpu.lower import Lowering as GpuLowering

ZERO = tirx.IntImm("int32", 0)
#: elements of a line: printf takes 32 arguments (CUDA C++ Programming Guide, "Formatted Output"), some of
#: which say where
LINE = 16


def _rows(cx: GpuLowering, region: Any, kept: list[int], label: str) -> Any:
    """The elements, the last axis in lines of `LINE`, each one printf that says where it begins."""
    at = [cx.scalar(r.min) for r in region.region]
    counters = [
        (tirx.Var("ijkl"[n % 4], "int32"), cx.extent(region.region[k].extent))
        for n, k in enumerate(kept[:-1])
    ]
    for k, (var, extent) in zip(kept, counters, strict=False):
        cx.bind_range(var, extent)
        at[k] = at[k] + (var if str(at[k].ty) == "int32" else tirx.Cast(str(at[k].ty), var))
    outer, last = [var for var, _ in counters], cx.extent(region.region[kept[-1]].extent)
    body = _line(cx, region, at, kept[-1], last, outer, label)
    for var, extent in reversed(counters):
        body = tirx.For(var, ZERO, _count(extent), tirx.ForKind.SERIAL, body)
    return body


def _line(
    cx: GpuLowering, region: Any, at: list[Any], axis: int, extent: Any, outer: list[Any], label: str
) -> Any:
    """One row: whole lines in a loop, and what is left. Where the extent is no number, elements are lines of
    their own."""
    each = LINE if isinstance(extent, int) else 1
    out = []
    if not isinstance(extent, int) or extent >= each:
        start = tirx.Var("start", "int32")
        count = extent // each if isinstance(extent, int) else extent
        cx.bind_range(start, count)
        body = _values(cx, region, at, axis, start * each, each, outer, label)
        out.append(tirx.For(start, ZERO, _count(count), tirx.ForKind.SERIAL, body))
    if isinstance(extent, int) and extent % each:
        out.append(
            _values(
                cx, region, at, axis, tirx.IntImm("int32", extent // each * each), extent % each, outer, label
            )
        )
    return sequence(out)


def _values(
    cx: GpuLowering,
    region: Any,
    at: list[Any],
    axis: int,
    start: Any,
    count: int,
    outer: list[Any],
    label: str,
) -> Any:
    place, numbers, forms = cx.memory_of(region.source), [], []
    for k in range(count):
        index = list(at)
        offset = start + k
        index[axis] = at[axis] + (
            offset if str(at[axis].ty) == "int32" else tirx.Cast(str(at[axis].ty), offset)
        )
        tests = [
            t for i, e in zip(index, place.shape, strict=True) for t in (i >= 0, i < e) if not cx.proven(t)
        ]
        value = tirx.BufferLoad(place.buf, [cx.analyzer.simplify(place.flat(index))])
        for t in tests:
            value = tirx.if_then_else(t, value, tirx.const(0, str(value.ty)))
        number, form = _number(value, "%.6g")
        numbers.append(number)
        forms.append(form)
    where = ", ".join(["%d"] * len(outer) + ["%d:%d"])
    head = f"block (%d, %d, %d) {label}[{where}]:"
    return _printf(
        f"{head} {' '.join(forms)}\n", *cx.block, *outer, start, cx.analyzer.simplify(start + count), *numbers
    )


def _count(extent: Any) -> Any:
    return tirx.IntImm("int32", extent) if isinstance(extent, int) else tirx.Cast("int32", extent)


def _number(value: Any, form: str) -> tuple[Any, str]:
    if "float" in str(value.ty):
        return tirx.Cast("float64", value), form
    return tirx.Cast("int64", value), "%lld"


def _printf(text: str, *args: Any) -> Any:
    return tirx.Evaluate(tirx.call_extern("int32", "printf", ir.StringImm(utf8(text)), *args))


@lowers("gpu", "print")
class Print(Lowering["GpuLowering"]):
    def stage(self, call: Any, cx: StageContext) -> list[Any] | None:
        """A tile in registers is printed from shared memory."""
        value = call.args[0]
        if not isinstance(value, ir.TensorRegion) or not in_registers(value.source):
            return None
        shape = [int(r.extent) for r in value.region]
        tile = cx.tile(f"{value.source.name}_shared", shape, element_dtype(value.source), "shared", call.span)
        return [cx.copy(value, tile, call), cx.again(call, [tile])]

    def lower(self, call: Any, cx: GpuLowering) -> Any:
        value, label = call.args[0], str(call.attrs["msg"])
        loc = loc_of(call.span)
        head = f"block (%d, %d, %d) {loc.file}:{loc.line}: " if loc else "block (%d, %d, %d) "
        head, label = (
            head.replace("%", "%%").replace("(%%d, %%d, %%d)", "(%d, %d, %d)"),
            label.replace("%", "%%"),
        )
        if isinstance(value, ir.StringImm):
            return cx.once(_printf(f"{head}{label}\n", *cx.block))
        if not isinstance(value, ir.TensorRegion):
            number, form = _number(cx.scalar(value), "%.9g")
            return cx.once(_printf(f"{head}{label} = {form}\n", *cx.block, number))
        kept = [k for k, d in enumerate(call.attrs["dropped"]) if not d]
        if not kept:
            at = [cx.scalar(r.min) for r in value.region]
            place = cx.memory_of(value.source)
            number, form = _number(tirx.BufferLoad(place.buf, [place.flat(at)]), "%.9g")
            return cx.once(_printf(f"{head}{label} = {form}\n", *cx.block, number))
        return cx.once(sequence([_printf(f"{head}{label} =\n", *cx.block), _rows(cx, value, kept, label)]))
