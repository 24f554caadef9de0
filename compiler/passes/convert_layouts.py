"""Where threads need what other threads hold: the data goes through shared memory, as statements of the
program, so that fences are derived for it like for everything else. Operations split themselves
(``TileOp.exchange``); accesses of loops that do not fit the loop's layout are directed to a copy in shared
memory, which is said at log level info."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tilescale.compiler.ir.buffers import bases, redirected, stored
from tilescale.compiler.ir.lowerings import lowering
from tilescale.compiler.ir.nests import nest_of
from tilescale.compiler.ir.operations import operations
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.rewrite import rebuild
from tilescale.compiler.ir.scales import Executor
from tilescale.compiler.ir.source import loc_of
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.ir.walks import scalar_reads
from tilescale.compiler.layout import Fragment
from tilescale.compiler.layout.loops import bits_of, choose, element_dtype, fragments_of, in_registers
from tilescale.compiler.layout.match import is_replicated, seen_by
from tilescale.compiler.layout.shared import strided
from tilescale.compiler.passes.stage_operands import copy_statement, whole
from tilescale.compiler.passes.tile_owners import in_condition, spread
from tilescale.compiler.tvm_compat import ir, structural_map, structural_walk, tirx


class Exchange:
    """What `TileOp.exchange` works with."""

    def __init__(self, program: TileProgram):
        self.program = program
        self.layouts: dict[Any, Any] = dict(program.layouts)
        self.executor = Executor("block", program.launch.threads)
        self.made: list[Any] = []
        #: tiles of shared memory that a nest only reads, each with the fragment that it is a copy of
        self.copies: dict[Any, Any] = {}
        #: fragments that have another name, by which they may change, and those names
        self.viewed = {b for pair in bases(program.func.body).items() for b in pair}

    def scratch(self, name: str, shape: Any, dtype: str, span: Any = None, swizzle: int = 0) -> Any:
        """A new tile in shared memory, row-major under a swizzle of so many bytes, all of it as a region; its
        allocation stands in front of the statements that are returned."""
        extents = tuple(int(e) for e in shape) or (1,)
        var = tirx.decl_buffer(extents, dtype, name, scope="shared", data_alignment=64, layout=None)
        self.layouts[var] = replace(strided(extents, bits_of(var)), swizzle=swizzle)
        self.made.append(tirx.AllocBuffer(var, {}, span))
        return whole(var)


def convert_layouts(program: TileProgram) -> TileProgram:
    """The program with every exchange between threads written out."""
    cx = Exchange(program)

    def leaf(s: Any, ex: Executor) -> list[Any] | None:
        cx.executor, cx.made = ex, []
        nest = nest_of(s)
        if nest is not None:
            return _nest(s, nest, cx)
        if isinstance(s, tirx.Evaluate):
            done = lowering(s.value, program.target).exchange(s.value, cx)
            if done is not None:
                return [*cx.made, *done]
        return _scalar(s, cx)

    _refuse_whiles(program)
    body = rebuild(program.func.body, cx.executor, leaf)
    if cx.copies:
        body = structural_map(body, (tirx.For, lambda s: _hoisted(s, cx.copies)))
    done = program.with_body(body)
    done.layouts = cx.layouts
    return done


def _refuse_whiles(program: TileProgram) -> None:
    """A condition that is computed anew in every round cannot have statements in front of it. `tile_owners`
    has refused fragments too large for every thread to hold; what is left is a small one that an instruction
    spreads."""

    def look(s: Any) -> None:
        apart = [
            a
            for a in scalar_reads(s)
            if in_registers(a.buffer)
            and isinstance(program.layouts.get(a.buffer), Fragment)
            and not is_replicated(program.layouts[a.buffer])
        ]
        if apart:
            found.append((s, apart[0].buffer.name))

    found: list[Any] = []
    structural_walk(program.func.body, (tirx.While, look))
    if found:
        s, name = found[0]
        raise in_condition(name, loc_of(getattr(s, "span", None)))


def _nest(s: Any, nest: Any, cx: Exchange) -> list[Any] | None:
    for a in fragments_of(nest):
        held = cx.layouts.get(a.buffer)
        if isinstance(held, Fragment):
            _require_own(a.buffer, seen_by(held, cx.executor.threads) if a.mode == "read" else held, s, cx)
    _, bad = choose(nest, cx.layouts, cx.executor.threads)
    if not bad:
        return None
    reasons = {a.buffer: why for a, why in bad}
    written = {a.buffer for a, _ in bad if a.mode != "read"}
    there: dict[Any, Any] = {}
    before, after = [], []
    for buffer, why in reasons.items():
        tile = cx.scratch(f"{buffer.name}_shared", buffer.ty.shape, element_dtype(buffer), nest.node.span)
        there[buffer] = tile.source
        _say(cx, buffer, why, nest.what, nest.node)
        before.append(copy_statement(whole(buffer), tile, nest.node))
        if buffer not in written and buffer not in cx.viewed:
            cx.copies[tile.source] = buffer
        if buffer in written:
            after.append(copy_statement(tile, whole(buffer), nest.node))
    return [*cx.made, *before, redirected(s, there), *after]


def _hoisted(loop: Any, copies: dict[Any, Any]) -> Any:
    """A loop in whose rounds a fragment stays as it is: its copy in shared memory is made once, in front. A
    loop that awaits products keeps all: what they leave in a fragment is there only then."""
    stmts = _flat(loop.body)
    mine = {s.buffer for s in stmts if isinstance(s, tirx.AllocBuffer) and s.buffer in copies}
    if not mine or any(op.name == "await_products" for _, op in operations(loop.body)):
        return loop
    changed = stored(loop.body)
    kept = {b for b in mine if copies[b] not in changed}
    front = [s for s in stmts if _makes(s) in kept]
    if not front:
        return loop
    rest = sequence([s for s in stmts if _makes(s) not in kept])
    notes = dict(loop.annotations) if loop.annotations else {}
    made = tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, rest, annotations=notes, span=loop.span)
    return sequence([*front, made])


def _flat(s: Any) -> list[Any]:
    return [t for x in s.seq for t in _flat(x)] if isinstance(s, tirx.SeqStmt) else [s]


def _makes(s: Any) -> Any:
    """The tile that a statement allocates or that a T.copy fills; None for any other."""
    if isinstance(s, tirx.AllocBuffer):
        return s.buffer
    call = s.value if isinstance(s, tirx.Evaluate) else None
    return call.args[1].source if isinstance(call, ir.Call) and call.op.name == "ts.copy" else None


def _require_own(buffer: Any, held: Fragment, s: Any, cx: Exchange) -> None:
    """Who touches a fragment are all of the threads that hold it: some of them would touch their part
    alone."""
    if held.threads != cx.executor.threads:
        raise spread(
            buffer.name, held.threads, cx.executor.name, cx.executor.threads, loc_of(getattr(s, "span", None))
        )


def _scalar(s: Any, cx: Exchange) -> list[Any] | None:
    wanted = {
        a.buffer: a
        for a in scalar_reads(s)
        if in_registers(a.buffer) and isinstance(cx.layouts.get(a.buffer), Fragment)
    }
    apart = [b for b in wanted if not is_replicated(cx.layouts[b])]
    if not apart:
        return None
    there = {}
    before = []
    for buffer in apart:
        _require_own(buffer, cx.layouts[buffer], s, cx)
        tile = cx.scratch(f"{buffer.name}_shared", buffer.ty.shape, element_dtype(buffer), s.span)
        there[buffer] = tile.source
        _say(cx, buffer, "every thread reads one element", "a scalar", s)
        before.append(copy_statement(whole(buffer), tile, s))
    return [*cx.made, *before, redirected(s, there)]


def _say(cx: Exchange, buffer: Any, why: str, what: str, node: Any) -> None:
    loc = loc_of(getattr(node, "span", None))
    place = f"{loc.file}:{loc.line}: " if loc else ""
    cx.program.notes.append(f"{place}{buffer.name} goes through shared memory for {what}: {why}")
