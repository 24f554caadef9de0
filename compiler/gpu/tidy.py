"""Takes out of thread IR what nobody uses: bindings and registers that the lowering made before it knew."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.tvm_compat import EXTERN_CALLS, ir, structural_walk, tirx


def tidied(body: Any) -> Any:
    """``body`` without pure bindings that are never read, without registers that are only written, until none
    is left."""
    while True:
        used, bindings = _counted(body, ir.Var), list[Any]()
        structural_walk(body, (tirx.Bind, bindings.append))
        used.subtract({hash(s.var): _DEFINITION for s in bindings})
        names = {s.var for s in bindings if used[hash(s.var)] <= 0 and _pure(s.value)}
        buffers = _only_written(body)
        if not names and not buffers:
            return body
        body = _without(body, names, buffers)


def _counted(root: Any, kind: Any) -> Counter[int]:
    """How often each node of a kind stands in ``root``, by address: an expression's == makes another one."""
    nodes: list[Any] = []
    structural_walk(root, (kind, nodes.append))
    return Counter(map(hash, nodes))


def _definition_count() -> int:
    var = tirx.Var("probe", "int32")
    seen: list[Any] = []
    structural_walk(tirx.Bind(var, tirx.IntImm("int32", 0)), (ir.Var, seen.append))
    return len(seen)


_DEFINITION = _definition_count()


def _pure(value: Any) -> bool:
    found: list[Any] = []
    structural_walk(value, (ir.Call, lambda c: found.append(c) if c.op.name in EXTERN_CALLS else None))
    return not found


def _only_written(body: Any) -> set[Any]:
    """Registers that nothing but stores to themselves ever loads, all of whose stored values are pure."""
    made: set[Any] = set()
    loads: Counter[int] = Counter()  # by the buffer's address
    kept: set[Any] = set()

    def count(e: Any) -> None:
        loads[hash(e.source)] += 1

    def store(s: Any) -> None:
        if not _pure(s.value):
            kept.add(s.buffer)
        mine = hash(s.buffer)

        def own(e: Any) -> None:
            if hash(e.source) == mine:
                loads[mine] -= 1

        structural_walk(s.value, (ir.TensorLoad, own))

    structural_walk(
        body,
        (
            tirx.AllocBuffer,
            lambda s: made.add(s.buffer) if s.buffer.ty.storage_scope.startswith("local") else None,
        ),
    )
    structural_walk(body, (ir.TensorLoad, count))
    structural_walk(body, (tirx.BufferStore, store))
    # Read under another name.
    structural_walk(body, (tirx.DeclBuffer, lambda s: structural_walk(s.data, (ir.Var, kept.add))))
    return {b for b in made if loads[hash(b)] == 0} - kept


def _without(s: Any, names: set[Any], buffers: set[Any]) -> Any:
    """The statement without some bindings and buffers; what is empty then goes too."""
    if isinstance(s, tirx.SeqStmt):
        return sequence([t for x in s.seq if not _nothing(t := _without(x, names, buffers))])
    if isinstance(s, tirx.Bind) and s.var in names:
        return sequence([])
    if isinstance(s, (tirx.AllocBuffer, tirx.BufferStore)) and s.buffer in buffers:
        return sequence([])
    if isinstance(s, tirx.For):
        notes = dict(s.annotations) if s.annotations else {}
        inner = _without(s.body, names, buffers)
        return (
            inner
            if _nothing(inner)
            else tirx.For(s.loop_var, s.min, s.extent, s.kind, inner, annotations=notes, span=s.span)
        )
    if isinstance(s, tirx.While):
        return tirx.While(s.condition, _without(s.body, names, buffers), s.span)
    if isinstance(s, tirx.IfThenElse):
        then = _without(s.then_case, names, buffers)
        other = None if s.else_case is None else _without(s.else_case, names, buffers)
        other = None if other is not None and _nothing(other) else other
        empty = _nothing(then) and other is None and _pure(s.condition)
        return sequence([]) if empty else tirx.IfThenElse(s.condition, then, other, s.span)
    if isinstance(s, tirx.AttrStmt):
        return tirx.AttrStmt(s.node, s.attr_key, s.value, _without(s.body, names, buffers), s.span)
    return s


def _nothing(s: Any) -> bool:
    return isinstance(s, tirx.Evaluate) and isinstance(s.value, tirx.IntImm)
