"""How TMA stores rows of a tile in another rank's memory, or adds them (compiler/ops/peer_rows.py): each
thread starts some of them and awaits those (``ts::store_rows``, ``ts::add_rows_…``, whose header argues who
sees them).

A warp's loop that does nothing but put a tile of a ring to some ranks is shared out: each lane has rounds of
its own, so that what rounds read of where to put it is read at once, and TMA learns of all copies at once
(dispatch of 4096 tokens × 7168 on 4 H200: 520 → 507 µs, 2026-11-26, of printed text that was changed by hand;
as it is printed now no GPU has run it). Copies that go on beside their warp have no order
among themselves anyway. Each lane's copies are of its own groups, and every lane waits for those.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tilescale.compiler.cuda.ops.remote_put import moved
from tilescale.compiler.gpu.build import call as do
from tilescale.compiler.gpu.places import Global, widened
from tilescale.compiler.ir.lowerings import Lowering, lowers
from tilescale.compiler.ir.operations import name_of, operations
from tilescale.compiler.ir.scales import WARP
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.layout.loops import bits_of, element_dtype
from tilescale.compiler.layout.shared import Shared, strided
from tilescale.compiler.ops.peer_rows import READ, RING
from tilescale.compiler.passes.products import flat
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


def by_lanes(s: Any, cx: CudaLowering) -> bool:
    """Whether a loop is one whose rounds lanes of a warp share."""
    kind = str((s.annotations or {}).get("ts.kind", "serial"))
    if cx.executor.name != "warp" or cx.role or cx.loop is not None or cx.instrument or kind != "serial":
        return False
    return _only_puts(s.body)


def _only_puts(s: Any) -> bool:
    """Names, then a put of a ring's tile, under conditions or not. What lanes have between them (fragments)
    has been copied to where each can read it, by statements that are no names."""
    *names, last = flat(s) or [s]
    if not all(isinstance(x, tirx.Bind) and not list(operations(x)) for x in names):
        return False
    if isinstance(last, tirx.IfThenElse):
        return last.else_case is None and not list(operations(last.condition)) and _only_puts(last.then_case)
    return (
        name_of(last) == "peer_rows"
        and str(last.value.attrs.get("late")) == RING
        and "op" not in last.value.attrs
    )


def lower_by_lanes(s: Any, cx: CudaLowering) -> Any:
    """The loop, round k by lane k % 32, behind one look of the warp at the entries of all ranks: lanes do not
    come to the copies together, so that none of them could wait there for the others."""
    look = cx.look(None, cx.site("copy", "rows", s))
    extent, dtype = cx.extent(s.extent), str(s.loop_var.ty)
    var, turn = tirx.Var(s.loop_var.name, dtype), tirx.Var("turn", dtype)
    count, lane = widened(extent, dtype), widened(cx.thread(), dtype)
    cx.variables[s.loop_var] = var
    cx.bind_range(var, extent)
    outer, cx.executor, cx.by_lanes = cx.executor, cx.executor.within("thread"), True
    body = cx.stmt(s.body)
    cx.executor, cx.by_lanes = outer, False
    body = sequence([tirx.Bind(var, cx.analyzer.simplify(turn * WARP + lane), s.span), body])
    turns = cx.analyzer.simplify((count - lane + (WARP - 1)) // WARP)
    zero = tirx.IntImm(dtype, 0)
    return sequence([*look, tirx.For(turn, zero, turns, tirx.ForKind.SERIAL, body, span=s.span)])


def _row_by_row(tile: Any) -> Shared:
    return strided(tuple(int(e) for e in tile.ty.shape), bits_of(tile))
