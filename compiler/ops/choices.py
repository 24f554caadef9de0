"""Statements that run only where a device value says so, inside an expression: `and`, `or`, `a if c else
b`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilescale.compiler.builder import state as bld
from tilescale.compiler.builder.constructs import is_device
from tilescale.compiler.builder.held import held, named
from tilescale.compiler.builder.values import dtype_of, to_expr, truth
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.tvm_compat import ir, structural_walk, tirx


def chain(thunks: tuple[Callable[[], Any], ...], join: Any, *, stop_on: bool, values: bool = False) -> Any:
    """``and`` / ``or``: short-circuit for Python values; device values become one expression, or statements
    where an operand needs some. Behind Python values alone the last operand is the result as it is, as in
    Python: ``0 or n`` is n. ``values``: the result is no condition alone, so behind device values, too, it
    is one of the operands, ``n or 1`` either n or 1; of conditions it is one."""
    value: Any = None
    for k, thunk in enumerate(thunks, 1):
        decided = is_device(value)
        x, stmts = apart(thunk) if decided else (thunk(), [])
        if values and decided and not (_holds(value) and _holds(x)):
            value = _operand(value, x, stmts, stop_on)
            if not is_device(x) and bool(x) is stop_on:
                return value
        elif stmts:
            decided_by: tuple[list[Any], Any] = ([], tirx.const(stop_on, "bool"))
            either = [decided_by, (stmts, truth(x))] if stop_on else [(stmts, truth(x)), decided_by]
            value = one_of(value, *either)
        elif is_device(x):
            if not decided and (values or k == len(thunks)):
                value = x
            else:
                x = truth(x)
                value = join(truth(value), x) if decided else x
        else:
            if bool(x) is stop_on:
                return x if not decided else tirx.const(stop_on, "bool")
            value = value if decided else x
    return value


def _holds(x: Any) -> bool:
    """Whether a value is a condition, or what nothing but a condition can be made of, and no number."""
    return isinstance(x, bool) or not (is_device(x) or isinstance(x, (int, float))) or dtype_of(x) == "bool"


def _operand(value: Any, x: Any, stmts: list[Any], stop_on: bool) -> Any:
    """``value`` where it decides, else ``x``, for which ``stmts`` must run."""
    from tilescale.compiler.ops.math import if_then_else

    value = named(value, "decides") if acts(to_expr(value)) else held(value, "decides")
    if stmts:
        sides: tuple[Any, Any] = (([], value), (stmts, x))
        return one_of(value, *(sides if stop_on else sides[::-1]))
    return if_then_else(truth(value), *((value, x) if stop_on else (x, value)))


def apart(thunk: Callable[[], Any]) -> tuple[Any, list[Any]]:
    """A value, and the statements that must run for it to be there: those that do more than name values,
    which may stand anywhere."""
    with bld.current().body() as stmts:
        value = thunk()
    if all(isinstance(s, tirx.Bind) and not acts(s.value) for s in stmts):
        bld.current().bodies[-1].extend(stmts)
        return value, []
    return value, stmts


def one_of(test: Any, a: tuple[list[Any], Any], b: tuple[list[Any], Any]) -> Any:
    """``a if test else b`` where the statements of one run only if it is chosen."""
    from tilescale.compiler.ops.alloc import alloc_var
    from tilescale.compiler.ops.math import alike

    values = alike(a[1], b[1])
    cell, builder = alloc_var(str(values[0].ty)), bld.current()
    builder.give_name(cell.buffer, "chosen")
    sides = []
    for (stmts, _), value in zip((a, b), values, strict=True):
        with builder.body() as body:
            body.extend(stmts)
            cell.store(value)
        sides.append(sequence(body))
    builder.emit(tirx.IfThenElse(truth(test), *sides, builder.span()))
    return cell.load()


def acts(value: Any) -> bool:
    """Whether an expression has an operation of the language in it, as what ``T.atomic_load`` gives."""
    from tilescale.compiler.ir.operations import find

    found: list[Any] = []
    structural_walk(value, (ir.Call, lambda call: found.append(call) if find(call) is not None else None))
    return bool(found)


def only_if(test: Any, body: Callable[[], None]) -> None:
    """``if test: body()``, where the test may be a device value."""
    if not is_device(test):
        if test:
            body()
        return
    b = bld.current()
    with b.body() as stmts:
        body()
    b.emit(tirx.IfThenElse(truth(test), sequence(stmts), None, b.span()))
