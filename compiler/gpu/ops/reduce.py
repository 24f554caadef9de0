"""Reductions on a GPU, in a fixed order: each thread folds its own slots by rising index (greatest and least
in four chains, since their order makes no difference), then lanes fold by shuffles whose partners see each
other's value (so all get the same bits), then groups of threads through shared memory, in order of the group.

The result lies where the tile's fragment, with the axis taken out, says: in all threads that had a part.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from tilescale.compiler.gpu.build import all_of, cast
from tilescale.compiler.gpu.places import digit
from tilescale.compiler.ir.contexts import ExchangeContext, LayoutContext, StageContext
from tilescale.compiler.ir.folds import NUMBERS, accumulator, fold, identity, in_any_order
from tilescale.compiler.ir.lowerings import Lowering, lowers
from tilescale.compiler.ir.nests import nest_of
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.layout import Fragment, Piece
from tilescale.compiler.layout.folds import axis_of, digits_across
from tilescale.compiler.layout.infer import Demand
from tilescale.compiler.layout.loops import choose, element_dtype, in_registers
from tilescale.compiler.layout.pieces import radix
from tilescale.compiler.passes.stage_operands import again, copy_statement, is_whole, whole
from tilescale.compiler.tvm_compat import ir, tirx

if TYPE_CHECKING:
    from tilescale.compiler.gpu.lower import Lowering as GpuLowering

#: chains in which a thread folds its own elements where the order makes no difference (greatest and least):
#: each waits for itself alone
WAYS = 4


def part(op: str, value: Any, dtype: str) -> Any:
    """An element as it enters the fold."""
    value = cast(value, dtype)
    return tirx.abs(value) if op.startswith("abs") and not dtype.startswith("uint") else value


def result(call: Any, held: Fragment) -> Fragment:
    """The fragment that a reduction of ``held`` leaves, under the result's shape."""
    left = held.reduced(axis_of(call))
    return reshaped(
        left,
        [int(e) for e in call.args[1].source.ty.shape],
        [int(r.extent) for r in call.args[0].region],
        axis_of(call),
    )


def reshaped(left: Fragment, shape: list[int], source: list[int], axis: int) -> Fragment:
    """The same places under ``shape``, which differs from what is left only in axes of extent one."""
    rest = source[:axis] + source[axis + 1 :]
    long = [k for k, e in enumerate(rest) if e != 1]
    onto = dict(zip(long, [k for k, e in enumerate(shape) if e != 1], strict=True))
    kept = [p for p in left.pieces if p.axis is None or p.axis in onto]
    pieces = [p if p.axis is None else Piece(onto[p.axis], p.unit, p.extent, p.to, p.stride) for p in kept]
    whole = [1] * len(shape)
    for k, j in onto.items():
        whole[j] = left.shape[k]
    return Fragment(tuple(whole), tuple(pieces), left.threads, left.first_thread)


def _combine(call: Any, parts: Any, dst: Any, groups: int, op: str, acc: str) -> Any:
    """``dst[…] = parts[0, …] ∘ parts[1, …] ∘ …`` as a T.Parallel nest."""
    zero = tirx.IntImm("int32", 0)
    shape = [int(e) for e in dst.source.ty.shape]
    index = [tirx.Var("ijkl"[k % 4], "int32") for k in range(len(shape))]
    group = tirx.Var("g", "int32")
    total = tirx.decl_buffer((1,), acc, "total", scope="local", layout=None)
    now, old = tirx.BufferLoad(total, [zero]), tirx.BufferLoad(dst.source, index)
    first = tirx.BufferLoad(parts, [zero, *index])
    start = first if call.attrs["clear"] else fold(op, cast(old, acc), first)
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
        tirx.BufferStore(dst.source, cast(now, element_dtype(dst.source)), index, call.span),
    ]
    made = sequence(body)
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
    """Each group's part into shared memory, by one of the lanes that have it."""
    parts, held = cx.shared_of(call.args[1].source), cx.layouts[call.args[0].source]
    axis, thread = axis_of(call), cx.thread()
    near, far = digits_across(held, axis, cx.target.wave)
    group: Any = tirx.IntImm("int32", 0)
    for p in sorted(far, key=lambda p: -p.unit):  # by rising index along the axis
        group = group * p.extent + digit(thread, p.stride, p.extent, p.stride * p.extent == held.threads)
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


def _folded(cx: GpuLowering, call: Any, put: Any) -> Any:
    """``put(slot of the result, its index, the total)`` for every slot, each thread's own and its lanes'
    elements folded."""
    src, dst = call.args
    place, held, axis, op = (
        cx.places[src.source],
        cx.layouts[src.source],
        axis_of(call),
        str(call.attrs["op"]),
    )
    acc = accumulator(element_dtype(src.source), element_dtype(dst.source))
    slots = list(reversed(radix(held.pieces, "slot") or []))
    along = sorted((p for p in slots if p.axis == axis), key=lambda p: -p.unit)
    others = [p for p in slots if p.axis != axis]
    near, _ = digits_across(held, axis, cx.target.wave)
    thread = cx.thread()
    if cx.skips(held, place.shape, thread):
        return sequence([])
    ways = WAYS if in_any_order(op) and prod(p.extent for p in along) % WAYS == 0 else 1
    total = tirx.decl_buffer((ways,), acc, "total", scope="local", layout=None)
    zero = tirx.IntImm("int32", 0)
    now = tirx.BufferLoad(total, [zero])
    outer = [tirx.Var(f"u{k}", "int32") for k in range(len(others))]
    for v, p in zip(outer, others, strict=True):
        cx.bind_range(v, p.extent)

    def element(inner: list[Any]) -> Any:
        """The element in the slots' digits ``inner`` along the axis; in the padding what changes nothing."""
        slot: Any = zero
        for v, p in zip([*outer, *inner], [*others, *along], strict=True):
            slot = slot + v * p.stride
        value = part(op, tirx.BufferLoad(place.buf, [cx.analyzer.simplify(slot)]), acc)
        if held.shape[axis] == place.shape[axis]:
            return value
        at = _along(cx, held, axis, thread, list(zip(along, inner, strict=True)))
        return tirx.if_then_else(at < place.shape[axis], value, identity(op, acc))

    body = _own(cx, op, total, [p.extent for p in along], element, call.span)
    for p in () if "lanes" in call.attrs else near:
        for k in range(p.extent.bit_length() - 1):
            there = tirx.call_extern(acc, "ts::shuffle_xor", now, tirx.IntImm("int32", p.stride << k))
            body.append(tirx.BufferStore(total, fold(op, now, there), [zero], call.span))
    index = []
    for k in range(len(held.shape)):
        if k != axis:
            index.append(
                _along(
                    cx, held, k, thread, [(p, v) for p, v in zip(others, outer, strict=True) if p.axis == k]
                )
            )
    left, step_size = zero, 1
    for p, v in reversed(list(zip(others, outer, strict=True))):
        left = left + v * step_size
        step_size *= p.extent
    shape = [int(e) for e in dst.source.ty.shape]
    if str(call.op.name) == "ts.reduce_part":
        shape = shape[1:]
    marks = _tile([e for k, e in enumerate(place.shape) if k != axis], tuple(shape))
    long = [i for i, m in zip(index, marks, strict=True) if m]
    body.append(put(cx.analyzer.simplify(left), [long.pop(0) if e != 1 else zero for e in shape], now))
    done = sequence(body)
    for v, p in zip(reversed(outer), reversed(others), strict=True):
        done = tirx.For(v, zero, tirx.IntImm("int32", p.extent), tirx.ForKind.UNROLLED, done, span=call.span)
    return done


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
            parts = cx.scratch(f"{dst.source.name}_parts", [groups, *shape], acc, call.span)
            first = ir.Call(
                "ts.reduce_part", [src, parts], attrs=dict(call.attrs), ret_ty=call.ty, span=call.span
            )
            return [tirx.Evaluate(first, call.span), _combine(call, parts.source, dst, groups, op, acc)]
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
            return _folded(cx, call, put)
