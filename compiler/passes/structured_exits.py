"""``break`` and ``continue`` of device loops become flags: neither LLVM's printer nor a warp-specialised
schedule knows jumps.

A loop that breaks turns into a while whose condition asks the flag; what follows a statement that may set a
flag is guarded by it.
"""

from __future__ import annotations

from typing import Any

from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.tvm_compat import structural_map, structural_walk, tirx

ZERO, ONE = tirx.IntImm("int32", 0), tirx.IntImm("int32", 1)


def structured_exits(program: TileProgram) -> TileProgram:
    """Removes every Break and Continue, innermost loops first."""
    if not _exits(program.func.body):
        return program
    body = structural_map(program.func.body, ((tirx.For, tirx.While), _loop))
    return program.with_body(body)


def _exits(s: Any) -> list[Any]:
    found: list[Any] = []
    structural_walk(s, ((tirx.Break, tirx.Continue), found.append))
    return found


def _flag(name: str) -> Any:
    return tirx.decl_buffer((1,), "int32", name, scope="local.var", data_alignment=64, layout=None)


def _get(flag: Any) -> Any:
    return tirx.BufferLoad(flag, [ZERO])


def _set(flag: Any, value: Any, span: Any = None) -> Any:
    return tirx.BufferStore(flag, value, [ZERO], span)


def _loop(loop: Any) -> Any:
    """Inner loops were mapped before, so that what is left in the body leaves this one."""
    exits = _exits(loop.body)
    if not exits:
        return loop
    skip, stop = _flag("skip"), _flag("stop")
    breaks = any(isinstance(e, tirx.Break) for e in exits)
    body = sequence([_set(skip, ZERO), _guarded(loop.body, skip, stop)])
    head = [tirx.AllocBuffer(skip, {}), tirx.AllocBuffer(stop, {}), _set(stop, ZERO)]
    if isinstance(loop, tirx.While):
        condition = tirx.And(tirx.EQ(_get(stop), ZERO), loop.condition)
        return sequence([*head, tirx.While(condition, body, loop.span)])
    if not breaks:
        same = tirx.For(
            loop.loop_var,
            loop.min,
            loop.extent,
            loop.kind,
            body,
            annotations=dict(loop.annotations),
            span=loop.span,
        )
        return sequence([*head, same])
    count = _flag(loop.loop_var.name + "_at")
    index = tirx.Bind(
        loop.loop_var,
        _get(count) if str(loop.loop_var.ty) == "int32" else tirx.Cast(loop.loop_var.ty, _get(count)),
    )
    condition = tirx.And(tirx.EQ(_get(stop), ZERO), _get(count) < loop.extent)
    step = _set(count, _get(count) + ONE)
    whole = tirx.While(condition, sequence([index, body, step]), loop.span)
    return sequence([*head, tirx.AllocBuffer(count, {}), _set(count, ZERO), whole])


def _guarded(s: Any, skip: Any, stop: Any) -> Any:
    """A statement whose exits set the flags, and whose rest runs only while ``skip`` is zero."""
    if isinstance(s, tirx.Break):
        return sequence([_set(stop, ONE, s.span), _set(skip, ONE, s.span)])
    if isinstance(s, tirx.Continue):
        return _set(skip, ONE, s.span)
    if not _exits(s):
        return s
    if isinstance(s, tirx.SeqStmt):
        stmts = list(s.seq)
        for k, inner in enumerate(stmts):
            if _exits(inner):
                rest = stmts[k + 1 :]
                done = [*stmts[:k], _guarded(inner, skip, stop)]
                if rest:
                    remaining = _guarded(sequence(rest), skip, stop)
                    done.append(tirx.IfThenElse(tirx.EQ(_get(skip), ZERO), remaining, None))
                return sequence(done)
    if isinstance(s, tirx.IfThenElse):
        other = None if s.else_case is None else _guarded(s.else_case, skip, stop)
        return tirx.IfThenElse(s.condition, _guarded(s.then_case, skip, stop), other, s.span)
    if isinstance(s, tirx.AttrStmt):
        return tirx.AttrStmt(s.node, s.attr_key, s.value, _guarded(s.body, skip, stop), s.span)
    return s
