"""Copies into other blocks' shared memory that an engine makes: cp.async.bulk between blocks of a cluster (PTX ISA 9.0, "cp.async.bulk",
shared::cta to shared::cluster), where threads would store 16 bytes at a time.

Such a copy tells one place alone when it has arrived, an mbarrier of the block that it goes to; the sender hears nothing. So this needs a
program in which blocks of a cluster hear of each other by ``T.barrier`` alone, which becomes

    barrier            what was sent in front of it has been announced to its receiver
    await_puts         each block: all that was announced to it is there
    barrier            everywhere

Between two barriers (an *epoch*) no block can know what another has done, so that what blocks do to each other's memory needs no order
there. What is left is the sender's own order, which an engine does not keep: behind a copy, in its epoch, nothing may write its source or
touch its destination's tile, its own or another block's; the same copy in a loop goes to another block in each round. Where a kernel
has a copy of which that does not hold, or hears otherwise (T.wait, atomics, ranks), its threads copy.

One copy is a row of neighbours that lie side by side in both tiles, a multiple of 16 bytes at places that are; all of a tile where both
have one layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from tilescale.compiler.ir import numeric
from tilescale.compiler.ir.nests import nest_of
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.operations import REGISTRY, VOID
from tilescale.compiler.ir.scales import SCALES, WIDTHS
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.layout.loops import element_dtype
from tilescale.compiler.layout.shared import strided
from tilescale.compiler.layout.spread import replicated
from tilescale.compiler.ops.cluster_put import await_puts, cluster_put
from tilescale.compiler.passes.products import flat, touched
from tilescale.compiler.passes.roles import calls, polls
from tilescale.compiler.tvm_compat import ir, structural_map, structural_walk, sym, tirx

#: bits that an engine moves at least, and of which a place is a multiple
CHUNK = 128
#: bytes from which on a copy is left to an engine: fewer are one store of some threads
LEAST = 1024
#: rows of one copy at most
MOST_ROWS = 16
ZERO = tirx.IntImm("int32", 0)


class Unfit(Exception):
    """A kernel's threads copy; ``str`` says why."""


@dataclass(frozen=True)
class Rows:
    """How a copy goes: by all of a tile (``whole``, bytes), or by ``count`` rows along ``axes`` of both regions, ``bytes`` each."""

    whole: bool
    bytes: int
    axes: tuple[tuple[int, int], ...] = ()
    count: int = 1


def gpu_bulk(program: Any) -> Any:
    """The program with its copies between blocks of a cluster left to engines where they can do them."""
    if not program.target.tensor_copies or prod(program.launch.cluster) == 1:
        return program
    puts = [c for c in calls(program.func.body) if _is_put(c) and rows_of(c, program.layouts) is not None]
    if not puts:
        return program
    try:
        _check_hearing(program.func.body)
        left = _Epochs(program, puts).left()
    except Unfit as why:
        program.notes.append(f"{program.name}: threads copy between blocks of a cluster, since {why}")
        return program
    return _marked(program, puts, left)


def _is_put(call: Any) -> bool:
    if call.op.name != "ts.remote_copy" or str(call.attrs["side"]) != "dst" or str(call.attrs["reach"]) != "cta_cluster":
        return False
    if "by_threads" in call.attrs:
        return False
    both = [r.source for r in call.args[:2]]
    return str(call.attrs["executor"]) == "block" and len(call.args) == 3 and all(b.ty.storage_scope == "shared" for b in both)


def rows_of(call: Any, layouts: Any) -> Rows | None:
    """How an engine makes a copy; None where it does not."""
    src, dst = call.args[:2]
    a, b = layouts.get(src.source), layouts.get(dst.source)
    if element_dtype(src.source) != element_dtype(dst.source) or a is None or b is None:
        return None
    if any(constant(r.extent) is None for region in (src, dst) for r in region.region):
        return None
    sizes = [[int(r.extent) for r in region.region] for region in (src, dst)]
    if prod(sizes[0]) * a.bits // 8 < LEAST:
        return None
    if a == b and all(_is_all(r) for r in (src, dst)):
        return Rows(True, a.bytes) if a.bytes * 8 % CHUNK == 0 else None
    if a.swizzle or b.swizzle or not (_is_plain(src, a) and _is_plain(dst, b)):
        return None
    return _rows(src, dst, sizes, a.bits)


def _rows(src: Any, dst: Any, sizes: list[list[int]], bits: int) -> Rows | None:
    """Rows of neighbours: the last axes, as many as both regions have whole, and the one in front of them."""
    long = [[k for k, e in enumerate(axis) if e > 1] for axis in sizes]
    if [sizes[0][k] for k in long[0]] != [sizes[1][k] for k in long[1]]:
        return None
    pairs, shapes = list(zip(*long, strict=True)), [[int(e) for e in r.source.ty.shape] for r in (src, dst)]
    run, kept = 1, len(pairs)
    while kept and all(prod(shape[k + 1 :]) == run for shape, k in zip(shapes, pairs[kept - 1], strict=True)):
        run, kept = run * sizes[0][pairs[kept - 1][0]], kept - 1
    axes = tuple(pairs[:kept])
    count = prod(sizes[0][i] for i, _ in axes)
    fits = run * bits % CHUNK == 0 and count <= MOST_ROWS and len(axes) < 2
    return Rows(False, run * bits // 8, axes, count) if fits and all(_aligned(r, CHUNK // bits) for r in (src, dst)) else None


def _is_all(region: Any) -> bool:
    return all(constant(r.min) == 0 and constant(r.extent) == int(e) for r, e in zip(region.region, region.source.ty.shape, strict=True))


def _is_plain(region: Any, layout: Any) -> bool:
    return layout == strided([int(e) for e in region.source.ty.shape], layout.bits)


def _aligned(region: Any, each: int) -> bool:
    """Whether a region of plain rows begins at a multiple of ``each`` elements, as do its rows."""
    shape, at = [int(e) for e in region.source.ty.shape], ZERO
    for k, r in enumerate(region.region):
        step = prod(shape[k + 1 :])
        if constant(r.extent) != 1 and k < len(shape) - 1 and step % each:
            return False
        at = at + r.min * step
    found = sym.Analyzer().modular_set(at)
    return int(found.coeff) % each == 0 and int(found.base) % each == 0


# ---- who hears of whom, and when


def _check_hearing(body: Any) -> None:
    """Blocks hear of each other by barriers of the cluster, all threads at once.

    Raises:
        Unfit: something else tells them.
    """
    for call in calls(body):
        op = REGISTRY[call.op.name]
        reach = str(call.attrs["reach"]) if "reach" in (call.attrs or {}) else "block"
        if op.name in ("wait", "signal", "team_sync") or op.name == "barrier" and reach in ("grid", "device") or polls(call):
            raise Unfit(f"T.{op.name} may tell a block what another has done")
        if op.name == "barrier" and reach == "cta_cluster" and str(call.attrs["executor"]) != "block":
            raise Unfit("a T.Scale below the block meets the cluster")
        if op.name == "remote_copy" and reach == "device":
            raise Unfit("ranks reach each other")


def _is_meeting(s: Any) -> bool:
    call = s.value if isinstance(s, tirx.Evaluate) else None
    return isinstance(call, ir.Call) and call.op.name == "ts.barrier" and str(call.attrs["reach"]) == "cta_cluster"


class _Epochs:
    """Walks a program with the copies that are under way, and what they read and write."""

    def __init__(self, program: Any, puts: list[Any]):
        self.program, self.puts = program, puts
        self.bases: dict[Any, Any] = {}
        structural_walk(program.func.body, (tirx.DeclBuffer, lambda s: self.bases.__setitem__(s.buffer, s.data.args[0])))
        #: copy → the loops around it since the barrier in front of it
        self.live: dict[Any, tuple[Any, Any]] = {}
        self.loops: list[Any] = []

    def left(self) -> bool:
        """Whether copies are under way when the kernel ends.

        Raises:
            Unfit: the sender's own order would be lost.
        """
        self.visit(self.program.func.body)
        return bool(self.live)

    def root(self, b: Any) -> Any:
        while b in self.bases:
            b = self.bases[b]
        return b

    def visit(self, s: Any) -> None:
        for x in flat(s):
            self._one(x)

    def _one(self, s: Any) -> None:
        if isinstance(s, tirx.IfThenElse):
            self._uses(tirx.Evaluate(s.condition))
            start = dict(self.live)
            self.visit(s.then_case)
            after, self.live = self.live, start
            if s.else_case is not None:
                self.visit(s.else_case)
            self.live = {**self.live, **after}
        elif isinstance(s, tirx.AttrStmt):
            if s.attr_key == "ts.scale" and SCALES[int(s.value.value)] in WIDTHS:
                self._uses(s.body)
            else:
                self.visit(s.body)
        elif isinstance(s, (tirx.For, tirx.While)) and nest_of(s) is None:
            self.loops.append(s)
            for _ in range(2):  # once more: what one round leaves under way meets the next one
                self.visit(s.body)
            self.loops.pop()
        elif _is_meeting(s):
            self.live = {}
        else:
            self._uses(s)

    def _uses(self, s: Any) -> None:
        call = s.value if isinstance(s, tirx.Evaluate) else None
        own = call if isinstance(call, ir.Call) and any(call.same_as(p) for p in self.puts) else None
        read, written = ({self.root(b) for b in part} for part in touched(s))
        for put, (source, target) in self.live.items():
            if own is not None and put.same_as(own):
                if not self._goes_round(own):
                    raise Unfit(f"{target.name} is written again before a T.barrier of the cluster")
                continue
            if source in written or target in read | written:
                name = source.name if source in written else target.name
                raise Unfit(f"{name} is touched behind the copy, before a T.barrier of the cluster")
        if own is not None:
            source, target = (self.root(r.source) for r in own.args[:2])
            if source.same_as(target):
                raise Unfit(f"{source.name} goes to the same tile")
            self.live[own] = source, target

    def _goes_round(self, put: Any) -> bool:
        """Whether the rounds of the one loop that repeats a copy within an epoch send it to different blocks."""
        repeating = [x for x in self.loops if not _meets(x)]
        if len(repeating) != 1 or not isinstance(repeating[0], tirx.For):
            return False
        loop, peer = repeating[0], put.args[2]
        if peer.same_as(loop.loop_var):
            return True
        if not isinstance(peer, tirx.FloorMod):
            return False
        rounds, around = self._count(loop.extent), self._count(peer.b)
        own = tirx.Var("rank", "int32")  # its number in the cluster, which stays
        known = structural_map(tirx.Evaluate(peer.a), (ir.Call, lambda c: own if c.op.name == "ts.scale_index" else c)).value
        rest = numeric.variables(sym.Analyzer().simplify(known - loop.loop_var))
        changing: set[Any] = {loop.loop_var, None}  # None: memory
        structural_walk(loop.body, (tirx.Bind, lambda s: changing.add(s.var)))
        structural_walk(loop.body, (tirx.For, lambda s: changing.add(s.loop_var)))
        return rounds is not None and around is not None and rounds <= around and not rest & changing

    def _count(self, e: Any) -> int | None:
        """An extent as a number, of which the count of blocks in the cluster is one."""
        if isinstance(e, ir.Call) and e.op.name == "ts.scale_count" and str(e.args[0].value) == "cta_cluster":
            return prod(self.program.launch.cluster)
        return constant(e)


def _meets(loop: Any) -> bool:
    """Whether a loop's round has a barrier of the cluster that it cannot go round."""
    return any(_is_meeting(x) for x in flat(loop.body))


# ---- what becomes of it


def _marked(program: Any, puts: list[Any], left: bool) -> Any:
    landed = tirx.decl_buffer((1,), "uint64", "landed", scope="shared.barrier", data_alignment=64, layout=None)
    count = tirx.decl_buffer((1,), "int32", "landings", scope="local.var", layout=None)
    there = tirx.BufferRegion(landed, [ir.Range.from_min_extent(ZERO, tirx.IntImm("int32", 1))])
    program.layouts[landed] = strided((1,), 64)
    program.layouts[count] = replicated((1,), program.launch.threads)
    now = tirx.BufferLoad(count, [ZERO])

    def meeting(span: Any, attrs: dict[str, Any], agreed: Any = ()) -> list[Any]:
        """``agreed``: what a collective's participants must have alike; the first of the two barriers is their meeting."""

        def barrier(args: list[Any], attrs: dict[str, Any]) -> Any:
            return tirx.Evaluate(ir.Call("ts.barrier", args, attrs=attrs, ret_ty=VOID, span=span), span)

        counted = tirx.BufferStore(count, now + 1, [ZERO], span)
        second = {name: value for name, value in attrs.items() if name not in ("agreed", "names")}
        first = barrier(list(agreed), {**attrs, "proxy": 1})
        return [first, await_puts(there, now, span), counted, barrier([], {**second, "proxy": 0})]

    def change(s: Any) -> Any:
        if _is_meeting(s):
            return sequence(meeting(s.span, dict(s.value.attrs), s.value.args))
        if isinstance(s.value, ir.Call) and any(s.value.same_as(p) for p in puts):
            return tirx.Evaluate(cluster_put(s.value, there), s.span)
        return s

    def inside(s: Any) -> Any:
        """The kernel's body, behind its axes."""
        if isinstance(s, tirx.AttrStmt) and s.attr_key in ("ts.kernel", "thread_extent"):
            return tirx.AttrStmt(s.node, s.attr_key, s.value, inside(s.body), s.span)
        head = [tirx.AllocBuffer(landed, {"ts.counts": [1]}), tirx.AllocBuffer(count), tirx.BufferStore(count, ZERO, [ZERO])]
        attrs = {"executor": "block", "reach": "cta_cluster"}
        return sequence([*head, s, *(meeting(None, attrs) if left else [])])

    body = inside(structural_map(program.func.body, (tirx.Evaluate, change)))
    return program.with_body(structural_map(body, (tirx.SeqStmt, lambda s: sequence(list(s.seq)))))
