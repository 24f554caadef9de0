"""Where copies to other ranks end that TMA makes beside their executor (``T.copy(tile, B[…], dst=rank,
prefer_instruction="tma", blocking=False)``): in front of whatever others may hear of them by, at the end of
the T.Scale whose executors make them, and at the kernel's end. There stands ``ts.await_rows`` from here
on."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.ir.operations import name_of, operations
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.ops.peer_rows import awaited
from tilescale.compiler.passes.roles import below, releases
from tilescale.compiler.tvm_compat import structural_map, structural_walk, tirx

#: what tells the block's other threads, who may tell others
MEETINGS = ("sync_threads", "arrive_threads", "block_vote", "mbarrier_arrive", "thread_copies_arrive")


def await_rows(program: TileProgram) -> TileProgram:
    """The program with the ends of such copies."""
    found: list[Any] = []
    structural_walk(
        program.func.body, (tirx.Evaluate, lambda s: found.append(s) if is_late(s.value) else None)
    )
    return program.with_body(_visit(program.func.body, "")) if found else program


def is_late(call: Any) -> bool:
    """Whether a call is such a copy."""
    return str(getattr(getattr(call, "op", None), "name", "")) == "ts.remote_copy" and "late" in call.attrs


def _visit(s: Any, own: str) -> Any:
    """A statement. ``own``: the executors that run it, where they have such copies under way; else ""."""
    if isinstance(s, tirx.SeqStmt):
        return sequence([_visit(x, own) for x in s.seq])
    if isinstance(s, tirx.AttrStmt):
        return _scope(s, own)
    if isinstance(s, tirx.For) and s.kind not in (tirx.ForKind.PARALLEL, tirx.ForKind.VECTORIZED):
        return tirx.For(
            s.loop_var,
            s.min,
            s.extent,
            s.kind,
            _visit(s.body, own),
            annotations=dict(s.annotations or {}),
            span=s.span,
        )
    if isinstance(s, tirx.While):
        body = _visit(s.body, own)
        if not own or not _tells(s.condition):
            return tirx.While(s.condition, body, s.span)
        end = awaited(own, s.span)
        return sequence([end, tirx.While(s.condition, sequence([body, end]), s.span)])
    if isinstance(s, tirx.IfThenElse):
        other = None if s.else_case is None else _visit(s.else_case, own)
        made = tirx.IfThenElse(s.condition, _visit(s.then_case, own), other, s.span)
        return sequence([awaited(own, s.span), made]) if own and _tells(s.condition) else made
    return sequence([awaited(own, s.span), s]) if own and _tells(s) else s


def _scope(s: Any, own: str) -> Any:
    name = below(s)
    innermost = s.attr_key == "thread_extent" and not (
        isinstance(s.body, tirx.AttrStmt) and s.body.attr_key == "thread_extent"
    )
    if not name and not innermost:
        return tirx.AttrStmt(s.node, s.attr_key, s.value, _visit(s.body, own), s.span)
    mine = (name or "block") if _has(s.body) else ""
    inner = _visit(s.body, mine)
    if mine:
        inner = sequence([inner, awaited(mine, s.span)])
    made = tirx.AttrStmt(s.node, s.attr_key, s.value, inner, s.span)
    return sequence([awaited(own, s.span), made]) if own and _tells(s.body) else made


def _has(s: Any) -> bool:
    """Whether a statement has such copies of its own executors, not of parts of them."""
    if below(s):
        return False
    if isinstance(s, tirx.SeqStmt):
        return any(_has(x) for x in s.seq)
    if isinstance(s, tirx.IfThenElse):
        return _has(s.then_case) or (s.else_case is not None and _has(s.else_case))
    if isinstance(s, (tirx.AttrStmt, tirx.For, tirx.While)):
        return _has(s.body)
    return isinstance(s, tirx.Evaluate) and is_late(s.value)


def _tells(s: Any) -> bool:
    """Whether others may hear from a statement, or from an expression."""
    return releases(s) or any(op.name in MEETINGS for _, op in operations(s))


def without(s: Any) -> Any:
    """A body in which no such copy is left."""
    nothing = tirx.Evaluate(tirx.IntImm("int32", 0))
    return structural_map(s, (tirx.Evaluate, lambda x: nothing if name_of(x) == "await_rows" else x))
