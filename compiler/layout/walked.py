"""Tiles in registers that are walked along: an index of a loop's access that moves with a variable of another
loop, one that every thread runs by itself (``x[i, step * 4 + j]`` in a T.Parallel over i and j). What such a
variable moves along has to lie in slots of the threads that run the iteration, or the tile has to go through
shared memory in every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilescale.compiler.ir import numeric
from tilescale.compiler.ir.multiples import is_multiple
from tilescale.compiler.tvm_compat import ir, structural_map, sym, tirx

#: registers that a thread may hold of a tile because it is walked along; a larger one goes through shared
#: memory
MOST = 64


@dataclass(frozen=True)
class Walk:
    """An index as ``own``, which the nest's variables decide and which is less than ``grain``, and ``step``,
    a multiple of ``grain`` that they do not change."""

    own: Any
    step: Any
    grain: int


def walk(e: Any, variables: Sequence[Any], extents: Sequence[Any], extent: int) -> Walk | None:
    """An index into an axis of ``extent`` elements, taken apart; None where it cannot be, or where nothing
    moves it but the nest's variables. The smallest grain that divides the axis."""
    found = numeric.variables(e)
    others = found - set(variables)
    if not others or not all(isinstance(n, int) for n in extents):
        return None
    zero = tirx.IntImm("int32", 0)
    if not found & set(variables):
        return Walk(zero, e, 1)
    if None in others:
        return None
    own = _without(e, others)
    step = _without(e, set(variables)) - _without(own, set(variables))
    if not isinstance(same := sym.Analyzer().simplify(e - own - step), tirx.IntImm) or int(same.value):
        return None
    grid = [np.ravel(g) for g in np.indices([int(n) for n in extents])]
    try:
        values = np.asarray(numeric.evaluate(own, dict(zip(variables, grid, strict=True))))
    except numeric.Unknown:
        return None
    reach = int(values.max()) + 1
    if int(values.min()) < 0:
        return None
    for grain in range(reach, extent + 1):
        if extent % grain == 0 and is_multiple(step, grain):
            return Walk(own, step, grain)
    return None


def _without(e: Any, variables: set[Any]) -> Any:
    """An index with some variables at zero."""
    put = lambda v: tirx.IntImm(str(v.ty), 0) if v in variables else v  # noqa: E731
    return structural_map(e, (ir.Var, put)) if isinstance(e, ir.Expr) else e
