"""How the operations of compiler/ops/argmax.py are done on GPUs: the lanes of a wave look through a line in
shared memory together, and agree by shuffles, once for each pick. Lines across the last axis are one thread's
each where there are as many as threads, since neighbouring threads then read neighbours."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from tilescale.compiler.gpu.build import all_of, cast
from tilescale.compiler.ir.contexts import StageContext
from tilescale.compiler.ir.lowerings import Lowering, lowers
from tilescale.compiler.ir.picks import ZERO, Search, compared_in
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.layout.loops import element_dtype, in_registers
from tilescale.compiler.ops.argmax import Picks
from tilescale.compiler.tvm_compat import tirx

if TYPE_CHECKING:
    from tilescale.compiler.gpu.lower import Lowering as GpuLowering


@lowers("gpu", "argmax", "topk")
class ArgMax(Lowering["GpuLowering"]):
    def stage(self, call: Any, cx: StageContext) -> list[Any] | None:
        """Tiles in registers go through shared memory."""
        if not any(in_registers(r.source) for r in call.args):
            return None
        before, after, args = list[Any](), list[Any](), list[Any]()
        for n, r in enumerate(call.args):
            tile = r
            if in_registers(r.source):
                tile = cx.tile(
                    f"{r.source.name}_shared",
                    [int(e.extent) for e in r.region],
                    element_dtype(r.source),
                    "shared",
                    call.span,
                )
                before += [cx.copy(r, tile, call)] if n == 0 else []
                after += [cx.copy(tile, r, call)] if n > 0 else []
            args.append(tile)
        return [*before, cx.again(call, args), *after]

    def lower(self, call: Any, cx: GpuLowering) -> Any:
        picks, threads = Picks.of(call), cx.executor.threads
        count = prod(picks.extents)
        alone = picks.axis < len(call.args[0].region) - 1 and count >= threads
        lanes = 1 if alone else _lanes(threads, cx.target.wave)
        groups, thread = threads // lanes, cx.thread()
        turn, number = tirx.Var("line", "int32"), tirx.Var("n", "int32")
        cx.bind_range(turn, -(-count // groups))
        own = cx.analyzer.simplify(turn * groups + thread // lanes)
        lane = cx.analyzer.simplify(thread % lanes)
        cx.bind_range(number, count)
        line, left = [], count
        for e in picks.extents:
            left //= e
            line.append(cx.analyzer.simplify(number // left % e))
        body: Any = sequence([tirx.Bind(number, own), _line(call, cx, picks, line, lanes, lane)])
        if count % groups:
            body = tirx.IfThenElse(own < count, body, None)
        return tirx.For(
            turn, ZERO, tirx.IntImm("int32", -(-count // groups)), tirx.ForKind.SERIAL, body, span=call.span
        )


def _lanes(threads: int, wave: int) -> int:
    """How many threads of an executor can agree by shuffles."""
    if threads % wave == 0:
        return wave
    return threads if threads < wave and threads & (threads - 1) == 0 else 1


def _line(call: Any, cx: GpuLowering, picks: Picks, line: list[Any], lanes: int, lane: Any) -> Any:
    src, values, indices = (r.source for r in call.args)
    compared = compared_in(element_dtype(src))

    def load(at: Any) -> Any:
        return cast(cx.load(tirx.BufferLoad(src, picks.source(line, at))), compared)

    def put(number: Any, at: Any) -> Any:
        made = []
        for n, (tile, value) in enumerate(
            ((values, cx.load(tirx.BufferLoad(src, picks.source(line, at)))), (indices, at)), 1
        ):
            buf, flat, tests, _ = cx.access(tile, picks.target(n, line, number), call, True)
            done: Any = tirx.BufferStore(buf, value, [flat], call.span)
            made.append(tirx.IfThenElse(all_of(tests), done, None) if tests else done)
        return tirx.IfThenElse(tirx.EQ(lane, ZERO), sequence(made), None) if lanes > 1 else sequence(made)

    def shuffle(value: Any, mask: int) -> Any:
        return tirx.call_extern(str(value.ty), "ts::shuffle_xor", value, tirx.IntImm("int32", mask))

    return Search(
        picks.extent, picks.count, compared, picks.least, load, put, lanes, lane, shuffle, cx.bind_range
    ).statements()
