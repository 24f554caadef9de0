"""How the operation of compiler/ops/ldmatrix.py is done on the GPU: the instruction, where the 16 bytes of a
row lie together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilescale.compiler.cuda.ops.extern import in_order
from tilescale.compiler.gpu.build import at, call
from tilescale.compiler.ir.contexts import LayoutContext
from tilescale.compiler.ir.lowerings import Lowering, lowers
from tilescale.compiler.ir.multiples import multiple
from tilescale.compiler.layout.loops import bits_of
from tilescale.errors import TileSyntaxError, TileValueError

if TYPE_CHECKING:
    from tilescale.compiler.cuda.lower import Lowering as CudaLowering


@lowers("cuda", "ldmatrix")
class LdMatrix(Lowering["CudaLowering"]):
    def layouts(self, node: Any, cx: LayoutContext) -> list[Any]:
        return [in_order(node, node.args[1:], "T.ldmatrix", cx)]

    def lower(self, node: Any, cx: CudaLowering) -> Any:
        if not cx.target.matrix_products:
            raise TileSyntaxError(f"T.ldmatrix needs sm_80, and this is {cx.target.arch}", loc=cx.here)
        row, into = node.args
        chunk = 128 // bits_of(row.source)
        place, last = cx.shared_of(row.source), len(row.region) - 1
        source, where, tests, _ = cx.access(row.source, [r.min for r in row.region], node, False)
        others = [p.stride for p in place.layout.pieces if not (p.axis == last and p.unit == 1)]
        together = place.layout.vector(last) >= chunk and all(stride % chunk == 0 for stride in others)
        whole = together and multiple(cx.analyzer, row.region[-1].min, chunk)
        if tests or not whole:
            raise TileValueError(
                f"T.ldmatrix from {row.source.name}, at an index that may lie outside or between multiples "
                f"of {chunk} elements, or where so many do not lie together",
                loc=cx.here,
                expected=f"{row.source.name}[…, j], j a multiple of {chunk}, in a layout that keeps 16 bytes",
                hint="tilescale.layout.make_swizzled_layout for T.annotate_layout",
            )
        target, slot, _, _ = cx.access(into.source, [r.min for r in into.region], node, True)
        name = f"ldmatrix_x4{'_trans' if int(node.attrs['transposed']) else ''}"
        return call(name, at(target, slot), at(source, where), span=node.span)
