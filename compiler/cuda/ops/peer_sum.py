"""How TMA adds rows of a tile to another rank's memory (compiler/ops/peer_sum.py): each thread starts some of
them and awaits those (``ts::sum_rows_…``, whose header argues who sees the sums)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilescale.compiler.cuda.ops.remote_put import moved
from tilescale.compiler.gpu.places import Global
from tilescale.compiler.ir.lowerings import Lowering, lowers
from tilescale.compiler.layout.loops import bits_of, element_dtype
from tilescale.compiler.layout.shared import Shared, strided
from tilescale.compiler.tvm_compat import tirx

if TYPE_CHECKING:
    from tilescale.compiler.cuda.lower import Lowering as CudaLowering


@lowers("cuda", "peer_sum")
class LowerPeerSum(Lowering["CudaLowering"]):
    def shared_layouts(self, call: Any) -> dict[Any, Any]:
        return {call.args[0].source: _rows(call.args[0].source)}

    def lower(self, call: Any, cx: CudaLowering) -> Any:
        tile = call.args[0].source
        place, kind = cx.shared_of(tile), element_dtype(tile)
        strides = tuple(tirx.IntImm("int32", p.stride) for p in _rows(tile).pieces)
        rows = Global(place.buf, place.shape, strides, "int32", place.name)
        run, several = (f"sum_{which}_{kind}<{cx.threads}>" for which in ("run", "rows"))
        return moved(call, cx, rows, lambda made: made.done(run, several, cx.tid))


def _rows(tile: Any) -> Shared:
    return strided(tuple(int(e) for e in tile.ty.shape), bits_of(tile))
