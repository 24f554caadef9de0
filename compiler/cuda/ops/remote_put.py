"""How the communicator's warps put rows to another rank, or pull them from it (compiler/ops/remote_put.py).

Each thread copies vectors of up to 16 bytes by plain loads and stores, several under way at once
(``ts::put_run``, ``ts::put_rows``). Then the warps synchronize, and one thread signals. Why whoever sees the
signal sees the rows: each thread's stores come before the barrier, the barrier before the signal, which is a
release at the scope of the system and so cumulative over what the barrier ordered (PTX ISA, "Memory
Consistency Model", "Causality order", and "bar.sync", which orders prior accesses of its participants). The
rows that are read are there: what the launch's predecessors left, or what one thread of these warps acquired
in front of a barrier of theirs. Those of another rank are what its stream did before it entered the launch
(ts::enter), or what it told these warps of. Each is read once, behind that, so no cache has an older one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tilescale.compiler.gpu.build import all_of, at
from tilescale.compiler.gpu.build import call as do
from tilescale.compiler.gpu.places import widened
from tilescale.compiler.ir.lowerings import lowers
from tilescale.compiler.ir.multiples import multiple, spelt_out
from tilescale.compiler.ir.nests import long_axes
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.operations import VOID
from tilescale.compiler.ir.program import COMM_DEPTH
from tilescale.compiler.ir.scales import WARP
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.layout.loops import bits_of
from tilescale.compiler.ops.fence import fence
from tilescale.compiler.passes.remote_puts import COMMUNICATOR
from tilescale.compiler.tvm_compat import ir, tirx

if TYPE_CHECKING:
    from tilescale.compiler.cuda.lower import Lowering as CudaLowering

#: bytes of the widest loads and stores
WIDEST = 16


@lowers("cuda", "remote_put")
def lower_remote_put(call: Any, cx: CudaLowering) -> Any:
    src, dst, peer, counter, value = call.args
    signalled = {
        "executor": call.attrs["executor"],
        "reach": call.attrs["reach"],
        "op": call.attrs["signal_op"],
    }
    told = [peer] if str(call.attrs["side"]) == "dst" else []
    signal = ir.Call("ts.signal", [counter, value, *told], attrs=signalled, ret_ty=VOID, span=call.span)
    return sequence(
        [
            _put(call, cx),
            cx.stmt(fence(COMMUNICATOR, f"{dst.source.name}'s rows come before their signal", call.span)),
            cx.signal(signal),
        ]
    )


def _put(call: Any, cx: CudaLowering) -> Any:
    """The copy alone."""
    src, dst, _ = call.args[:3]
    source, target = cx.tensor_of(src.source), cx.tensor_of(dst.source)
    threads, depth = int(call.attrs["warps"]) * WARP, int(call.attrs["depth"])
    side_by_side = []
    if axes := long_axes(dst):  # as many as there are, from where a row begins to where it ends
        side_by_side = [cx.scalar(dst.region[axes[-1]].extent), target.shape[axes[-1]]]

    def move(made: Moved) -> Any:
        count = [made.run] if constant(made.run) is not None or not side_by_side else side_by_side
        numbers = [*count, *_beginnings(cx, src, source), *_beginnings(cx, dst, target)]
        width = _width(cx, bits_of(src.source) // 8, numbers)
        thread = cx.communicator_thread()
        template = f"<{width}, {threads}>" if depth == COMM_DEPTH else f"<{width}, {threads}, {depth}>"
        inner = made.done(f"put_run{template}", f"put_rows{template}", thread)
        lows = [(cx.scalar(r.min), size) for r, size in zip(src.region, source.shape, strict=True)]
        from_axes = long_axes(src)
        short = [pair for k, pair in enumerate(lows) if k not in from_axes]
        beyond = [t for low, size in short for t in (low >= 0, low < size) if not cx.proven(t)]
        if beyond:  # what is read outside of a tensor is zero
            rows = tirx.IntImm("int32", 1) if made.rows is None else made.rows
            there = [made.sides[0], rows, widened(made.run, "int32"), widened(made.pitches[1], "int64")]
            zeros = do(f"put_zeros<{width}, {threads}>", *there, thread, span=call.span)
            inner = tirx.IfThenElse(all_of(beyond), inner, zeros)
        return inner

    return moved(call, cx, source, move)


@dataclass
class Moved:
    """Rows that are copied, or added: the address of the first one at the destination and at the source, how
    many there are (None: one) of how many elements, and how far it is from one to the next on both sides."""

    call: Any
    sides: list[Any]
    rows: Any
    run: Any
    pitches: list[Any]

    def done(self, run: str, rows: str, thread: Any) -> Any:
        """A call of one of two functions of the headers, for one row or for several."""
        count = widened(self.run, "int32")
        if self.rows is None:
            return do(run, *self.sides, count, thread, span=self.call.span)
        steps = [widened(p, "int64") for p in reversed(self.pitches)]
        return do(rows, *self.sides, self.rows, count, *steps, thread, span=self.call.span)


def moved(call: Any, cx: CudaLowering, source: Any, move: Callable[[Moved], Any]) -> Any:
    """A copy of (src, dst, rank) by ``move``. What lies outside of the destination is left out: along each
    axis from `low` on so many as there are."""
    src, dst, peer = call.args[:3]
    target = cx.tensor_of(dst.source)
    from_axes, to_axes = long_axes(src), long_axes(dst)
    start = [[cx.scalar(r.min) for r in side.region] for side in (src, dst)]
    counts: dict[int, Any] = {}
    tests = []
    for j, (r, size) in enumerate(zip(dst.region, target.shape, strict=True)):
        low, extent = start[1][j], cx.scalar(r.extent)
        inside = cx.proven(low >= 0), cx.proven(low + extent <= size)
        if j not in to_axes:
            tests += [t for t, held in zip((low >= 0, low < size), inside, strict=True) if not held]
            continue
        count = extent if inside[1] else tirx.min(extent, size - low)
        if not inside[0]:
            skipped = tirx.max(tirx.IntImm(str(low.ty), 0) - low, tirx.IntImm(str(low.ty), 0))
            count, start[1][j] = count - skipped, low + skipped
            start[0][from_axes[to_axes.index(j)]] += skipped
        counts[j] = cx.analyzer.simplify(count)
    run, rows, outer = _runs(cx, counts, source, target, from_axes, to_axes)
    loops = []
    for i, j in outer:
        var = tirx.Var("row", "int32")
        cx.bind_range(var, 1 << 30)
        start[0][i], start[1][j] = start[0][i] + var, start[1][j] + var
        loops.append((var, counts[j]))
    places = [cx.analyzer.simplify(side.flat(s)) for side, s in zip((source, target), start, strict=True)]
    pulls = int(str(call.attrs["side"]) == "src")  # the place among the sides of the one that is far
    site = cx.site("copy", (source if pulls else target).name, call, "pull" if pulls else "")
    look = cx.look(peer, site)
    sides = [at(target.buf, places[1]), at(source.buf, places[0])]
    sides[pulls] = cx.peer_address(sides[pulls], peer, site)
    pitches = [_stride(side, k) for side, k in zip((source, target), rows or (None, None), strict=True)]
    inner = move(Moved(call, sides, widened(counts[rows[1]], "int32") if rows else None, run, pitches))
    for var, count in reversed(loops):
        zero = tirx.IntImm("int32", 0)
        inner = tirx.For(
            var, zero, widened(count, "int32"), tirx.ForKind.SERIAL, inner, annotations={"unroll": 1}
        )
    if cx.instrument:
        far, side = (src, source) if pulls else (dst, target)
        inner = cx.span(inner, site, peer=peer, amount=cx.crossing(far, side.shape, bits_of(far.source) // 8))
    return sequence([*look, tirx.IfThenElse(all_of(tests), inner, None) if tests else inner])


def _runs(
    cx: CudaLowering,
    counts: dict[int, Any],
    source: Any,
    target: Any,
    from_axes: list[int],
    to_axes: list[int],
) -> tuple[Any, tuple[int, int] | None, list[tuple[int, int]]]:
    """How many elements lie side by side on both sides, the axes that count such runs (None: there is one),
    and the axes around those."""
    axes = list(zip(from_axes, to_axes, strict=True))
    run: Any = tirx.IntImm("int32", 1)
    if axes:
        run = counts[axes.pop()[1]]
    while axes and all(
        _same(cx, run, _stride(side, k)) for side, k in zip((source, target), axes[-1], strict=True)
    ):
        run = cx.analyzer.simplify(widened(run, "int32") * widened(counts[axes.pop()[1]], "int32"))
    return run, axes.pop() if axes else None, axes


def _stride(side: Any, axis: int | None) -> Any:
    return tirx.IntImm("int32", 0) if axis is None else side.strides[axis]


def _same(cx: CudaLowering, a: Any, b: Any) -> bool:
    x, y = constant(a) if not isinstance(a, int) else a, constant(b) if not isinstance(b, int) else b
    return (
        x == y if x is not None and y is not None else cx.proven(widened(a, "int64") == widened(b, "int64"))
    )


def _beginnings(cx: CudaLowering, region: Any, side: Any) -> list[Any]:
    """Numbers of which the place where a row of a region begins is a sum of multiples: where it begins in its
    row, and how far it is along each other axis to the next one."""
    *axes, last = region.region
    far = [
        s for r, s in zip(axes, side.strides, strict=False) if constant(r.min) != 0 or constant(r.extent) != 1
    ]
    return [spelt_out(last.min, cx.definitions), *far]


def _width(cx: CudaLowering, each: int, numbers: list[Any]) -> int:
    """The most elements that all of these numbers are multiples of, and that one access takes."""
    width = max(1, WIDEST // each)
    while width > 1 and not all(multiple(cx.analyzer, n, width) for n in numbers):
        width //= 2
    return width
