"""Nests that store by stmatrix (layout/matrices.py): whether one does here, and what a lane adds to the address that it gives."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.cuda.places import InShared, digit
from tilescale.compiler.ir.nests import Nest
from tilescale.compiler.ir.scales import WARP
from tilescale.compiler.layout.match import Loop
from tilescale.compiler.layout.matrices import SIDE, Matrices, matrices
from tilescale.compiler.tvm_compat import tirx


def plan(cx: Any, nest: Nest, loop: Loop) -> Matrices | None:
    """How a nest of this kernel goes by matrices; None where it does not."""
    place = cx.places.get(nest.body.buffer) if isinstance(nest.body, tirx.BufferStore) else None
    if not isinstance(place, InShared) or place.base is not None or cx.remote is not None:
        return None
    return matrices(nest, loop, place.layout, cx.target)


def lane_part(made: Matrices, lane: Any) -> tuple[dict[int, Any], dict[int, Any]]:
    """What a lane that names a row adds to the place of its warp's elements, by axis of the loop, and to the counters of the slots' digits:
    lane l names row l % 8 of matrix l / 8."""
    row = lane % tirx.IntImm("int32", SIDE)
    counters, unit = {}, SIDE
    for k, n in made.bits:
        counters[k] = digit(lane, unit, n, last=unit * n == WARP)
        unit *= n
    return {made.cols if made.trans else made.rows: row}, counters
