"""Arithmetic of two 16-bit floats at once (PTX ISA 9.0, "Half Precision Floating Point Instructions").

A sum, difference or product of two 16-bit floats is float32's, rounded to the small dtype. The instructions
round once. The results are the same: float32 has more than twice the small dtype's digits and two more, so
rounding to it first changes nothing (S. A. Figueroa, "When is double rounding innocuous?", 1995). So where a
nest stores one such operation into registers, and neighbours lie side by side in a thread's slots, two go at
once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tilescale.compiler.gpu.places import Registers
from tilescale.compiler.gpu.vectors import in_slots
from tilescale.compiler.ir.nests import Nest
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.ir.walks import mentions
from tilescale.compiler.layout.loops import element_dtype
from tilescale.compiler.layout.match import Loop, match, seen_by
from tilescale.compiler.tvm_compat import ir, tirx

if TYPE_CHECKING:
    from tilescale.compiler.gpu.nests import NestLowering

KINDS = {"float16": "f16", "bfloat16": "bf16"}
NAMES = {tirx.Add: "add", tirx.Sub: "sub", tirx.Mul: "mul"}


@dataclass
class Pairs:
    """A nest that goes two by two along its innermost digit. An operand is a load whose neighbour lies beside
    it, or (``shared``) a value that both elements share."""

    name: str
    operands: tuple[Any, Any]
    shared: tuple[bool, ...]


def pairs(cx: NestLowering, nest: Nest, loop: Loop) -> Pairs | None:
    """How to run a nest two by two; None where it does not go."""
    s = nest.body
    if nest.alone or not isinstance(s, tirx.BufferStore) or type(s.value) not in NAMES or not loop.digits:
        return None
    dtype, last = element_dtype(s.buffer), loop.digits[-1]
    if dtype not in KINDS or str(s.value.ty) != dtype or not isinstance(cx.places.get(s.buffer), Registers):
        return None
    axis = last.axis
    if axis is None or axis >= len(nest.vars) or last.unit != 1 or last.stride != 1 or last.extent % 2:
        return None
    if (
        loop.shifts[axis] % 2
        or loop.extents[axis] % 2
        or any(p.axis == axis and p is not last and p.unit % 2 for p in loop.thread_digits)
    ):
        return None
    operands = (s.value.a, s.value.b)
    sides = [(s.buffer, s.indices, True)]
    for x in operands:
        if not mentions(x, nest.vars[axis]):
            continue  # a value that both elements share
        if not (isinstance(x, ir.TensorLoad) and isinstance(cx.places.get(x.source), Registers)):
            return None
        sides.append((x.source, x.indices, False))
    if len(sides) < 2:
        return None
    for buffer, indices, writes in sides:
        if not in_slots(
            match(loop, indices, seen_by(cx.registers_of(buffer).layout, loop.fragment.threads), writes), 2
        ):
            return None
    shared = tuple(not mentions(x, nest.vars[axis]) for x in operands)
    return Pairs(f"ts::{NAMES[type(s.value)]}2_{KINDS[dtype]}", operands, shared)


def emit(cx: NestLowering, nest: Nest, made: Pairs) -> Any:
    """One instruction, at the first of the two elements."""
    s, out, addresses = nest.body, [], []
    for x, shared in zip(made.operands, made.shared, strict=True):
        if not shared:
            addresses.append(_address(cx, x.source, x.indices, False))
            continue
        both = tirx.decl_buffer((2,), element_dtype(s.buffer), "both", scope="local", layout=None)
        value = cx.scalar(x)
        out += [
            tirx.AllocBuffer(both),
            *(tirx.BufferStore(both, value, [tirx.IntImm("int32", k)], s.span) for k in range(2)),
        ]
        addresses.append(tirx.address_of(tirx.BufferLoad(both, [tirx.IntImm("int32", 0)])))
    to = _address(cx, s.buffer, s.indices, True)
    return sequence([*out, tirx.Evaluate(tirx.call_extern("void", made.name, to, *addresses), s.span)])


def _address(cx: NestLowering, buffer: Any, indices: Any, writes: bool) -> Any:
    place = cx.registers_of(buffer)
    return tirx.address_of(tirx.BufferLoad(place.buf, [cx.slot(place, buffer, indices, writes)]))
