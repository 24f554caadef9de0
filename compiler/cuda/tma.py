"""Copies by the tensor memory accelerator: boxes of a tensor into the swizzled tiles of a ring's stage (PTX ISA 9.0,
"cp.async.bulk.tensor"). What lies outside the tensor is written as zeros, and counts among the bytes that the barrier expects."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.cuda.kernel import TensorMap
from tilescale.compiler.cuda.rings import at
from tilescale.compiler.frontend.builder import sequence
from tilescale.compiler.ir.nests import long_axes
from tilescale.compiler.tvm_compat import tirx
from tilescale.errors import InternalError


def box_rows(rows: int) -> int:
    """Rows of one box: the most that divide a tile's, at most 256, whole groups of the swizzle."""
    return max(n for n in range(8, 257, 8) if rows % n == 0)


def load(cx: Any, call: Any) -> Any:
    """One copy for each box of the tile."""
    src, dst = call.args[:2]
    place, source = cx.places[dst.source], src.source
    layout, (rows, cols) = place.layout, [int(e) for e in dst.source.ty.shape[1:]]
    if not layout.swizzle:
        raise InternalError(f"{place.name} is filled by TMA and has no swizzle", loc=cx.here)
    wide, down = layout.swizzle * 8 // layout.bits, box_rows(rows)
    axes = long_axes(src)
    box = tuple({axes[0]: down, axes[1]: wide}.get(k, 1) for k in range(len(src.region)))
    param = next(k for k, p in enumerate(cx.program.params) if p.var.same_as(source))
    name = cx.tensor_map(TensorMap(param, box, layout.swizzle), f"{source.name}_map")
    stage = cx.scalar(dst.region[0].min)
    starts = [cx.scalar(r.min) for r in src.region]
    barriers = cx.barriers[int(call.attrs["ring"])]
    full = at(barriers.full, stage)
    out = []
    for r in range(0, rows, down):
        for c in range(0, cols, wide):
            where = list(starts)
            where[axes[0]], where[axes[1]] = where[axes[0]] + r, where[axes[1]] + c
            into = at(place.buf, cx.analyzer.simplify(place.linear([stage, tirx.IntImm("int32", r), tirx.IntImm("int32", c)])))
            coordinates = [cx.analyzer.simplify(w) for w in reversed(where)]  # the innermost first
            out.append(tirx.Evaluate(tirx.call_extern("void", "ts::tma_load", into, name, full, *coordinates), call.span))
    return sequence(out)
