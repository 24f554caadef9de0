"""Layouts of loops: how the iterations of a nest are shared among threads, given the fragments that they
index, and the other way round: what a loop's layout says of a fragment that has none yet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from tilescale.compiler.ir import numeric
from tilescale.compiler.ir.multiples import is_multiple
from tilescale.compiler.ir.nests import Element, Nest
from tilescale.compiler.ir.walks import mentions
from tilescale.compiler.layout.asked import loop_of
from tilescale.compiler.layout.fragment import Fragment, packed
from tilescale.compiler.layout.match import Loop, is_replicated, match, seen_by
from tilescale.compiler.layout.mixed import from_mixed, missing, to_mixed
from tilescale.compiler.layout.pieces import Piece
from tilescale.compiler.layout.spread import best, ceil_div
from tilescale.compiler.layout.walked import MOST, Walk, walk
from tilescale.compiler.tvm_compat import ir, structural_walk, sym, tirx
from tilescale.errors import TileValueError
from tilescale.language.dtypes import BITS


def element_dtype(buffer: Any) -> str:
    dt = buffer.ty.dtype
    return str(getattr(dt, "dtype", dt))


def bits_of(buffer: Any) -> int:
    return BITS[element_dtype(buffer)]


def in_registers(buffer: Any) -> bool:
    return str(buffer.ty.storage_scope).startswith("local")


def own_buffers(nest: Nest) -> set[Any]:
    """What a nest's body allocates: memory of one iteration."""
    found: set[Any] = set()
    structural_walk(nest.body, (tirx.AllocBuffer, lambda s: found.add(s.buffer)))
    return found


def fragments_of(nest: Nest) -> list[Element]:
    """The accesses of a nest to tiles in registers, its own private ones aside."""
    own = own_buffers(nest)
    return [a for a in nest.accesses if in_registers(a.buffer) and a.buffer not in own]


# ---- a loop from a fragment


def plain_index(e: Any, variables: Sequence[Any]) -> tuple[int, int] | None:
    """``(k, c)`` where an index is ``variables[k] + c``; ``(-1, c)`` where it is the constant c."""
    if isinstance(e, tirx.IntImm):
        return -1, int(e.value)
    for k, v in enumerate(variables):
        if isinstance(e, ir.Var) and e.same_as(v):
            return k, 0
    if not isinstance(e, (tirx.Add, tirx.Sub)):
        return None
    for k, v in enumerate(variables):
        rest = sym.Analyzer().simplify(e - v)
        if isinstance(rest, tirx.IntImm):
            return k, int(rest.value)
    return None


def from_fragment(nest: Nest, access: Element, fragment: Fragment, share: bool = False) -> Loop | None:
    """The loop whose iterations run where ``fragment`` has the element that ``access`` names. Variables that
    do not index it run over in each thread, or (``share``) are cut among the threads that hold copies. A
    constant index into an axis that is spread over threads becomes a variable of one value, so that only the
    threads that hold it run."""
    if not nest.is_static:
        return None
    count = len(nest.vars)
    shape, shifts, pieces = [0] * count, [0] * count, [p for p in fragment.pieces if p.axis is None]
    fixed: list[int] = []
    if any(_mixed(e, nest.vars) for e in access.indices):
        return _from_mixed_digits(nest, access, fragment)
    for axis, e in enumerate(access.indices):
        own = [p for p in fragment.pieces if p.axis == axis]
        found, whole = plain_index(e, nest.vars), fragment.shape[axis]
        if found is None and (below := _below_a_step(nest, access, axis, own)) is not None:
            found, whole, own = below
        if found is None or found[0] < 0:
            if any(p.to == "thread" for p in own):
                if found is None or not 0 <= found[1] < fragment.shape[axis]:
                    return None
                fixed.append(found[1])
                shape.append(fragment.shape[axis])
                pieces += [replace(p, axis=len(shape) - 1) for p in own]
            continue
        k, shift = found
        if shape[k] or shift < 0 or nest.extents[k] + shift > whole:
            return None
        shape[k], shifts[k], own = _part(own, shift, nest.extents[k], whole)
        pieces += [replace(p, axis=k) for p in own]
    pieces = list(packed(pieces))
    slot = prod(p.extent for p in pieces if p.to == "slot")
    for k in reversed(range(count)):
        if not shape[k]:
            rest = nest.extents[k]
            unit = 1
            if share:
                pieces, unit = _share_copies(pieces, k, rest)
                rest = ceil_div(rest, unit)
            shape[k] = unit * rest
            if rest > 1:
                pieces.append(Piece(k, unit, rest, "slot", slot))
                slot *= rest
    try:
        made = Fragment(tuple(shape), tuple(pieces), fragment.threads, fragment.first_thread)
    except TileValueError:
        return None
    vars_ = (*nest.vars, *(tirx.Var("at", "int32") for _ in fixed))
    return Loop(vars_, (*nest.extents, *(1 for _ in fixed)), made, (*shifts, *fixed)) if made.covers else None


def _below_a_step(
    nest: Nest, access: Element, axis: int, own: list[Piece]
) -> tuple[tuple[int, int], int, list[Piece]] | None:
    """Of an index that steps along an axis with another loop's variable, and is a variable of the nest below
    a step (``x[i, step * 4 + j]``): that variable, the step's width and the axis' digits below it. None where
    it is none, or where what it steps over does not lie in slots."""
    found = _walk(nest, access, axis)
    plain = None if found is None else plain_index(found.own, nest.vars)
    if found is None or plain is None or plain[0] < 0:
        return None
    low = []
    for p in own:
        extent = 1 if p.unit >= found.grain else min(p.extent, found.grain // p.unit)
        if p.to == "thread" and extent < p.extent or (p.unit < found.grain and found.grain % p.unit):
            return None
        if extent > 1:
            low.append(replace(p, extent=extent))
    return plain, found.grain, low


def _mixed(e: Any, variables: Sequence[Any]) -> bool:
    """Whether an index is made of the variables, and is none of them."""
    return plain_index(e, variables) is None and numeric.variables(e) <= set(variables)


def _from_mixed_digits(nest: Nest, access: Element, fragment: Fragment) -> Loop | None:
    """`from_fragment` where an index is a sum of the variables' digits. Digits that move none run over in
    each thread, and so do axes that other loops walk along."""
    indices = list(access.indices)
    for axis, e in enumerate(indices):
        if plain_index(e, ()) is None and not any(mentions(e, v) for v in nest.vars):
            if any(p.axis == axis and p.to == "thread" for p in fragment.pieces):
                return None
            indices[axis] = tirx.IntImm("int32", 0)
    found = to_mixed(nest.vars, nest.extents, indices, fragment)
    if found is None:
        return None
    pieces = packed([*(p for p in fragment.pieces if p.axis is None), *found])
    slot, left = prod(p.extent for p in pieces if p.to == "slot"), []
    for k, extent in reversed(list(enumerate(nest.extents))):
        for p in missing([p for p in pieces if p.axis == k], k, extent):
            left.append(replace(p, stride=slot))
            slot *= p.extent
    try:
        made = Fragment(tuple(nest.extents), (*pieces, *left), fragment.threads, fragment.first_thread)
    except TileValueError:
        return None
    return Loop(nest.vars, tuple(nest.extents), made, tuple(0 for _ in nest.vars)) if made.covers else None


def _part(own: list[Piece], shift: int, extent: int, whole: int) -> tuple[int, int, list[Piece]]:
    """The axis of a loop over ``extent`` elements of a fragment's axis from ``shift`` on: its extent, shift
    and digits. Where they are whole values of the highest digit, and slots, the loop has no other rounds;
    else it runs over all of the axis and leaves some out."""
    top = max(own, key=lambda p: p.unit, default=None)
    if (
        top is None
        or top.to != "slot"
        or shift % top.unit
        or extent % top.unit
        or extent == whole
        or top.unit * top.extent != whole
    ):
        return whole, shift, own
    rounds = extent // top.unit
    return extent, 0, [p for p in own if p is not top] + ([replace(top, extent=rounds)] if rounds > 1 else [])


def _share_copies(pieces: list[Piece], axis: int, extent: int) -> tuple[list[Piece], int]:
    """Copies turned into digits of an axis, and how many threads it has then."""
    out, unit = [], 1
    for p in sorted(pieces, key=lambda p: p.stride):
        if p.axis is None and unit * p.extent < 2 * extent:
            out.append(Piece(axis, unit, p.extent, "thread", p.stride))
            unit *= p.extent
        else:
            out.append(p)
    return out, unit


# ---- a fragment from a loop


def from_loop(nest: Nest, access: Element, loop: Loop) -> Fragment | None:
    """The fragment that ``access`` wants: its elements where their iterations run. None where the access does
    not name a whole tile, element by element."""
    if len(loop.vars) > len(nest.vars):
        return None
    shape = [int(e) for e in access.buffer.ty.shape]
    where: dict[int, int] = {}
    whole, walked = [1] * len(shape), list[int]()
    for axis, e in enumerate(access.indices):
        found = plain_index(e, nest.vars)
        if found is None:
            step = walk(e, nest.vars, loop.extents, shape[axis])
            if step is None or step.grain > 1:
                own = [w.own if (w := _walk(nest, access, x)) else i for x, i in enumerate(access.indices)]
                return _small(from_mixed(loop, own, shape, access.mode != "read"), access, step is not None)
            walked.append(axis)
            whole[axis] = shape[axis]
            continue
        k, shift = found
        if k < 0:
            if shape[axis] != 1:
                return None
            continue
        if k in where or shift or loop.shifts[k] or loop.extents[k] != shape[axis]:
            return None
        where[k], whole[axis] = axis, loop.fragment.shape[k]
    if access.mode != "read" and any(e > 1 for k, e in enumerate(loop.extents) if k not in where):
        return None
    pieces = []
    for p in loop.fragment.pieces:
        if p.axis in where:
            pieces.append(replace(p, axis=where[p.axis]))
        elif p.to == "thread":
            pieces.append(replace(p, axis=None))
    behind = prod(p.extent * p.stride for p in pieces if p.to == "slot")
    for axis in reversed(walked):  # every thread of an iteration has what the steps of other loops name
        pieces.append(Piece(axis, 1, shape[axis], "slot", behind))
        behind *= shape[axis]
    made = Fragment(tuple(whole), packed(pieces), loop.fragment.threads, loop.fragment.first_thread)
    return _small(made, access, bool(walked))


def _walk(nest: Nest, access: Element, axis: int) -> Walk | None:
    """How an index of an access moves with variables of other loops, if it does."""
    return walk(access.indices[axis], nest.vars, nest.extents, int(access.buffer.ty.shape[axis]))


def grains(nest: Nest, access: Element) -> dict[int, int]:
    """The axes of a tile that an access walks along by other loops, each with how many neighbours one step
    names: those may lie in several threads."""
    found = ((axis, _walk(nest, access, axis)) for axis in range(len(access.indices)))
    return {axis: w.grain for axis, w in found if w is not None}


def _small(made: Fragment | None, access: Element, walked: bool) -> Fragment | None:
    """A fragment, if it is no larger than one may be that is walked along."""
    large = made is not None and walked and made.slots * bits_of(access.buffer) > 32 * MOST
    return None if large else made


# ---- a loop from nothing


def contiguous(nest: Nest) -> tuple[int, int] | None:
    """``(k, widest)``: the variable along which most accesses to memory walk, and how many neighbours one
    access may take: as many as all can, but one that crosses to another rank decides alone. None where none
    walks."""
    votes: dict[int, list[int]] = {}
    far: dict[int, int] = {}
    own = own_buffers(nest)
    for a in nest.accesses:
        if a.buffer in own or in_registers(a.buffer) or not a.indices:
            continue
        last = plain_index(a.indices[-1], nest.vars)
        k = last[0] if last is not None else _steps(a.indices[-1], nest.vars)
        if k >= 0:
            row = a.buffer.ty.shape[-1]
            run = 128 // bits_of(a.buffer)
            while not is_multiple(row, run):
                run //= 2
            votes.setdefault(k, []).append(run)
            if _crosses(nest, a):
                far[k] = run
    if not votes:
        return None
    k = max(votes, key=lambda k: (len(votes[k]), k))
    return k, min(far.get(k, min(votes[k])), nest.width or max(votes[k]))


def _crosses(nest: Nest, a: Element) -> bool:
    """Whether an access is that of a copy to another rank's memory, or from it. The links move packets, so
    what crosses goes as wide as it can, whatever the own side has to do for that."""
    call = nest.node
    if not isinstance(call, ir.Call) or call.op.name != "ts.remote_copy" or "op" in call.attrs:
        return False
    puts = str(call.attrs["side"]) == "dst"
    return (
        str(call.attrs["reach"]) == "device"
        and a.buffer.same_as(call.args[1 if puts else 0].source)
        and (a.mode != "read") == puts
    )


def _steps(e: Any, variables: Sequence[Any]) -> int:
    """Which variable an index walks along in steps of one, whatever it does along others; -1 where none."""
    together = list(sym.detect_linear_equation(e, list(variables)) or [])[:-1]
    alone = (
        [(*(sym.detect_linear_equation(e, [v]) or ()), None)[0] for v in variables] if not together else []
    )
    for k, c in enumerate(together or alone):
        if isinstance(c, tirx.IntImm) and int(c.value) == 1:
            return k
    return -1


def from_memory(nest: Nest, threads: int) -> Loop | None:
    """The loop of a nest that no fragment decides: neighbours to neighbouring threads. None where its extents
    are not constant."""
    if not nest.is_static:
        return None
    if not nest.vars:
        return Loop((), (), best((), threads, 32), ())
    along, widest = contiguous(nest) or (len(nest.vars) - 1, 1)
    bits = max((bits_of(a.buffer) for a in nest.accesses), default=32)
    made = best(tuple(nest.extents), threads, bits, along, widest)
    return Loop(nest.vars, tuple(nest.extents), made, tuple(0 for _ in nest.vars))


# ---- the choice


def choose(
    nest: Nest, layouts: Mapping[Any, Any], threads: int
) -> tuple[Loop | None, list[tuple[Element, str]]]:
    """The loop of a nest whose fragments all have layouts, and the accesses that do not fit it (each with the
    reason): the loop with the fewest of those; among equals one that follows a fragment that is written, then
    one that reads most. The author's, if any."""
    known = [a for a in fragments_of(nest) if isinstance(layouts.get(a.buffer), Fragment)]
    layouts = {
        a.buffer: seen_by(layouts[a.buffer], threads) if a.mode == "read" else layouts[a.buffer]
        for a in known
    }
    if not nest.is_static:
        why = "the loop's extents are known only at run time"
        return None, [(a, why) for a in known if a.mode != "read" or not is_replicated(layouts[a.buffer])]
    found: tuple[Loop | None, list[tuple[Element, str]]] = None, []
    # numbers that every thread has say nothing about who runs what: memory does then
    alone = not any(decides(nest, a, layouts[a.buffer]) for a in known)
    asked = loop_of(nest)
    for loop in _and_free(() if alone else known, layouts, nest, threads) if asked is None else (asked,):
        bad = []
        for a in known:
            fits = match(loop, a.indices, layouts[a.buffer], a.mode != "read")
            if isinstance(fits, str):
                bad.append((a, fits))
            elif (nest.alone or nest.rereads) and a.mode != "read" and loop.fragment.copies != (0,):
                bad.append((a, "an iteration runs once, and more threads have a copy of the element"))
        if found[0] is None or len(bad) < len(found[1]):
            found = loop, bad
        if not found[1]:
            break
    return found


def decides(nest: Nest, a: Element, layout: Any) -> bool:
    """Whether a fragment in a nest says who runs what. What is one number for all iterations does not where
    every thread has it."""
    if not isinstance(layout, Fragment):
        return False
    number = not any(mentions(e, v) for e in a.indices for v in nest.vars)
    return a.mode != "read" or not (prod(layout.shape) == 1 or (number and is_replicated(layout)))


def _and_free(
    known: Sequence[Element], layouts: Mapping[Any, Any], nest: Nest, threads: int
) -> Iterator[Loop]:
    """The loops that follow a fragment, and, where none of them fits, the one that follows memory. Each is
    made when it is asked for: mostly the first one fits."""
    tries: list[Loop] = []
    for a in sorted(known, key=lambda a: (a.mode == "read", -prod(layouts[a.buffer].shape))):
        for share in (True, False) if a.mode == "read" else (False,):
            made = from_fragment(nest, a, layouts[a.buffer], share)
            if made is not None and made not in tries:
                tries.append(made)
                yield made
    free = from_memory(nest, threads)
    if free is not None:
        yield free
