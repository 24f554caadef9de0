"""What one operation reads and what it writes share no elements, but where each element is read and written
in its place.

An operation has no order among its elements: the simulator reads all of them first, the CPU goes from the
first to the last, a GPU's threads go as they come. So a copy of a tile onto a part of itself further on would
be three different things, and is refused on every target alike, where the regions are known to overlap.
Exactly equal regions are an element's own business in a copy or a scan, not in a product.
"""

from __future__ import annotations

from typing import Any

from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.operations import effects_of, find
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.source import loc_of
from tilescale.compiler.tvm_compat import ir, structural_walk, sym
from tilescale.errors import TileValueError


def check_aliasing(program: TileProgram) -> TileProgram:
    """The program as it is.

    Raises:
        TileValueError: an operation that writes elements which it also reads, at the call.
    """
    calls: list[tuple[Any, Any]] = []

    def note(c: Any) -> None:
        op = find(c)
        if op is not None and op.plain:
            calls.append((op, c))

    # Raised behind the walk: an error of a callback would come out as TVM's.
    structural_walk(program.func.body, (ir.Call, note))
    for op, call in calls:
        accesses = effects_of(call)
        for w in (a for a in accesses if a.mode == "write"):
            for r in (a for a in accesses if a.mode == "read" and not a.region.same_as(w.region)):
                if w.owner is None and r.owner is None and shared(r.region, w.region, op.in_place):
                    raise _refusal(w.region.source.name, op.written(call), op.in_place, loc_of(call.span))
    return program


def shared(read: Any, written: Any, in_place: bool) -> bool:
    """Whether two regions are known to have elements in common, other than each in its place where that is
    allowed."""
    if not read.source.same_as(written.source):
        return False
    analyzer, equal = sym.Analyzer(), True
    for a, b in zip(read.region, written.region, strict=True):
        apart, wide, broad = (
            constant(analyzer.simplify(b.min - a.min)),
            constant(a.extent),
            constant(b.extent),
        )
        if apart is None or wide is None or broad is None or apart >= wide or -apart >= broad:
            return False
        equal = equal and apart == 0 and wide == broad
    return not (equal and in_place)


def _refusal(tile: str, name: str, in_place: bool, loc: Any) -> TileValueError:
    return TileValueError(
        f"{name} writes elements of {tile} that it also reads, and has no order among its elements", loc=loc,
        expected="regions with no element in common" + (", or the same region" if in_place else ""),
        hint="take what is read through another tile: T.copy it there first",
    )  # fmt: skip
