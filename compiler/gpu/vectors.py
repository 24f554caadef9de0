"""Which accesses of a nest move several neighbours at once.

A thread's innermost slots are neighbours along one axis. Where memory has them side by side, at an address
that is always a multiple of their size, and lets all of them in or none, one access of up to 16 bytes moves
them: before the elements' own loop what it reads, behind it what it wrote.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tilescale.compiler.gpu.places import Box, Global, InShared, Registers
from tilescale.compiler.ir.multiples import bound_in, multiple, spelt_out
from tilescale.compiler.ir.nests import Element, Nest
from tilescale.compiler.ir.operations import VOID
from tilescale.compiler.ir.walks import mentions
from tilescale.compiler.layout.loops import bits_of, element_dtype
from tilescale.compiler.layout.match import Loop, Slots, match, seen_by
from tilescale.compiler.tvm_compat import IF_THEN_ELSE, ir, structural_map, structural_walk, sym, tirx

if TYPE_CHECKING:
    from tilescale.compiler.gpu.nests import NestLowering

#: bits of the widest access of one thread
WIDEST = 128


@dataclass
class Moved:
    """An access that moves ``width`` neighbours at a time."""

    element: Element
    width: int


@dataclass
class Plan:
    """``count`` neighbours along ``axis`` are one group; ``moves`` are the accesses of memory that go as
    vectors."""

    axis: int
    count: int
    moves: list[Moved]
    #: the nest is a copy of one dtype between memory and memory or neighbouring registers: no loop over
    #: elements at all
    direct: bool = False


def plan(cx: NestLowering, nest: Nest, loop: Loop) -> Plan | None:
    """How to move a nest's accesses; None where all go one by one."""
    if not loop.digits or nest.alone:
        return None
    last = loop.digits[-1]
    axis = last.axis
    if axis is None or axis >= len(nest.vars) or last.unit != 1 or last.stride != 1:
        return None
    count = last.extent & -last.extent  # the power of two in it
    if any(p.axis == axis and p is not last and p.unit % count for p in (*loop.digits, *loop.thread_digits)):
        return None
    while count > 1 and (loop.shifts[axis] % count or loop.extents[axis] % count):
        count //= 2
    elements = [
        a
        for a in nest.accesses
        if not isinstance(cx.places.get(a.buffer), Registers) and a.buffer in cx.places
    ]
    found = [(a, _width(cx, nest, loop, axis, count, a)) for a in elements]
    if not found or max(w for _, w in found) < 2:
        return None
    count = max(w for _, w in found)
    moves = [Moved(a, w) for a, w in found if w > 1]
    # Where one side moves fewer neighbours, each moves as many as it can.
    direct = len({m.width for m in moves}) == 1 and _direct(cx, nest, loop, moves, count)
    if not direct and any(isinstance(cx.places[m.element.buffer], Box) for m in moves):
        return None
    return Plan(axis, count, moves, direct)


def _width(cx: NestLowering, nest: Nest, loop: Loop, axis: int, count: int, a: Element) -> int:
    """How many neighbours one access may move; 1: it goes element by element."""
    place = cx.places[a.buffer]
    if not isinstance(place, (Global, InShared, Box)) or a.conditional or not a.indices:
        return 1
    widest = WIDEST // bits_of(a.buffer)
    if isinstance(place, Box):
        widest = widest if place.dense else 1
    elif a.mode == "update":
        widest = _added_at_once(cx, place, a)
    elif not (isinstance(a.node, ir.TensorLoad) or isinstance(a.node, tirx.BufferStore)):
        return 1
    if (
        a.mode == "read"
        and _behind_condition(nest.body, a.node)
        and not (isinstance(place, Global) and a.buffer not in cx.written)
    ):
        return 1
    others = [b for b in nest.accesses if b.buffer.same_as(a.buffer) and b.mode != "read"]
    if others and any(not _same(b.indices, a.indices) for b in nest.accesses if b.buffer.same_as(a.buffer)):
        return 1  # an element may be read that another one of the group writes
    if others and _reread(nest, a.buffer):
        return 1  # what an iteration has written lies in memory when it reads it again
    if a.mode != "read" and (len(others) > 1 or not _on_top(nest.body, a.node)):
        return 1
    width = min(count, widest, nest.width or widest)
    while width > 1 and not _aligned(cx, nest, axis, count, place, a, width):
        width //= 2
    return width


def _reread(nest: Nest, buffer: Any) -> bool:
    """Whether a nest's body reads a buffer behind a write of it: vectors are read in front of the body and
    written behind it."""
    modes = [b.mode for b in nest.accesses if b.buffer.same_as(buffer)]
    first = next((k for k, mode in enumerate(modes) if mode != "read"), len(modes))
    return "read" in modes[first:]


def _added_at_once(cx: NestLowering, place: Global | InShared, a: Element) -> int:
    """How many neighbours one instruction adds to global memory (PTX ISA 9.0, "red": vectors from sm_90 on,
    pairs of float16 before)."""
    if not isinstance(place, Global) or str(a.node.attrs["kind"]) != "add" or str(a.node.ty) != str(VOID):
        return 1
    dtype = element_dtype(a.buffer)
    if cx.target.wide_atomics:
        return {"float32": 4, "float16": 8, "bfloat16": 8}.get(dtype, 1)
    return 2 if dtype == "float16" else 1


def _same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return all(str(x) == str(y) for x, y in zip(a, b, strict=True))


def _on_top(body: Any, node: Any) -> bool:
    steps = body.seq if isinstance(body, tirx.SeqStmt) else [body]
    return any(s.same_as(node) or (isinstance(s, tirx.Evaluate) and s.value.same_as(node)) for s in steps)


def _behind_condition(body: Any, node: Any) -> bool:
    """Whether a load may not happen, by the expression that it stands in."""
    found: list[Any] = []

    def inside(e: Any) -> None:
        structural_walk(e, (ir.TensorLoad, lambda x: found.append(x) if x.same_as(node) else None))

    def call(c: Any) -> None:
        if c.op.name == IF_THEN_ELSE:
            inside(c.args[1])
            inside(c.args[2])

    def select(e: Any) -> None:
        inside(e.true_value)
        inside(e.false_value)

    structural_walk(body, (ir.Call, call))
    structural_walk(body, (tirx.Select, select))
    structural_walk(body, ((tirx.And, tirx.Or), lambda e: inside(e.b)))
    return bool(found)


def _aligned(
    cx: NestLowering,
    nest: Nest,
    axis: int,
    count: int,
    place: Global | InShared | Box,
    a: Element,
    width: int,
) -> bool:
    """Whether the elements at a group's steps of ``width`` begin at multiples of it, side by side, and are
    all inside or all outside."""
    var = nest.vars[axis]
    group, next_one = tirx.Var("group", str(var.ty)), tirx.Var("next", str(var.ty))
    analyzer = sym.Analyzer()
    analyzer.bind(
        next_one, ir.Range.from_min_extent(tirx.const(0, str(var.ty)), tirx.const(width, str(var.ty)))
    )

    def put(e: Any, value: Any) -> Any:
        return structural_map(e, (ir.Var, lambda v: value if v.same_as(var) else v))

    own = {name: e for name, e in bound_in(nest.body).items() if not _loads(e)}
    at = [spelt_out(e, {**cx.definitions, **own}) for e in a.indices]
    for k, e in enumerate(at):
        uses = mentions(e, var)
        if k < len(at) - 1 and not uses:
            continue
        if not uses:
            return False
        while (  # what j % 64 leaves of neighbours that begin at a multiple of their number are neighbours
            k == len(at) - 1
            and isinstance(e, tirx.FloorMod)
            and isinstance(e.b, tirx.IntImm)
            and int(e.b.value) % width == 0
            and multiple(analyzer, put(e.a, group * width), width)
        ):
            e = e.a
        start = put(e, group * width)
        step = analyzer.simplify(put(e, group * width + next_one) - start)
        if k < len(at) - 1:  # such as j // 64, which is alike for neighbours
            if not _is(step, 0):
                return False
        elif not step.same_as(next_one) or not multiple(analyzer, start, width):
            return False
    inside = multiple(analyzer, place.shape[-1], width)
    if isinstance(place, InShared):
        layout = place.layout
        rest = [p for p in layout.pieces if not (p.axis == len(at) - 1 and p.unit == 1)]
        return inside and layout.vector(len(at) - 1) % width == 0 and all(p.stride % width == 0 for p in rest)
    if not _is(place.strides[-1], 1):
        return False
    return inside and all(multiple(analyzer, s, width) for s in place.strides[:-1])


def _loads(e: Any) -> bool:
    """Whether a value is one of memory, which may be another one by the time that it is used."""
    found: list[Any] = []
    structural_walk(e, (ir.TensorLoad, found.append))
    return bool(found)


def _is(e: Any, number: int) -> bool:
    return e == number if isinstance(e, int) else isinstance(e, tirx.IntImm) and int(e.value) == number


def _direct(cx: NestLowering, nest: Nest, loop: Loop, moves: list[Moved], count: int) -> bool:
    """Whether a nest is one store of a value as it is loaded, or of zero, and both sides move as vectors."""
    s = nest.body
    if not isinstance(s, tirx.BufferStore):
        return False
    sides: list[tuple[Any, Any, Any, bool]] = [(s, s.buffer, s.indices, True)]
    if isinstance(s.value, ir.TensorLoad):
        if str(s.value.ty) != str(s.buffer.ty.dtype):
            return False
        sides.append((s.value, s.value.source, s.value.indices, False))
    elif not _is_zero(s.value):
        return False
    for node, buffer, indices, writes in sides:
        place = cx.places.get(buffer)
        if isinstance(place, Registers):
            if not in_slots(
                match(loop, indices, seen_by(place.layout, loop.fragment.threads), writes), count
            ):
                return False
        elif not any(m.element.node.same_as(node) for m in moves):
            return False
    return bool(moves)


def in_slots(found: Slots | str, count: int) -> bool:
    """Whether a group's elements lie in neighbouring slots that begin at a multiple of ``count``."""
    if isinstance(found, str) or found.coefficients is None or found.dynamic:
        return False
    *outer, inner = found.coefficients
    return inner == 1 and found.base % count == 0 and all(c % count == 0 for c in outer)


def _is_zero(e: Any) -> bool:
    return isinstance(e, (tirx.IntImm, tirx.FloatImm)) and str(e.value) in ("0", "0.0")
