"""T.Pipelined becomes rings and roles: which copies run ahead, through how many stages, who issues them.

A ring takes the shared buffers that a pipelined loop fills by copies at its head and only reads behind them. Its buffers get a
leading stage axis; the loop's body becomes

    acquire(ring, n); copies into stage n % depth; commit(ring, n); wait(ring, n); the rest, reading that stage; release(ring, n); n += 1

with n a variable that lives across loops and tiles. A schedule is data (`Schedule`): a target asks for a depth and for roles. The CPU
asks for one role and one stage, since its copies are not asynchronous: order alone guards them. Deeper rings give the same results,
which the tests use to check this pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tilescale.compiler.frontend.builder import sequence
from tilescale.compiler.ops import base
from tilescale.compiler.ops.ring import token
from tilescale.compiler.tvm_compat import ir, structural_map, structural_walk, tirx


@dataclass
class Ring:
    """Buffers that are filled and emptied together, ``depth`` stages of them."""

    number: int
    depth: int
    buffers: list[str]


@dataclass
class Schedule:
    """What the pass decided, kept beside the IR."""

    roles: list[str] = field(default_factory=lambda: ["all"])
    rings: list[Ring] = field(default_factory=list)
    #: staged buffer → how many times the stages that the author asked for exceed those that it got
    stages: dict[Any, int] = field(default_factory=dict)


def schedule(program: Any, depth: int = 1) -> Any:
    """The program at the scheduled level. ``depth`` bounds the stages of a ring (a loop's num_stages asks for at most that many)."""
    plan = Schedule()
    uses = _uses(program.func.body)

    def visit(loop: Any) -> Any:
        notes = loop.annotations or {}
        if str(notes.get("ts.kind", "")) != "pipelined" or int(notes.get("ts.num_stages", 0)) < 1:
            return loop
        return _ring(loop, plan, uses, depth)

    body = structural_map(program.func.body, (tirx.For, visit))
    body = _place_allocations(body, plan)

    def enter(s: Any) -> Any:
        if s.attr_key != "ts.kernel":
            return s
        role = tirx.AttrStmt(ir.StringImm(plan.roles[0]), "ts.role", tirx.IntImm("int32", 0), s.body, s.span)
        return tirx.AttrStmt(s.node, s.attr_key, s.value, role, s.span)

    done = program.with_body(structural_map(body, (tirx.AttrStmt, enter)))
    done.schedule = plan
    return done


def _touches(stmt: Any) -> set[Any]:
    """Buffers that a statement reads or writes."""
    found: set[Any] = set()
    structural_walk(stmt, ((ir.TensorRegion, ir.TensorLoad), lambda n: found.add(n.source)))
    structural_walk(stmt, (tirx.BufferStore, lambda s: found.add(s.buffer)))
    structural_walk(stmt, (tirx.DeclBuffer, lambda s: found.add(s.data.args[0])))
    return found


def _uses(body: Any) -> dict[Any, int]:
    """How many times each buffer appears in the whole kernel."""
    count: dict[Any, int] = {}

    def add(buffer: Any) -> None:
        count[buffer] = count.get(buffer, 0) + 1

    structural_walk(body, ((ir.TensorRegion, ir.TensorLoad), lambda n: add(n.source)))
    structural_walk(body, (tirx.BufferStore, lambda s: add(s.buffer)))
    structural_walk(body, (tirx.DeclBuffer, lambda s: add(s.data.args[0])))
    return count


def _filled(stmt: Any) -> Any:
    """The shared buffer that a statement fills whole from global memory by a local or remote copy; None for anything else."""
    if not isinstance(stmt, tirx.Evaluate) or base.find(stmt.value) is None or stmt.value.op.name != "ts.copy":
        return None
    call = stmt.value
    src, dst = call.args[:2]
    if str(call.attrs["side"]) == "dst" or dst.source.ty.storage_scope != "shared" or not src.source.ty.storage_scope.startswith("global"):
        return None
    shape = list(dst.source.ty.shape)
    whole = all(
        isinstance(r.min, tirx.IntImm) and r.min.value == 0 and isinstance(r.extent, tirx.IntImm) and int(r.extent.value) == int(e)
        for r, e in zip(dst.region, shape, strict=True)
    )
    return dst.source if whole else None


def _ring(loop: Any, plan: Schedule, uses: dict[Any, int], limit: int) -> Any:
    stmts = list(loop.body.seq) if isinstance(loop.body, tirx.SeqStmt) else [loop.body]
    inside = _uses(loop.body)
    fills: dict[Any, int] = {}
    for k, s in enumerate(stmts):
        buffer = _filled(s)
        # used in this loop alone, written once, and read by no statement before: the previous round's value is never wanted
        if buffer is not None and buffer not in fills and inside[buffer] == uses[buffer]:
            if not any(buffer in _touches(t) for t in stmts[:k]) and not any(_writes(t, buffer) for t in stmts[k + 1 :]):
                fills[buffer] = k
    if not fills:
        return loop
    first, last = min(fills.values()), max(fills.values())
    if any(fills.keys() & _touches(s) for s in stmts[first:last] if _filled(s) not in fills):
        return loop  # a reader stands between the copies: the stage would be committed too late for it
    asked = int(loop.annotations["ts.num_stages"])
    depth = min(limit, asked)
    number = len(plan.rings)
    plan.rings.append(Ring(number, depth, [b.name for b in fills]))
    counter = tirx.decl_buffer((1,), "int32", f"ring{number}", scope="local.var", data_alignment=64, layout=None)
    now = tirx.BufferLoad(counter, [tirx.IntImm("int32", 0)])
    stage = tirx.IntImm("int32", 0) if depth == 1 else tirx.floormod(now, tirx.IntImm("int32", depth))
    staged = {b: _staged(b, depth) for b in fills}
    plan.stages.update(dict.fromkeys(staged.values(), asked // depth))
    inner = [_in_stage(s, staged, stage) for s in stmts]
    body = [
        *inner[:first],
        token("acquire", number, now, loop.span),
        *inner[first : last + 1],
        token("commit", number, now, loop.span),
        token("wait", number, now, loop.span),
        *inner[last + 1 :],
        token("release", number, now, loop.span),
        tirx.BufferStore(counter, now + 1, [tirx.IntImm("int32", 0)], loop.span),
    ]
    made = tirx.For(
        loop.loop_var, loop.min, loop.extent, loop.kind, sequence(body), annotations=dict(loop.annotations), span=loop.span
    )
    _PENDING.append((counter, staged))
    return made


#: what `_ring` made and `_place_allocations` has yet to allocate; emptied within one run of the pass
_PENDING: list[tuple[Any, dict[Any, Any]]] = []


def _place_allocations(body: Any, plan: Schedule) -> Any:
    """Staged buffers are allocated where the plain ones were, counters at the head of the kernel."""
    pending, _PENDING[:] = list(_PENDING), []
    replaced = {old: new for _, staged in pending for old, new in staged.items()}
    body = structural_map(
        body,
        (tirx.AllocBuffer, lambda s: tirx.AllocBuffer(replaced[s.buffer], dict(s.annotations), s.span) if s.buffer in replaced else s),
    )
    zero = tirx.IntImm("int32", 0)
    heads: list[Any] = []
    for counter, _ in pending:
        heads += [tirx.AllocBuffer(counter, {}), tirx.BufferStore(counter, zero, [zero])]
    if not heads:
        return body

    def enter(s: Any) -> Any:
        innermost = s.attr_key == "thread_extent" and not (isinstance(s.body, tirx.AttrStmt) and s.body.attr_key == "thread_extent")
        return tirx.AttrStmt(s.node, s.attr_key, s.value, tirx.SeqStmt([*heads, s.body]), s.span) if innermost else s

    return structural_map(body, (tirx.AttrStmt, enter))


def _writes(stmt: Any, buffer: Any) -> bool:
    found: list[Any] = []

    def look(call: Any) -> None:
        op = base.find(call)
        if op is not None and any(a.region.source.same_as(buffer) and a.mode != "read" for a in op.effects(call)):
            found.append(call)

    structural_walk(stmt, (ir.Call, look))
    structural_walk(stmt, (tirx.BufferStore, lambda s: found.append(s) if s.buffer.same_as(buffer) else None))
    structural_walk(stmt, (tirx.DeclBuffer, lambda s: found.append(s) if s.data.args[0].same_as(buffer) else None))
    return bool(found)


def _staged(buffer: Any, depth: int) -> Any:
    dt = str(getattr(buffer.ty.dtype, "dtype", buffer.ty.dtype))
    return tirx.decl_buffer((depth, *buffer.ty.shape), dt, buffer.name, scope="shared", data_alignment=64, layout=None)


def _in_stage(stmt: Any, staged: dict[Any, Any], stage: Any) -> Any:
    """A statement with every access to a staged buffer directed to ``stage``."""
    if not staged.keys() & _touches(stmt):
        return stmt

    def region(r: Any) -> Any:
        new = staged.get(r.source)
        if new is None:
            return r
        return tirx.BufferRegion(new, [ir.Range.from_min_extent(stage, 1), *r.region])

    def load(e: Any) -> Any:
        new = staged.get(e.source)
        return e if new is None else tirx.BufferLoad(new, [stage, *e.indices])

    return structural_map(structural_map(stmt, (ir.TensorRegion, region)), (ir.TensorLoad, load))
