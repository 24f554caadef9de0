"""Copies by the tensor memory accelerator: boxes of a tensor into the swizzled tiles of a ring's stage (PTX ISA 9.0,
"cp.async.bulk.tensor"). What lies outside the tensor is written as zeros, and counts among the bytes that the barrier expects."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.cuda.kernel import TensorMap
from tilescale.compiler.cuda.places import widened
from tilescale.compiler.cuda.rings import at
from tilescale.compiler.frontend.builder import sequence
from tilescale.compiler.ir.nests import long_axes
from tilescale.compiler.tvm_compat import tirx
from tilescale.errors import InternalError


def box_rows(rows: int, shares: int = 1) -> int:
    """Rows of one box: the most that divide a tile's into as many equal shares, at most 256, whole groups of the swizzle."""
    return max(n for n in range(8, 257, 8) if rows % (n * shares) == 0)


def load(cx: Any, call: Any) -> Any:
    """One copy for each box of the tile; where blocks of the cluster share it, for each box of this block's share, into all of them."""
    src, dst = call.args[:2]
    place, source = cx.places[dst.source], src.source
    layout, (rows, cols) = place.layout, [int(e) for e in dst.source.ty.shape[1:]]
    if not layout.swizzle:
        raise InternalError(f"{place.name} is filled by TMA and has no swizzle", loc=cx.here)
    axes_shared = str(call.attrs.get("multicast", "")) if call.attrs else ""
    blocks = cx.cluster_size(axes_shared)
    wide = layout.swizzle * 8 // layout.bits
    by_columns = cols % (wide * blocks) == 0  # a share is some of the boxes side by side, or some of those one below the other
    down = box_rows(rows, 1 if by_columns else blocks)
    axes = long_axes(src)
    box = tuple({axes[0]: down, axes[1]: wide}.get(k, 1) for k in range(len(src.region)))
    param = next(k for k, p in enumerate(cx.program.params) if p.var.same_as(source))
    name = cx.tensor_map(TensorMap(param, box, layout.swizzle), f"{source.name}_map")
    stage = cx.scalar(dst.region[0].min)
    starts = [cx.scalar(r.min) for r in src.region]
    barriers = cx.barriers[int(call.attrs["ring"])]
    full = at(barriers.full, stage)
    high, broad = (rows, cols // blocks) if by_columns else (rows // blocks, cols)
    own: Any = cx.cluster_rank(axes_shared) if axes_shared else tirx.IntImm("int32", 0)
    first_row, first_col = (0, own * broad) if by_columns else (own * high, 0)
    into_blocks = [cx.cluster_mask(axes_shared)] if axes_shared else []
    function = "ts::tma_load_multicast" if axes_shared else "ts::tma_load"
    out = []
    for r in range(0, high, down):
        for c in range(0, broad, wide):
            where, row, col = list(starts), first_row + widened(r, "int32"), first_col + widened(c, "int32")
            where[axes[0]], where[axes[1]] = where[axes[0]] + row, where[axes[1]] + col
            into = at(place.buf, cx.analyzer.simplify(place.linear([stage, row, col])))
            coordinates = [cx.analyzer.simplify(w) for w in reversed(where)]  # the innermost first
            out.append(tirx.Evaluate(tirx.call_extern("void", function, into, name, full, *into_blocks, *coordinates), call.span))
    return sequence(out)
