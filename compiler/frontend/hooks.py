"""What rewritten kernels call: one method a construct of Python. Python values keep Python's meaning; device
values become IR."""

from __future__ import annotations

import builtins
import types
from collections.abc import Callable, Iterator
from typing import Any

from tilescale.compiler.builder import state as bld
from tilescale.compiler.builder.constructs import UNBOUND, If, Loop, LoopNest, State, While, is_device, peek
from tilescale.compiler.builder.held import contents, held_parts, named
from tilescale.compiler.builder.poison import Poison
from tilescale.compiler.builder.values import (
    BINARY,
    Buffer,
    Variable,
    binary,
    compare,
    convert,
    dtype_of,
    negative,
    truth,
)
from tilescale.compiler.frontend import ranges, returns
from tilescale.compiler.ir import source
from tilescale.compiler.ir.scales import EXECUTORS
from tilescale.compiler.ops import reducer
from tilescale.compiler.ops.choices import apart, chain, one_of
from tilescale.compiler.tvm_compat import ir, is_expr, tirx
from tilescale.errors import TileSyntaxError, TileTypeError
from tilescale.language.symbolic import COMPARE, SymExpr, settle

_COMPARISONS = {"Lt": "<", "LtE": "<=", "Gt": ">", "GtE": ">=", "Eq": "==", "NotEq": "!="}


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What a name stands for, each with what it is called: a tuple's fields by their own names too."""
    if not isinstance(value, (tuple, list)):
        yield name, value
        return
    fields = getattr(value, "_fields", None)
    for k, held in enumerate(value):
        if fields is not None and isinstance(held, (tuple, list)):
            yield from _parts(f"{name}_{fields[k]}", held)
        else:
            yield (name if fields is None else f"{name}_{fields[k]}"), held


class Hooks:
    """The object that a rewritten kernel knows as ``__ts__``."""

    # -- if
    # -------------------------------------------------------------------------------------------------------
    def cond(self, test: Any, snapshot: dict[str, Callable[[], Any]]) -> If:
        return If(test, snapshot)

    def then(self, state: If) -> bool:
        if not state.device:
            return bool(state.test)
        b = bld.current()
        state.frame = b.push("if", device=True)
        b.open_body()
        return True

    def else_(self, state: If) -> bool:
        if not state.device:
            return not state.test
        b = bld.current()
        state.then_body = b.close_body()
        b.open_body()
        return True

    def endif(self, state: If) -> None:
        if not state.device:
            return
        b = bld.current()
        body = b.close_body()
        then, other = (body, None) if state.then_body is None else (state.then_body, body)
        assert state.frame is not None
        b.pop(state.frame)
        b.emit(tirx.IfThenElse(truth(state.test), then, other, b.span(state.loc)))

    # -- loops
    # ----------------------------------------------------------------------------------------------------
    def loop(
        self,
        iterable: Any,
        targets: tuple[str, ...],
        snapshot: dict[str, Callable[[], Any]],
        read: dict[str, Callable[[], Any]] | None,
        real: bool,
    ) -> Loop:
        """``read``: what a body of T's operations alone reads (frontend/ranges.py), which may be floats
        where it is ``real``; None of any other."""
        if is_device(iterable):
            raise TileTypeError(
                "a device value is not something to loop over",
                loc=source.current(),
                hint="for i in T.serial(n):",
            )
        inside = read is not None and isinstance(iterable, range) and bld.current().launch is not None
        if inside and ranges.is_loop(iterable, map(peek, (read or {}).values()), real, _is_ours):
            from tilescale.compiler.ops import loops

            iterable = loops.serial(iterable.start, iterable.stop, iterable.step)
        return Loop(iterable, targets, snapshot)

    def while_state(self, snapshot: dict[str, Callable[[], Any]], forever: bool) -> While:
        return While(snapshot, forever)

    def while_(self, state: While, test: Callable[[], Any]) -> bool:
        b = bld.current()
        if state.device:  # second visit: the body has been traced
            body = b.close_body()
            b.pop(state.frame)
            state.inside = False
            b.emit(tirx.While(state.test, body, b.span(state.loc)))
            return False
        if state.round_ends():
            return state.begin(tirx.const(True, "bool"))
        with b.body() as extra:
            value = test()
        if not is_device(value):
            b.bodies[-1].extend(extra)
            if value:
                state.begin_round()
            return bool(value)
        if extra:
            raise TileSyntaxError(
                "the condition of a device while does more than compute a value",
                loc=state.loc,
                hint="compute it in the body into a T.alloc_var and test that",
            )
        return state.begin(truth(value))

    def endwhile(self, state: While) -> None:
        if not state.device:
            state.round_ends()

    def poison(self, name: str, thunk: Callable[[], Any], state: State) -> Any:
        """What a name rebound under a device construct stands for outside its body: refused, unless nothing
        changed.

        In a loop this runs first at the body's entry (the value of the last round is not known when it is
        traced), then behind it.
        """
        now, before = peek(thunk), state.before.get(name, UNBOUND)
        if isinstance(now, Variable) and now is before:
            return now  # assigning to it is a store
        if not state.inside:
            if isinstance(now, Poison) and now.state is state:
                return before if before is not UNBOUND else now  # the body never rebound it after all
            if now is before and now is not UNBOUND:
                return now
        around = next((v.instead for v in (now, before) if isinstance(v, Poison)), "")
        values = [v for v in (now, before) if v is not UNBOUND and not isinstance(v, Poison)]
        instead = around if around and not values else _instead(name, values)
        return Poison(name, state.loc, state.what, state, instead)

    def break_(self) -> bool:
        return self._leave("break", tirx.Break)

    def continue_(self) -> bool:
        return self._leave("continue", tirx.Continue)

    def _leave(self, word: str, make: Any) -> bool:
        b = bld.current()
        inside_if = False
        for frame in reversed(b.frames):
            if frame.kind == "forever" and (inside_if or frame.state.jumps):
                frame.state.jumps = True
                b.emit(make(b.span()))
                return False
            if frame.kind in ("pyfor", "pywhile", "forever"):
                if inside_if:
                    raise TileSyntaxError(
                        f"{word} leaves a Python loop on a device condition",
                        loc=source.current(),
                        hint="loop with T.serial instead",
                    )
                return True
            if frame.kind in ("parallel", "pipelined", "vectorized", "unroll"):
                raise TileSyntaxError(
                    f"{word} has no meaning in "
                    f"T.{frame.kind.capitalize() if frame.kind in ('parallel', 'pipelined') else frame.kind}",
                    loc=source.current(),
                    hint="an `if` around the rest of the body, or T.serial",
                )
            if frame.device and frame.kind != "if":
                b.emit(make(b.span()))
                return False
            inside_if = inside_if or frame.device
        return True

    # -- with, functions
    # ------------------------------------------------------------------------------------------
    def with_state(self, snapshot: dict[str, Callable[[], Any]]) -> State:
        state = State("T.Scale of a team", snapshot, True)
        state.device = False  # decided by what is opened
        return state

    def with_(self, manager: Any, names: tuple[str, ...], state: State) -> Any:
        state.device = state.device or getattr(manager, "conditional", False)
        if hasattr(manager, "name_targets"):
            manager.name_targets(names)
        return manager

    def enter(self) -> bld.Entry:
        return bld.current().enter()

    def leaves(self, entry: bld.Entry, gives: bool) -> bool:
        """A ``return``: whether Python's. One under a device construct leaves out the rest of the kernel
        (returns.py).

        Raises:
            TileSyntaxError: it depends on a device value and gives something, or returns from a macro, or
                stands where some of a block's threads would go on alone.
        """
        b = bld.current()
        opened = b.frames[entry.frames :]
        if b.device_depth() == entry.depth and not any(f.kind == "forever" and f.state.jumps for f in opened):
            for frame in reversed(opened):
                if frame.state is not None:
                    frame.state.leave()
            return True
        if gives or not entry.kernel or b.launch is None:
            what = (
                "it gives a value"
                if gives
                else "it leaves a helper"
                if not entry.kernel
                else "it stands outside T.Kernel"
            )
            raise TileSyntaxError(
                "return depends on a device value",
                loc=source.current(),
                expected=f"a plain return of the kernel in T.Kernel; {what}",
                hint="assign to a T.alloc_var and return it at the end",
            )
        self.leave(opened, "return")
        return False

    @staticmethod
    def leave(opened: list[bld.Frame], word: str) -> None:
        """The block leaves out the rest of the kernel, out of the frames that are open.

        Raises:
            TileSyntaxError: it stands where some of a block's threads would go on alone.
        """
        for frame in opened:
            below = frame.kind == "scale" and frame.detail in EXECUTORS and frame.detail != "block"
            if below or frame.kind in ("parallel", "pipelined", "vectorized", "unroll"):
                where = (
                    f'T.Scale("{frame.detail}")'
                    if below
                    else f"T.{frame.kind.capitalize() if frame.kind[0] == 'p' else frame.kind}"
                )
                raise TileSyntaxError(
                    f"{word} in {where}, where a part of the block would leave and the rest go on",
                    loc=source.current(),
                    expected=f"{word} at the scale of the block, in T.serial or `while` loops at most",
                    hint="an `if` around what is left out",
                )
            if frame.kind == "forever":
                frame.state.jumps = True
        returns.mark(bld.current())

    def assert_(self, test: Any, message: Callable[[], Any]) -> None:
        if is_device(test):
            from tilescale.compiler.ops.assertion import device_assert

            device_assert(test, str(message()))
        elif not test:
            raise AssertionError(message())

    # -- assignments
    # ----------------------------------------------------------------------------------------------
    def bind(self, name: str, value: Any, thunk: Callable[[], Any]) -> Any:
        """``name = value``: stores into a variable, or names a device scalar so that it is computed once,
        here."""
        now, b = peek(thunk), bld.current()
        made_here = isinstance(value, Buffer) and value.var in b.unnamed  # an allocation takes the name over
        if isinstance(now, Variable) and not isinstance(value, Variable) and not made_here:
            now.store(value)
            return now
        if (
            isinstance(value, Variable)
            and isinstance(now, Variable)
            and value is not now
            and now.name != value.name
        ):
            now.store(value)
            return now
        if isinstance(value, SymExpr):
            return value
        if hasattr(value, "asobject"):
            value = value.asobject()
        if is_expr(value):
            if isinstance(value, (tirx.IntImm, tirx.FloatImm)) or isinstance(value, ir.Var):
                return value
            return named(value, name)
        value = held_parts(value, name)
        for called, held in _parts(name, value):
            buffer = held.buffer if isinstance(held, Variable) else held
            if isinstance(buffer, Buffer) and buffer.var in b.unnamed:
                b.give_name(buffer, called)
        return value

    def contents(self, value: Any, name: str) -> Any:
        """``value``, written as a name, where it becomes another name's: what a cell holds now."""
        return contents(value, name)

    def now(self, value: Any, name: str, thunk: Callable[[], Any] | None = None) -> Any:
        """A value that is kept before something else is written: in a tuple, a list, or for one of several
        targets, whose ``thunk`` is what the target stands for."""
        if (
            thunk is not None
            and isinstance(value, Variable)
            and isinstance(before := peek(thunk), Variable)
            and before is not value
        ):
            return contents(value, name)
        return held_parts(value, name)

    def declare(self, name: str, annotation: Any, value: Any, thunk: Callable[[], Any]) -> Any:
        """``A: T.Tensor(…)`` in an eager kernel, and ``x: T.int32 = …``."""
        from tilescale.compiler.frontend.trace import declare_parameter
        from tilescale.language.annotations import TensorSpec
        from tilescale.language.dtypes import canonical

        if isinstance(annotation, TensorSpec):
            return declare_parameter(name, annotation, peek(thunk))
        if value is None:
            raise TileSyntaxError(f"{name} is annotated and has no value", loc=source.current())
        given = value()
        if is_device(given):
            return self.bind(name, convert(given, canonical(annotation)), thunk)
        return given

    def store(self, target: Any, index: Any, value: Any) -> None:
        if isinstance(target, Buffer) and target.reducer:
            added = reducer.added(target, index, value, target.reducer)
            if added is not None:
                reducer.update(target, index, reducer.OPS[target.reducer], added)
                return
        elif isinstance(target, Buffer) and reducer.implied(target, index, value):
            return
        target[index] = value

    def aug(self, name: str, op: str, thunk: Callable[[], Any], value: Any) -> Any:
        now = thunk()
        if isinstance(now, Variable):
            now.store(binary(op, now, value))
            return now
        if is_device(now) or is_device(value):
            return self.bind(name, binary(op, now, value), thunk)
        return _PY_AUG[op](now, value)

    def aug_store(self, target: Any, index: Any, op: str, value: Any) -> None:
        if isinstance(target, Buffer) and target.reducer:
            reducer.update(target, index, op, value)
        elif isinstance(target, Buffer) and reducer.implied(target, index, value, op):
            return
        elif isinstance(target, (Buffer, Variable)):
            target[index] = binary(op, target[index], value)
        else:
            target[index] = _PY_AUG[op](target[index], value)

    def slice_(self, low: Any, high: Any, step: Any) -> slice:
        return slice(low, high, step)

    # -- expressions
    # ----------------------------------------------------------------------------------------------
    def and_(self, *thunks: Callable[[], Any]) -> Any:
        return chain(thunks, tirx.And, stop_on=False)

    def or_(self, *thunks: Callable[[], Any]) -> Any:
        return chain(thunks, tirx.Or, stop_on=True)

    def either_and(self, *thunks: Callable[[], Any]) -> Any:
        """``and`` where its value is asked for."""
        return chain(thunks, tirx.And, stop_on=False, values=True)

    def either_or(self, *thunks: Callable[[], Any]) -> Any:
        return chain(thunks, tirx.Or, stop_on=True, values=True)

    def binop(self, op: str, a: Any, b: Any) -> Any:
        """``a op b``: Python's own, unless one side is IR."""
        if _in_ir(a) or _in_ir(b):
            return binary(op, a, b)
        return BINARY[op](a, b)

    def neg(self, value: Any) -> Any:
        return negative(value) if _in_ir(value) else -value

    def not_(self, value: Any) -> Any:
        return tirx.Not(truth(value)) if is_device(value) else not value

    def cmp(self, ops: tuple[str, ...], left: Any, *rights: Callable[[], Any]) -> Any:
        """A chain ``a < b <= c``: each operand is evaluated once, and not at all behind a Python False."""
        result: Any = True
        for op, thunk in zip(ops, rights, strict=True):
            right = thunk()
            if op not in _COMPARISONS:
                value = _PY_MEMBERSHIP[op](left, right)
            elif is_device(left) or is_device(right):
                value = compare(_COMPARISONS[op], left, right)
            elif isinstance(left, Poison) or isinstance(right, Poison):
                value = (left if isinstance(left, Poison) else right).refuse()
            else:
                value = COMPARE[_COMPARISONS[op]](left, right)
            if is_device(value):
                result = value if result is True else tirx.And(truth(result), truth(value))
            elif not value:
                return value
            left = right
        return result

    def ifexp(self, test: Any, a: Callable[[], Any], b: Callable[[], Any]) -> Any:
        if not is_device(test):
            return a() if test else b()
        from tilescale.compiler.ops.math import if_then_else

        (x, first), (y, second) = apart(a), apart(b)
        return one_of(test, (first, x), (second, y)) if first or second else if_then_else(test, x, y)

    def builtin(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """``range``, ``min``, ``abs`` … over device values; Python's own where nothing is on the device or
        the name is rebound."""
        name = getattr(func, "__name__", "")
        device = any(is_device(a) for a in args)
        own: Any = getattr(builtins, name, None)
        if own is not func or not device:
            return func(*(settle(a) for a in args), **kwargs) if name == "range" else func(*args, **kwargs)
        from tilescale.compiler.ops import loops, math

        if name == "range":
            return loops.serial(*args)
        if name in ("min", "max"):
            out = args[0]
            for other in args[1:]:
                out = binary(name, out, other)
            return out
        if name in ("int", "float", "bool"):
            return math.cast(args[0], {"int": "int32", "float": "float32", "bool": "bool"}[name])
        if name == "divmod":
            return binary("//", *args), binary("%", *args)
        if name in ("abs", "round", "pow"):
            return getattr(math, name)(*args)
        if name == "print":
            from tilescale.compiler.ops import print as printing

            for a in args:
                printing.print(a)
            return None
        return func(*args, **kwargs)


def _instead(name: str, values: list[Any]) -> str:
    """What to write where a name would stand for one thing or another, depending on device values."""
    tile = next((v for v in values if isinstance(v, Buffer)), None)
    if tile is not None:  # which of two tiles it is has to be an index
        alloc = "T.alloc_fragment" if tile.scope.startswith("local") else "T.alloc_shared"
        shape = ", ".join(map(str, (2, *tile.shape)))
        return (
            f'one allocation, tiles = {alloc}(({shape}), "{tile.dtype}"), and tiles[k % 2, …] for the '
            "tile of round k"
        )
    scalar = next((v for v in values if isinstance(v, (bool, int, float)) or is_device(v)), 0)
    return f'{name} = T.alloc_var("{dtype_of(scalar)}") before it; then assign to it inside and read it here'


def _is_ours(value: Any) -> bool:
    """Whether a value is the device's, a tile, a tensor or a dtype, or T itself."""
    module = getattr(value, "__name__", "") if isinstance(value, types.ModuleType) else ""
    return is_device(value) or isinstance(value, (Buffer, Variable)) or module == "tilescale.language"


def _in_ir(value: Any) -> bool:
    return is_device(value) and not isinstance(value, SymExpr)


def _among(value: Any, items: Any) -> Any:
    """``value in items``: where a device value is among them, whether it equals any of those that Python has
    in a tuple, list, set, dict or range.

    Raises:
        TileTypeError: a device value in anything else.
    """
    if not is_device(value) and not (isinstance(items, (tuple, list)) and any(map(is_device, items))):
        return value in items
    if not isinstance(items, (tuple, list, set, frozenset, dict, range)):
        what = f"a device value in {type(items).__name__}"
        raise TileTypeError(
            what,
            loc=source.current(),
            expected="a tuple, list, set, dict or range of values",
            hint="x == a or x == b",
        )
    if isinstance(items, range) and items.step == 1:
        return tirx.And(truth(compare(">=", value, items.start)), truth(compare("<", value, items.stop)))
    found: Any = False
    for item in items:
        same = compare("==", value, item) if is_device(value) or is_device(item) else value == item
        found = same if found is False else tirx.Or(truth(found), truth(same))
    return found


_PY_MEMBERSHIP: dict[str, Callable[[Any, Any], Any]] = {
    "Is": lambda a, b: a is b,
    "IsNot": lambda a, b: a is not b,
    "In": lambda a, b: _among(a, b),
    "NotIn": lambda a, b: Hooks().not_(_among(a, b)),
}


def _iadd(op: str) -> Callable[[Any, Any], Any]:
    import operator

    name = {
        "+": "iadd",
        "-": "isub",
        "*": "imul",
        "/": "itruediv",
        "//": "ifloordiv",
        "%": "imod",
        "**": "ipow",
        "<<": "ilshift",
        ">>": "irshift",
        "&": "iand",
        "|": "ior",
        "^": "ixor",
        "@": "imatmul",
    }[op]
    found: Callable[[Any, Any], Any] = getattr(operator, name)
    return found


_PY_AUG = {op: _iadd(op) for op in ("+", "-", "*", "/", "//", "%", "**", "<<", ">>", "&", "|", "^", "@")}

__all__ = ["Hooks", "LoopNest", "dtype_of", "is_device"]
