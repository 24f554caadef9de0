"""How TMA stores rows of a tile in another rank's memory, or adds them (compiler/ops/peer_rows.py): each
thread starts some of them and awaits those (``ts::store_rows``, ``ts::add_rows_…``, whose header argues who
sees them)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tilescale.compiler.cuda.ops.remote_put import moved
from tilescale.compiler.gpu.build import call as do
from tilescale.compiler.gpu.places import Global
from tilescale.compiler.ir.lowerings import Lowering, lowers
from tilescale.compiler.layout.loops import bits_of, element_dtype
from tilescale.compiler.layout.shared import Shared, strided
from tilescale.compiler.ops.peer_rows import READ, RING
from tilescale.compiler.tvm_compat import tirx

if TYPE_CHECKING:
    from tilescale.compiler.cuda.lower import Lowering as CudaLowering


@dataclass
class Rows(Global):
    """A tile that lies row by row, behind the tiles of other executors (``base``)."""

    base: Any = None

    def flat(self, at: list[Any]) -> Any:
        return super().flat(at) if self.base is None else super().flat(at) + self.base


#: where a copy ends that goes on beside its executor, as the headers have it
ENDS = {READ: ", ts::ROWS_READ", RING: ", ts::ROWS_BEGUN"}


@lowers("cuda", "rows_group")
def lower_rows_group(call: Any, cx: CudaLowering) -> Any:
    return do("bulk_commit", span=call.span)


@lowers("cuda", "await_rows")
def lower_await_rows(call: Any, cx: CudaLowering) -> Any:
    """Each thread waits for its own, most of which have none."""
    if int(call.attrs["complete"]):
        return do("rows_complete", span=call.span)
    return do(f"bulk_wait_read<{int(call.attrs['pending'])}>", span=call.span)


@lowers("cuda", "peer_rows")
class LowerPeerRows(Lowering["CudaLowering"]):
    def shared_layouts(self, call: Any) -> dict[Any, Any]:
        return {call.args[0].source: _row_by_row(call.args[0].source)}

    def lower(self, call: Any, cx: CudaLowering) -> Any:
        tile = call.args[0].source
        place, kind = cx.shared_of(tile), element_dtype(tile)
        strides = tuple(tirx.IntImm("int32", p.stride) for p in _row_by_row(tile).pieces)
        rows = Rows(place.buf, place.shape, strides, "int32", place.name, place.base)
        done, of = ("add", f"_{kind}") if "op" in call.attrs else ("store", "")
        ends = ENDS[str(call.attrs["late"])] if "late" in call.attrs else ""
        run, several = (f"{done}_{which}{of}<{cx.executor.threads}{ends}>" for which in ("run", "rows"))
        return moved(call, cx, rows, lambda made: made.done(run, several, cx.thread()))


def _row_by_row(tile: Any) -> Shared:
    return strided(tuple(int(e) for e in tile.ty.shape), bits_of(tile))
