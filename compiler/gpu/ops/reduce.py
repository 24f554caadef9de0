"""Reductions on a GPU, in a fixed order: each thread folds its own slots by rising index (greatest and least
in four chains, since their order makes no difference), then lanes fold by shuffles whose partners see each
other's value (so all get the same bits), then groups of threads through shared memory, in order of the group.
Lanes that have many neighbours of the result share them out on the way there, and each group's sum is added
by one thread.

The result lies where the tile's fragment, with the axis taken out, says: in all threads that had a part.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from tilescale.compiler.gpu.build import all_of, cast
from tilescale.compiler.gpu.cexpr import bits_of
from tilescale.compiler.gpu.places import digit
from tilescale.compiler.ir.contexts import ExchangeContext, LayoutContext, StageContext
from tilescale.compiler.ir.folds import NUMBERS, accumulator, fold, identity, in_any_order
from tilescale.compiler.ir.lowerings import Lowering, lowers
from tilescale.compiler.ir.nests import nest_of
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.layout import Fragment, Piece
from tilescale.compiler.layout.folds import axis_of, digits_across, result
from tilescale.compiler.layout.infer import Demand
from tilescale.compiler.layout.loops import choose, element_dtype, in_registers
from tilescale.compiler.layout.pieces import radix
from tilescale.compiler.layout.shared import CHUNK_BYTES
from tilescale.compiler.passes.stage_operands import again, copy_statement, is_whole, whole
from tilescale.compiler.tvm_compat import ir, tirx

if TYPE_CHECKING:
    from tilescale.compiler.gpu.lower import Lowering as GpuLowering
    from tilescale.compiler.gpu.places import InShared

#: chains in which a thread folds its own elements where the order makes no difference (greatest and least):
#: each waits for itself alone
WAYS = 4
#: neighbouring elements of a thread, at most, whose parts lanes share out: all of them are in registers then
SHARED_OUT = 32
#: groups times elements of a thread from which on every sum of groups' parts is made once, by one thread, and
#: read by all that have it; below, each of them reads all groups' parts, and there is one barrier less
ONCE = 32


def part(op: str, value: Any, dtype: str) -> Any:
    """An element as it enters the fold."""
    value = cast(value, dtype)
    return tirx.abs(value) if op.startswith("abs") and not dtype.startswith("uint") else value


def _combine(call: Any, parts: Any, dst: Any, groups: int, op: str, acc: str, clear: bool) -> Any:
    """``dst[…] = parts[0, …] ∘ parts[1, …] ∘ …`` as a T.Parallel nest, of tiles; ``dst[…] ∘ …`` unless
    ``clear``."""
    zero = tirx.IntImm("int32", 0)
    shape = [int(e) for e in dst.ty.shape]
    index = [tirx.Var("ijkl"[k % 4], "int32") for k in range(len(shape))]
    group = tirx.Var("g", "int32")
    total = tirx.decl_buffer((1,), acc, "total", scope="local", layout=None)
    now, old = tirx.BufferLoad(total, [zero]), tirx.BufferLoad(dst, index)
    first = tirx.BufferLoad(parts, [zero, *index])
    start = first if clear else fold(op, cast(old, acc), first)
    step = tirx.BufferStore(
        total, fold(op, now, tirx.BufferLoad(parts, [group + 1, *index])), [zero], call.span
    )
    body = [
        tirx.AllocBuffer(total, {}, call.span),
        tirx.BufferStore(total, start, [zero], call.span),
        tirx.For(
            group,
            zero,
            tirx.IntImm("int32", groups - 1),
            tirx.ForKind.SERIAL,
            step,
            annotations={"ts.kind": "unroll"},
        ),
        tirx.BufferStore(dst, cast(now, element_dtype(dst)), index, call.span),
    ]
    return _nest(call, sequence(body), index, shape)


def _put(call: Any, total: Any, dst: Any, op: str, acc: str) -> Any:
    """``dst[…] = total[…]``, or ``dst[…] ∘ total[…]``, as a T.Parallel nest."""
    shape = [int(e) for e in dst.ty.shape]
    index = [tirx.Var("ijkl"[k % 4], "int32") for k in range(len(shape))]
    value = tirx.BufferLoad(total, index)
    if not call.attrs["clear"]:
        value = fold(op, cast(tirx.BufferLoad(dst, index), acc), value)
    store = tirx.BufferStore(dst, cast(value, element_dtype(dst)), index, call.span)
    return _nest(call, store, index, shape)


def _nest(call: Any, made: Any, index: list[Any], shape: list[int]) -> Any:
    """A T.Parallel nest around a statement."""
    zero = tirx.IntImm("int32", 0)
    for k in reversed(range(len(shape))):
        notes = {"ts.kind": "parallel", "ts.depth": len(shape) - k}
        made = tirx.For(
            index[k],
            zero,
            tirx.IntImm("int32", shape[k]),
            tirx.ForKind.PARALLEL,
            made,
            annotations=notes,
            span=call.span,
        )
    return made


def emit_join(cx: GpuLowering, call: Any) -> Any:
    """The lanes' sums of each element added up (`passes.defer_cross_lane_sums`); all get the same bits."""
    held = cx.registers_of(call.args[0].source)
    slot = tirx.Var("u", "int32")
    now = tirx.BufferLoad(held.buf, [slot])
    body = []
    for mask in map(int, str(call.attrs["masks"]).split(",")):
        there = tirx.call_extern("float32", "ts::shuffle_xor", now, tirx.IntImm("int32", mask))
        body.append(tirx.BufferStore(held.buf, now + there, [slot], call.span))
    zero, count = tirx.IntImm("int32", 0), tirx.IntImm("int32", held.layout.slots)
    return tirx.For(slot, zero, count, tirx.ForKind.UNROLLED, sequence(body), span=call.span)


@lowers("gpu", "reduce_part")
def lower_part(call: Any, cx: GpuLowering) -> Any:
    """Each group's part into shared memory: each of the lanes that have it stores a share, or one of them
    all."""
    parts, held = cx.shared_of(call.args[1].source), cx.layouts[call.args[0].source]
    axis, thread = axis_of(call), cx.thread()
    near, far = digits_across(held, axis, cx.target.wave)
    group: Any = tirx.IntImm("int32", 0)
    for p in sorted(far, key=lambda p: -p.unit):  # by rising index along the axis
        group = group * p.extent + digit(thread, p.stride, p.extent, p.stride * p.extent == held.threads)
    if (made := _shared_out(cx, call, parts, group)) is not None:
        return made
    alike = [*near, *(p for p in held.pieces if p.axis is None)]
    one = [tirx.EQ(digit(thread, p.stride, p.extent, p.stride * p.extent == held.threads), 0) for p in alike]

    def put(slot: Any, index: list[Any], total: Any) -> Any:
        tests = [i < int(e) for i, e in zip(index, parts.shape[1:], strict=True)]
        tests = [t for t in ([all_of(one)] if one else []) + tests if not cx.analyzer.can_prove(t)]
        done: Any = tirx.BufferStore(
            parts.buf, total, [cx.analyzer.simplify(parts.flat([group, *index]))], call.span
        )
        for t in reversed(tests):
            done = tirx.IfThenElse(t, done, None)
        return done

    return _folded(cx, call, put)


def _tile(rest: list[int], shape: tuple[int, ...]) -> list[bool]:
    """Which of the axes that are left belong to axes of the result that are longer than one."""
    count = sum(e != 1 for e in shape)
    if len(rest) == count:
        return [True] * count
    marks, left = [], count
    for k, e in enumerate(rest):
        take = e != 1 and left > 0 or len(rest) - k <= left
        marks.append(take)
        left -= take
    return marks


class _Slots:
    """What a thread has of a reduced tile: the digits of its slots, by whether they lie along the axis."""

    def __init__(self, cx: GpuLowering, call: Any):
        src, dst = call.args
        self.cx, self.call, self.op = cx, call, str(call.attrs["op"])
        self.place, self.held, self.axis = cx.places[src.source], cx.layouts[src.source], axis_of(call)
        self.acc = accumulator(element_dtype(src.source), element_dtype(dst.source))
        slots = list(reversed(radix(self.held.pieces, "slot") or []))
        self.along = sorted((p for p in slots if p.axis == self.axis), key=lambda p: -p.unit)
        self.others = [p for p in slots if p.axis != self.axis]
        near, _ = digits_across(self.held, self.axis, cx.target.wave)
        folds = () if "lanes" in call.attrs else near
        #: the masks of the shuffles
        self.masks = [p.stride << k for p in folds for k in range(p.extent.bit_length() - 1)]
        many = in_any_order(self.op) and prod(p.extent for p in self.along) % WAYS == 0
        self.ways = WAYS if many else 1
        self.outer = [tirx.Var(f"u{k}", "int32") for k in range(len(self.others))]
        for v, p in zip(self.outer, self.others, strict=True):
            cx.bind_range(v, p.extent)

    def own(self) -> tuple[list[Any], Any]:
        """A thread's own elements of one slot of the result, folded, and where the total lies."""
        extents = [p.extent for p in self.along]
        total = tirx.decl_buffer((self.ways,), self.acc, "total", scope="local", layout=None)
        body = _own(self.cx, self.op, total, extents, self._element, self.call.span)
        return body, total

    def own_neighbours(self, some: Any) -> list[Any]:
        """The same of all neighbours along the last of the other digits, into ``some``."""
        v, zero, span = self.outer[-1], tirx.IntImm("int32", 0), self.call.span
        if self.ways > 1:
            own, total = self.own()
            each = sequence([*own, tirx.BufferStore(some, tirx.BufferLoad(total, [zero]), [v], span)])
            return [self._neighbours(each)]
        start = tirx.BufferStore(some, identity(self.op, self.acc), [v], span)
        return [self._neighbours(start), self.neighbours_onto(some, v)]

    def neighbours_onto(self, some: Any, place: Any) -> Any:
        """The same added, one after the other, to what ``some`` has in the ``place`` of each neighbour."""
        extents = [p.extent for p in self.along]
        inner = [tirx.Var(f"r{k}", "int32") for k in range(len(extents))]
        for r, e in zip(inner, extents, strict=True):
            self.cx.bind_range(r, e)
        made = fold(self.op, tirx.BufferLoad(some, [place]), self._element(inner))
        step = self._neighbours(tirx.BufferStore(some, made, [place], self.call.span))
        for r, e in zip(reversed(inner), reversed(extents), strict=True):
            extent = tirx.IntImm("int32", e)
            step = tirx.For(
                r, tirx.IntImm("int32", 0), extent, tirx.ForKind.UNROLLED, step, span=self.call.span
            )
        return step

    def _neighbours(self, step: Any) -> Any:
        """The loop of the last of the other digits."""
        zero, extent = tirx.IntImm("int32", 0), tirx.IntImm("int32", self.others[-1].extent)
        return tirx.For(self.outer[-1], zero, extent, tirx.ForKind.UNROLLED, step, span=self.call.span)

    def slot(self) -> Any:
        """The slot of the result that the other digits are."""
        left, size = tirx.IntImm("int32", 0), 1
        for p, v in reversed(list(zip(self.others, self.outer, strict=True))):
            left = left + v * size
            size *= p.extent
        return self.cx.analyzer.simplify(left)

    def _element(self, inner: list[Any]) -> Any:
        """The element in the slots' digits ``inner`` along the axis; in the padding what changes nothing."""
        cx, slot = self.cx, tirx.IntImm("int32", 0)
        for v, p in zip([*self.outer, *inner], [*self.others, *self.along], strict=True):
            slot = slot + v * p.stride
        value = part(self.op, tirx.BufferLoad(self.place.buf, [cx.analyzer.simplify(slot)]), self.acc)
        if self.held.shape[self.axis] == self.place.shape[self.axis]:
            return value
        at = _along(cx, self.held, self.axis, cx.thread(), list(zip(self.along, inner, strict=True)))
        return tirx.if_then_else(at < self.place.shape[self.axis], value, identity(self.op, self.acc))

    def index(self, outer: list[Any], shape: list[int]) -> list[Any]:
        """The index in a result of ``shape`` of what lies in the slots' digits ``outer``."""
        index = []
        for k in range(len(self.held.shape)):
            if k != self.axis:
                mine = [(p, v) for p, v in zip(self.others, outer, strict=True) if p.axis == k]
                index.append(_along(self.cx, self.held, k, self.cx.thread(), mine))
        marks = _tile([e for k, e in enumerate(self.place.shape) if k != self.axis], tuple(shape))
        long = [i for i, m in zip(index, marks, strict=True) if m]
        return [long.pop(0) if e != 1 else tirx.IntImm("int32", 0) for e in shape]

    def loops(self, body: Any, count: int) -> Any:
        """The loops of the first ``count`` of the other digits."""
        for v, p in list(zip(self.outer, self.others, strict=True))[:count][::-1]:
            extent = tirx.IntImm("int32", p.extent)
            body = tirx.For(
                v, tirx.IntImm("int32", 0), extent, tirx.ForKind.UNROLLED, body, span=self.call.span
            )
        return body


def _folded(cx: GpuLowering, call: Any, put: Any) -> Any:
    """``put(slot of the result, its index, the total)`` for every slot, each thread's own and its lanes'
    elements folded."""
    mine, zero = _Slots(cx, call), tirx.IntImm("int32", 0)
    if cx.skips(mine.held, mine.place.shape, cx.thread()):
        return sequence([])
    body, total = mine.own()
    now = tirx.BufferLoad(total, [zero])
    for mask in mine.masks:
        there = tirx.call_extern(mine.acc, "ts::shuffle_xor", now, tirx.IntImm("int32", mask))
        body.append(tirx.BufferStore(total, fold(mine.op, now, there), [zero], call.span))
    shape = [int(e) for e in call.args[1].source.ty.shape]
    if str(call.op.name) == "ts.reduce_part":
        shape = shape[1:]
    # what threads keep apart goes slot by slot, wherever it belongs
    index = [] if "lanes" in call.attrs else mine.index(mine.outer, shape)
    body.append(put(mine.slot(), index, now))
    return mine.loops(sequence(body), len(mine.others))


def _shared_out(cx: GpuLowering, call: Any, parts: InShared, group: Any) -> Any:
    """A group's parts of neighbouring elements, which its lanes share out: with each shuffle a lane gives
    half of the elements that it has to its partner, and adds the partner's other half to its own. Then lanes
    store vectors. None where elements of a thread are too few for that, or do not lie side by side."""
    mine = _Slots(cx, call)
    wide = CHUNK_BYTES * 8 // parts.layout.bits
    inner = mine.others[-1] if mine.others else None
    if (
        inner is None
        or inner.unit != 1
        or inner.extent % wide
        or not wide <= inner.extent <= SHARED_OUT
        or _last(mine.held, mine.axis) != inner.axis
        or mine.place.shape[inner.axis] % wide
        or parts.shape[-1] != mine.place.shape[inner.axis]
        or parts.layout.vector(len(parts.shape) - 1) % wide
        or cx.skips(mine.held, mine.place.shape, cx.thread())
    ):
        return None
    op, thread, zero, span = mine.op, cx.thread(), tirx.IntImm("int32", 0), call.span
    some = tirx.decl_buffer(
        (inner.extent,), mine.acc, "totals", scope="local", data_alignment=16, layout=None
    )

    def of(k: Any) -> Any:
        return tirx.BufferLoad(some, [k])

    def each(count: int, step: Any) -> Any:
        u = tirx.Var("u", "int32")
        return tirx.For(u, zero, tirx.IntImm("int32", count), tirx.ForKind.UNROLLED, step(u), span=span)

    def shuffled(value: Any, mask: int) -> Any:
        return tirx.call_extern(mine.acc, "ts::shuffle_xor", value, tirx.IntImm("int32", mask))

    body = [tirx.AllocBuffer(some, {}, span), *mine.own_neighbours(some)]
    count, first, one = inner.extent, zero, []
    for mask in mine.masks:
        bit = digit(thread, mask, 2, 2 * mask == mine.held.threads)
        if count % (2 * wide):  # too few to halve: all of them get the same
            body.append(
                each(
                    count,
                    lambda u, m=mask: tirx.BufferStore(some, fold(op, of(u), shuffled(of(u), m)), [u], span),
                )
            )
            one.append(tirx.EQ(bit, 0))
            continue
        count //= 2
        upper, half = tirx.EQ(bit, 1), count

        def halved(u: Any, mask: int = mask, upper: Any = upper, half: int = half) -> Any:
            kept = tirx.Select(upper, of(u + half), of(u))
            given = tirx.Select(upper, of(u), of(u + half))
            return tirx.BufferStore(some, fold(op, kept, shuffled(given, mask)), [u], span)

        body.append(each(count, halved))
        first = first + bit * half
    one += [
        tirx.EQ(digit(thread, p.stride, p.extent, p.stride * p.extent == mine.held.threads), 0)
        for p in mine.held.pieces
        if p.axis is None
    ]
    for k in range(0, count, wide):
        index = mine.index([*mine.outer[:-1], first + k], list(parts.shape[1:]))
        tests = [i < int(e) for i, e in zip(index, parts.shape[1:], strict=True)]
        tests = [*one, *(t for t in tests if not cx.analyzer.can_prove(t))]
        flat = cx.analyzer.simplify(parts.flat([group, *index]))
        there = tirx.Ramp(flat, tirx.IntImm(str(flat.ty), 1), wide)
        here = tirx.Ramp(tirx.IntImm("int32", k), tirx.IntImm("int32", 1), wide)
        done: Any = tirx.BufferStore(parts.buf, tirx.BufferLoad(some, [here]), [there], span)
        body.append(tirx.IfThenElse(all_of(tests), done, None) if tests else done)
    return mine.loops(sequence(body), len(mine.others) - 1)


def _kept_apart(cx: GpuLowering, call: Any, dst: Any) -> Any:
    """Sums that each thread keeps apart, of neighbours: each element onto its own, neighbour by neighbour, so
    that several are converted at once. None where elements of a thread do not lie side by side."""
    mine = _Slots(cx, call)
    inner = mine.others[-1] if mine.others else None
    if inner is None or inner.unit != 1 or _last(mine.held, mine.axis) != inner.axis or mine.ways > 1:
        return None
    if cx.skips(mine.held, mine.place.shape, cx.thread()):
        return sequence([])
    return mine.loops(mine.neighbours_onto(dst.buf, mine.slot()), len(mine.others) - 1)


def _last(held: Fragment, axis: int) -> int:
    """The last axis that is left."""
    return max((k for k in range(len(held.shape)) if k != axis), default=-1)


def _own(cx: GpuLowering, op: str, total: Any, extents: list[int], element: Any, span: Any) -> list[Any]:
    """A thread's own elements folded into ``total[0]``: one after the other, or where total has several
    places, each of them with every so many elements, and these pair by pair."""
    ways, zero = int(total.ty.shape[0]), tirx.IntImm("int32", 0)

    def of(k: Any) -> Any:
        return tirx.BufferLoad(total, [k])

    alloc = tirx.AllocBuffer(total, {}, span)
    if ways == 1:
        inner = [tirx.Var(f"r{k}", "int32") for k in range(len(extents))]
        for v, e in zip(inner, extents, strict=True):
            cx.bind_range(v, e)
        step: Any = tirx.BufferStore(total, fold(op, of(zero), element(inner)), [zero], span)
        for v, e in zip(reversed(inner), reversed(extents), strict=True):
            step = tirx.For(v, zero, tirx.IntImm("int32", e), tirx.ForKind.UNROLLED, step)
        return [alloc, tirx.BufferStore(total, identity(op, str(total.ty.dtype)), [zero], span), step]

    def walk(first: int, count: int, made: Any) -> Any:
        r = tirx.Var("r", "int32")
        cx.bind_range(r, count)
        k, step = r + first if first else r, 1
        digits: list[Any] = []
        for e in reversed(extents):
            digits.insert(0, cx.analyzer.simplify(k // step % e))
            step *= e
        way = cx.analyzer.simplify(k % ways)
        step_in = tirx.BufferStore(total, made(of(way), element(digits)), [way], span)
        return tirx.For(r, zero, tirx.IntImm("int32", count), tirx.ForKind.UNROLLED, step_in)

    def number(k: int) -> Any:
        return tirx.IntImm("int32", k)

    body = [alloc, walk(0, ways, lambda _, x: x)]
    if prod(extents) > ways:
        body.append(walk(ways, prod(extents) - ways, lambda old, x: fold(op, old, x)))
    while ways > 1:
        ways //= 2
        body += [
            tirx.BufferStore(total, fold(op, of(number(k)), of(number(k + ways))), [number(k)], span)
            for k in range(ways)
        ]
    if op in NUMBERS.values():  # chains begin with elements: those of NaNs alone have made a NaN
        none = identity(op, str(total.ty.dtype))
        body.append(tirx.BufferStore(total, fold(op, of(number(0)), none), [number(0)], span))
    return body


def _along(cx: GpuLowering, held: Fragment, axis: int, thread: Any, slots: list[tuple[Piece, Any]]) -> Any:
    """The index along an axis of what a thread has in a slot, given by its digits."""
    total: Any = tirx.IntImm("int32", 0)
    for p in held.pieces:
        if p.axis == axis and p.to == "thread":
            total = total + digit(thread, p.stride, p.extent, p.stride * p.extent == held.threads) * p.unit
    for p, v in slots:
        total = total + v * p.unit
    return cx.analyzer.simplify(total)


def _moved(src: Any, dst: Any, call: Any, cx: ExchangeContext) -> list[Any]:
    """A copy between two fragments; through shared memory where threads need what others hold."""
    made = copy_statement(src, dst, call)
    nest = nest_of(made)
    if nest is None or not choose(nest, cx.layouts, cx.executor.threads)[1]:
        return [made]
    there = cx.scratch(f"{dst.source.name}_moved", dst.source.ty.shape, element_dtype(dst.source), call.span)
    return [copy_statement(src, there, call), copy_statement(there, dst, call)]


@lowers("gpu", "reduce")
class Reduce(Lowering["GpuLowering"]):
    def stage(self, call: Any, cx: StageContext) -> list[Any] | None:
        """Operands that are no whole tiles in registers go through such."""
        src, dst = call.args
        good = [in_registers(r.source) and is_whole(r) for r in (src, dst)]
        if all(good):
            return None
        out, axis = [], axis_of(call)
        shape = [int(r.extent) for r in src.region]
        left = shape[:axis] + shape[axis + 1 :]
        frm, to = src, dst
        if not good[0]:
            frm = cx.tile(
                f"{src.source.name}_part", shape, element_dtype(src.source), "local.fragment", call.span
            )
            out.append(cx.copy(src, frm, call))
        if not good[1]:
            to = cx.tile(
                f"{dst.source.name}_part", left, element_dtype(dst.source), "local.fragment", call.span
            )
            if not call.attrs["clear"]:
                out.append(cx.copy(dst, to, call))
        out.append(cx.again(call, [frm, to], {"axis": axis - len(shape)}))
        if not good[1]:
            out.append(cx.copy(to, dst, call))
        return out

    def layouts(self, call: Any, cx: LayoutContext) -> list[Any]:
        """The result's fragment follows from the source's."""
        src, dst = (r.source for r in call.args)
        held = cx.known.get(src)
        if not isinstance(held, Fragment) or dst in cx.known:
            return []
        return [[Demand(dst, result(call, held), "T.reduce's result", None)]]

    def exchange(self, call: Any, cx: ExchangeContext) -> list[Any] | None:
        """A reduction across warps in two parts; one whose result is wanted elsewhere through a tile of its
        own."""
        src, dst = call.args
        if "lanes" in call.attrs:
            return None  # each thread keeps what is its own
        held, axis, op = cx.layouts[src.source], axis_of(call), str(call.attrs["op"])
        acc = accumulator(element_dtype(src.source), element_dtype(dst.source))
        _, far = digits_across(held, axis, cx.program.target.wave)
        made = result(call, held)
        if not far and cx.layouts[dst.source] == made:
            return None
        shape = [int(e) for e in dst.source.ty.shape]
        if far:
            groups = 1
            for p in far:
                groups *= p.extent
            own = made.slots
            wide = own * bits_of(acc) > 8 * CHUNK_BYTES
            swizzle = 128 if wide and shape[-1] * bits_of(acc) % 1024 == 0 else 0
            parts = cx.scratch(f"{dst.source.name}_parts", [groups, *shape], acc, call.span, swizzle)
            first = ir.Call(
                "ts.reduce_part", [src, parts], attrs=dict(call.attrs), ret_ty=call.ty, span=call.span
            )
            out = [tirx.Evaluate(first, call.span)]
            if not wide or own * groups < ONCE:
                clear = bool(call.attrs["clear"])
                return [*out, _combine(call, parts.source, dst.source, groups, op, acc, clear)]
            total = cx.scratch(f"{dst.source.name}_total", shape, acc, call.span, swizzle)
            out.append(_combine(call, parts.source, total.source, groups, op, acc, True))
            return [*out, _put(call, total.source, dst.source, op, acc)]
        own = tirx.decl_buffer(
            tuple(shape),
            element_dtype(dst.source),
            f"{dst.source.name}_own",
            scope="local.fragment",
            layout=None,
        )
        cx.layouts[own] = made
        cx.made.append(tirx.AllocBuffer(own, {}, call.span))
        before = [] if call.attrs["clear"] else _moved(dst, whole(own), call, cx)
        after = _moved(whole(own), dst, call, cx)
        return [*before, again(call, [src, whole(own)]), *after]

    def lower(self, call: Any, cx: GpuLowering) -> Any:
        """A reduction whose threads are lanes of one warp."""
        dst = cx.places[call.args[1].source]
        op, clear = str(call.attrs["op"]), bool(call.attrs["clear"])

        def put(slot: Any, index: list[Any], total: Any) -> Any:
            old = tirx.BufferLoad(dst.buf, [slot])
            made = total if clear else fold(op, cast(old, str(total.ty)), total)
            return tirx.BufferStore(dst.buf, cast(made, str(old.ty)), [slot], call.span)

        with cx.counted_from(cx.layouts[call.args[0].source].first_thread):
            made = _kept_apart(cx, call, dst) if "lanes" in call.attrs else None
            return _folded(cx, call, put) if made is None else made
