"""T.gemm by fused multiply-adds, on any GPU: operands lie in shared memory, the accumulator in registers, and
each thread sums a rectangle of it. Small-float accumulators are kept in float32 during the call and rounded
once. A target with instructions for products overrides what `Gemm` has of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from tilescale.compiler.gpu.places import InShared, Registers, digit
from tilescale.compiler.ir.contexts import LayoutContext, StageContext
from tilescale.compiler.ir.lowerings import Lowering, lowers
from tilescale.compiler.ir.multiples import spelt_out
from tilescale.compiler.ir.nests import matrix_axes
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.source import loc_of
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.layout import Fragment, Piece
from tilescale.compiler.layout.infer import Demand
from tilescale.compiler.layout.loops import element_dtype, in_registers
from tilescale.compiler.layout.products import extents
from tilescale.compiler.layout.spread import divisors, spread
from tilescale.compiler.passes.stage_operands import is_whole
from tilescale.compiler.tvm_compat import tirx

if TYPE_CHECKING:
    from tilescale.compiler.gpu.lower import Lowering as GpuLowering

#: the lowering of a target that overrides `Gemm`
Own = TypeVar("Own", bound="GpuLowering")
ZERO = tirx.IntImm("int32", 0)


# ---- staging and layouts


def into_shared(
    call: Any, cx: StageContext, operands: Sequence[Any], moved: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Copies of the ``moved`` ones of operands into tiles in shared memory, and the operands with those in
    their places."""
    copies, placed = [], []
    for r in operands:
        if any(r is x for x in moved):
            shape = [int(x.extent) for x in r.region]
            tile = cx.tile(f"{r.source.name}_shared", shape, element_dtype(r.source), "shared", call.span)
            copies.append(cx.copy(r, tile, call))
            placed.append(tile)
        else:
            placed.append(r)
    return copies, placed


def stage(call: Any, cx: StageContext, from_registers: bool = False) -> list[Any] | None:
    """Operands in registers go to shared memory, an accumulator that is no whole fragment into one.
    ``from_registers``: the instruction takes A from where it lies."""
    a, b, c = call.args[:3]
    own = in_registers(c.source) and is_whole(c) and len(c.source.ty.shape) == 2
    moved = [r for r in (a, b) if in_registers(r.source) and not (r is a and from_registers)]
    if own and not moved:
        return None
    before, operands = into_shared(call, cx, (a, b), moved)
    if own:
        return [*before, cx.again(call, [*operands, *call.args[2:]])]
    m, n, _ = extents(call)
    tile = cx.tile(f"{c.source.name}_part", (m, n), element_dtype(c.source), "local.fragment", call.span)
    if not constant(call.args[3]):
        before.append(cx.copy(c, tile, call))
    return [*before, cx.again(call, [*operands, tile, *call.args[3:]]), cx.copy(tile, c, call)]


def simt_fragments(m: int, n: int, threads: int) -> list[tuple[Fragment, int, int]]:
    """Every way to cut an accumulator among threads, the cheapest in registers and in reads of shared memory
    first."""
    found = []
    for used in divisors(threads):
        for tm in divisors(used):
            tn = used // tm
            vector = next(v for v in (4, 2, 1) if n >= v * tn or v == 1)
            made = spread((m, n), threads, (tm, tn), vector, 1)
            rows, cols = made.shape[0] // tm, made.shape[1] // tn
            found.append(((rows * cols, rows + cols / vector, tm), made, tm, tn))
    found.sort(key=lambda f: f[0])
    return [(f, tm, tn) for _, f, tm, tn in found[:16]]


# ---- thread IR


@dataclass
class Operand:
    """A matrix in shared memory. ``at(i, k)`` is its flat index; ``across``: it is stored with its rows as
    columns."""

    place: InShared
    mins: list[Any]
    axes: tuple[int, int]
    across: bool
    rows: int
    cols: int
    #: where its stored rows begin, in names that are defined nowhere else
    start: Any

    def at(self, i: Any, k: Any) -> Any:
        index = list(self.mins)
        first, second = (k, i) if self.across else (i, k)
        for axis, x in zip(self.axes, (first, second), strict=True):
            index[axis] = index[axis] + x
        return self.place.flat(index)


def operand(cx: GpuLowering, region: Any, across: bool) -> Operand:
    axes = matrix_axes(region)
    mins = [cx.scalar(r.min) for r in region.region]
    stored = [int(region.region[k].extent) for k in axes]
    rows, cols = reversed(stored) if across else stored
    start = spelt_out(region.region[axes[1]].min, cx.definitions)
    return Operand(cx.shared_of(region.source), mins, axes, across, rows, cols, start)


def both_operands(cx: GpuLowering, call: Any) -> tuple[Registers | Operand, Operand]:
    """Where A and B lie; of A the registers, where it is there. B's "rows" are the product's columns."""
    left, right = call.args[:2]
    held = in_registers(left.source)
    a = cx.registers_of(left.source) if held else operand(cx, left, bool(call.attrs["trans_a"]))
    return a, operand(cx, right, not bool(call.attrs["trans_b"]))


def unrolled(var: Any, extent: int, body: Any) -> Any:
    return tirx.For(var, ZERO, tirx.IntImm("int32", extent), tirx.ForKind.UNROLLED, body)


def _start(cx: GpuLowering, fragment: Fragment, axis: int) -> Any:
    """Where along an axis of the accumulator this thread's part begins."""
    total: Any = ZERO
    for p in fragment.pieces:
        if p.axis == axis and p.to == "thread":
            total = (
                total
                + digit(cx.thread(), p.stride, p.extent, p.stride * p.extent == fragment.threads) * p.unit
            )
    return cx.analyzer.simplify(total)


def clamped(cx: GpuLowering, index: Any, extent: int) -> Any:
    """An index that may lie in the padding of the accumulator, kept inside the operand: what it gives is
    never stored."""
    return (
        index if cx.analyzer.can_prove(index < extent) else tirx.min(index, tirx.IntImm("int32", extent - 1))
    )


def _simt(
    cx: GpuLowering, call: Any, a: Operand, b: Operand, c: Registers, acc: Any, inner: str, k: int
) -> Any:
    """For each k: the rows' elements of A, the columns' of B, and their outer product."""
    rows, cols = _slot_digits(c.layout, 0), _slot_digits(c.layout, 1)
    step = tirx.Var("k", "int32")
    cx.bind_range(step, k)
    loaded, stmts, counters = [], [], []
    for name, o, axis, digits in (("a", a, 0, rows), ("b", b, 1, cols)):
        count = _count(digits)
        buf = tirx.decl_buffer((count,), inner, name, scope="local", layout=None)
        begin = tirx.Var("row0" if axis == 0 else "col0", "int32")
        where = _start(cx, c.layout, axis)
        cx.bound(begin, where)
        stmts.append(tirx.Bind(begin, where))
        u = tirx.Var("u", "int32")
        cx.bind_range(u, count)
        index = clamped(cx, cx.analyzer.simplify(begin + _offset(digits, u)), o.rows)
        value = tirx.BufferLoad(o.place.buf, [cx.analyzer.simplify(o.at(index, step))])
        value = value if str(value.ty) == inner else tirx.Cast(inner, value)
        loaded += [tirx.AllocBuffer(buf), unrolled(u, count, tirx.BufferStore(buf, value, [u], call.span))]
        counters.append((buf, count))
    i, j = tirx.Var("i", "int32"), tirx.Var("j", "int32")
    (a_buf, a_count), (b_buf, b_count) = counters
    cx.bind_range(i, a_count)
    cx.bind_range(j, b_count)
    slot = cx.analyzer.simplify(_slots(rows, i) + _slots(cols, j))
    total = tirx.BufferLoad(acc, [slot]) + tirx.BufferLoad(a_buf, [i]) * tirx.BufferLoad(b_buf, [j])
    product = unrolled(i, a_count, unrolled(j, b_count, tirx.BufferStore(acc, total, [slot], call.span)))
    loop = tirx.For(
        step, ZERO, tirx.IntImm("int32", k), tirx.ForKind.SERIAL, sequence([*loaded, product]), span=call.span
    )
    return sequence([*stmts, loop])


def _slot_digits(fragment: Fragment, axis: int) -> list[Piece]:
    return sorted((p for p in fragment.pieces if p.axis == axis and p.to == "slot"), key=lambda p: p.unit)


def _count(digits: list[Piece]) -> int:
    made = 1
    for p in digits:
        made *= p.extent
    return made


def _mixed(digits: list[Piece], u: Any, weight: Any) -> Any:
    """A counter over all of the digits, the finest first, as the sum of its digits times ``weight``."""
    total: Any = ZERO
    step = 1
    for k, p in enumerate(digits):
        total = total + digit(u, step, p.extent, last=k == len(digits) - 1) * weight(p)
        step *= p.extent
    return total


def _offset(digits: list[Piece], u: Any) -> Any:
    return _mixed(digits, u, lambda p: p.unit)


def _slots(digits: list[Piece], u: Any) -> Any:
    return _mixed(digits, u, lambda p: p.stride)


# ---- what is registered


@lowers("gpu", "gemm")
class Gemm(Lowering[Own]):
    demands = True

    def stage(self, call: Any, cx: StageContext) -> list[Any] | None:
        return stage(call, cx)

    def layouts(self, call: Any, cx: LayoutContext) -> list[Any]:
        """The accumulator's fragments, best first."""
        m, n, _ = extents(call)
        threads, c, loc = cx.executor_of(call).threads, call.args[2].source, loc_of(call.span)
        made = [(f, f"T.gemm ({tm} × {tn} threads)") for f, tm, tn in simt_fragments(m, n, threads)]
        return [[Demand(c, f, what, loc)] for f, what in made]

    def product(self, call: Any, cx: Own, acc: Any, inner: str) -> Any:
        """The products added to ``acc``, the accumulator in ``inner``'s arithmetic."""
        a, b = both_operands(cx, call)
        assert isinstance(a, Operand)  # `stage` leaves A in registers to tensor cores alone
        return _simt(cx, call, a, b, cx.registers_of(call.args[2].source), acc, inner, extents(call)[2])

    def lower(self, call: Any, cx: Own) -> Any:
        """C += op(A) · op(B)."""
        c = cx.registers_of(call.args[2].source)
        dtype = element_dtype(c.buf)
        inner = "float32" if dtype in ("float16", "bfloat16") or dtype.startswith("float8") else dtype
        slots = c.layout.slots
        acc = (
            c.buf
            if inner == dtype
            else tirx.decl_buffer((slots,), inner, f"{c.name}_sum", scope="local", layout=None)
        )
        head: list[Any] = [] if acc is c.buf else [tirx.AllocBuffer(acc, {}, call.span)]
        clear = constant(call.args[3])
        u = tirx.Var("u", "int32")
        zero = tirx.BufferStore(acc, tirx.const(0, inner), [u], call.span)
        held = tirx.BufferStore(acc, tirx.Cast(inner, tirx.BufferLoad(c.buf, [u])), [u], call.span)
        start: Any = None
        if clear is None:
            start = tirx.IfThenElse(cx.scalar(call.args[3]), zero, None if acc is c.buf else held)
        elif clear:
            start = zero
        elif acc is not c.buf:
            start = held
        if start is not None:
            head.append(unrolled(u, slots, start))
        body = self.product(call, cx, acc, inner)
        tail = []
        if acc is not c.buf:
            v = tirx.Var("u", "int32")
            tail = [
                unrolled(
                    v,
                    slots,
                    tirx.BufferStore(c.buf, tirx.Cast(dtype, tirx.BufferLoad(acc, [v])), [v], call.span),
                )
            ]
        return sequence([*head, body, *tail])
