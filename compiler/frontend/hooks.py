"""What rewritten kernels call: one method a construct of Python. Python values keep Python's meaning; device values become IR."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from typing import Any

from tilescale.compiler.frontend import builder as bld
from tilescale.compiler.frontend import source
from tilescale.compiler.frontend.values import (
    BINARY,
    Buffer,
    Poison,
    Variable,
    as_expr,
    binary,
    compare,
    convert,
    dtype_of,
    negative,
    to_expr,
)
from tilescale.compiler.tvm_compat import ir, is_expr, tirx
from tilescale.errors import TileSyntaxError, TileTypeError
from tilescale.language.symbolic import COMPARE, SymExpr, settle

_COMPARISONS = {"Lt": "<", "LtE": "<=", "Gt": ">", "GtE": ">=", "Eq": "==", "NotEq": "!="}
_UNBOUND = object()
_UNBOUND_ERRORS = (NameError, UnboundLocalError)


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


def _peek(thunk: Callable[[], Any]) -> Any:
    """The present value of a name, or ``_UNBOUND``."""
    try:
        return thunk()
    except _UNBOUND_ERRORS:
        return _UNBOUND


def is_device(value: Any) -> bool:
    """Whether a value is only known when the kernel runs."""
    if isinstance(value, SymExpr):
        return not isinstance(settle(value), int)
    return is_expr(value) or isinstance(value, Variable) or hasattr(value, "asobject")


class State:
    """An ``if``, ``for`` or ``while`` under way. ``device`` decides whether names rebound in it are poisoned."""

    def __init__(self, what: str, snapshot: dict[str, Callable[[], Any]], device: bool):
        self.what, self.device = what, device
        self.before = {name: _peek(thunk) for name, thunk in snapshot.items()} if device else {}
        self.inside = False
        self.loc = source.current()


class _If(State):
    def __init__(self, test: Any, snapshot: dict[str, Callable[[], Any]]):
        device = is_device(test)
        super().__init__("if", snapshot, device)
        self.test = to_expr(test) if device else bool(test)
        self.frame: bld.Frame | None = None
        self.then_body: Any = None
        self.else_body: Any = None


class _Loop(State):
    """A ``for``: iterating it runs the body, once for a device loop."""

    def __init__(self, iterable: Any, targets: tuple[str, ...], snapshot: dict[str, Callable[[], Any]]):
        self.nest = isinstance(iterable, LoopNest)
        super().__init__("for", snapshot, self.nest)
        self.iterable, self.targets = iterable, targets

    def __iter__(self) -> Iterator[Any]:
        b = bld.current()
        if not self.nest:
            frame = b.push("pyfor", device=False)
            try:
                yield from self.iterable
            finally:  # break and return close this generator
                if b.frames and b.frames[-1] is frame:
                    b.pop(frame)
            return
        self.inside = True
        yield from self.iterable.trace(self.targets)
        self.inside = False


class LoopNest:
    """What ``T.serial`` and its kin return. ``kind``: serial, parallel, pipelined, persistent, unroll, vectorized."""

    def __init__(self, kind: str, ranges: list[tuple[Any, Any, Any]], annotations: dict[str, Any] | None = None, wrap: Any = None):
        self.kind, self.ranges, self.annotations, self.wrap = kind, ranges, annotations or {}, wrap
        self.loc = source.current()

    def __iter__(self) -> Iterator[Any]:
        raise TileSyntaxError(
            f"T.{self.kind} is used outside a `for` of a kernel", loc=source.current(), hint=f"for i in T.{self.kind}(…):"
        )

    def trace(self, targets: tuple[str, ...]) -> Iterator[Any]:
        b = bld.current()
        names = list(targets) if len(targets) == len(self.ranges) else [f"i{k}" for k in range(len(self.ranges))]
        variables = []
        for name, (low, high, _) in zip(names, self.ranges, strict=True):
            wide = any(is_expr(x) and str(x.ty) == "int64" for x in (low, high))
            variables.append(tirx.Var(b.unique(name), "int64" if wide else "int32"))
        span = b.span(self.loc)
        frame = b.push(self.kind, device=True)
        with b.body() as body:
            value = self.wrap(variables) if self.wrap else tuple(variables) if len(variables) > 1 else variables[0]
            self._check_names(targets, len(value) if isinstance(value, tuple) else 1)
            yield value
        b.pop(frame)
        b.emit(self._stmt(variables, bld.sequence(body), span))

    def _check_names(self, targets: tuple[str, ...], count: int) -> None:
        """One name takes all indices; more are one each.

        Raises:
            TileSyntaxError: more or fewer names than indices.
        """
        if len(targets) > 1 and len(targets) != count:
            names = [*targets, *(f"i{k}" for k in range(len(targets), count))][:count]
            what = f"T.{self.kind.capitalize() if self.kind in ('parallel', 'pipelined', 'persistent') else self.kind}"
            indices = "1 index" if count == 1 else f"{count} indices"
            raise TileSyntaxError(
                f"{what} has {indices}, and {len(targets)} names take {'it' if count == 1 else 'them'}: {', '.join(targets)}", loc=self.loc,
                expected="a name for each extent", hint=f"for {', '.join(names)} in {what}(…):",
            )  # fmt: skip

    def _stmt(self, variables: list[Any], body: Any, span: Any) -> Any:
        kinds = {"parallel": tirx.ForKind.PARALLEL, "unroll": tirx.ForKind.UNROLLED, "vectorized": tirx.ForKind.VECTORIZED}
        kind = kinds.get(self.kind, tirx.ForKind.SERIAL)
        for depth in reversed(range(len(variables))):
            low, high, step = self.ranges[depth]
            v = variables[depth]
            zero = tirx.const(0, str(v.ty))
            if isinstance(step, int) and step == 1 and isinstance(low, int) and low == 0:
                start, extent, inner = zero, high, body
            else:  # loops count from zero in steps of one, so that every pass sees one form
                counter = tirx.Var(v.name + "_n", v.ty)
                inner = bld.sequence([tirx.Bind(v, counter * step + low, span), body])
                extent = binary("//", binary("+", binary("-", high, low), binary("-", step, 1)), step)
                start, v = zero, counter
            notes = {"ts.kind": self.kind, **self.annotations} if depth == 0 else {}
            if self.kind == "parallel":
                notes["ts.depth"] = len(variables) - depth
            body = tirx.For(v, start, as_expr(extent, str(v.ty)), kind, inner, annotations=notes, span=span)
        return body


class Hooks:
    """The object that a rewritten kernel knows as ``__ts__``."""

    # -- if -------------------------------------------------------------------------------------------------------
    def cond(self, test: Any, snapshot: dict[str, Callable[[], Any]]) -> _If:
        return _If(test, snapshot)

    def then(self, state: _If) -> bool:
        if not state.device:
            return bool(state.test)
        b = bld.current()
        state.frame = b.push("if", device=True)
        b.open_body()
        return True

    def else_(self, state: _If) -> bool:
        if not state.device:
            return not state.test
        b = bld.current()
        state.then_body = b.close_body()
        b.open_body()
        return True

    def endif(self, state: _If) -> None:
        if not state.device:
            return
        b = bld.current()
        body = b.close_body()
        then, other = (body, None) if state.then_body is None else (state.then_body, body)
        assert state.frame is not None
        b.pop(state.frame)
        b.emit(tirx.IfThenElse(_boolean(state.test), then, other, b.span(state.loc)))

    # -- loops ----------------------------------------------------------------------------------------------------
    def loop(self, iterable: Any, targets: tuple[str, ...], snapshot: dict[str, Callable[[], Any]]) -> _Loop:
        if is_device(iterable):
            raise TileTypeError("a device value is not something to loop over", loc=source.current(), hint="for i in T.serial(n):")
        return _Loop(iterable, targets, snapshot)

    def while_state(self, snapshot: dict[str, Callable[[], Any]]) -> State:
        state = State("while", snapshot, True)
        state.device = False  # decided when the test is first seen
        state.frame = None  # type: ignore[attr-defined]
        return state

    def while_(self, state: Any, test: Callable[[], Any]) -> bool:
        b = bld.current()
        if state.frame is not None:  # second visit: the body has been traced
            body = b.close_body()
            b.pop(state.frame)
            state.inside = False
            b.emit(tirx.While(state.test, body, b.span(state.loc)))
            return False
        with b.body() as extra:
            value = test()
        if not is_device(value):
            b.bodies[-1].extend(extra)
            return bool(value)
        if extra:
            raise TileSyntaxError(
                "the condition of a device while does more than compute a value",
                loc=state.loc,
                hint="compute it in the body into a T.alloc_var and test that",
            )
        state.device, state.test = True, _boolean(value)
        state.frame = b.push("while", device=True)
        state.inside = True
        b.open_body()
        return True

    def poison(self, name: str, thunk: Callable[[], Any], state: State) -> Any:
        """What a name rebound under a device construct stands for outside its body: refused, unless nothing changed.

        In a loop this runs first at the body's entry (the value of the last round is not known when it is traced), then behind it.
        """
        now, before = _peek(thunk), state.before.get(name, _UNBOUND)
        if isinstance(now, Variable) and now is before:
            return now  # assigning to it is a store
        if not state.inside:
            if isinstance(now, Poison) and now.state is state:
                return before if before is not _UNBOUND else now  # the body never rebound it after all
            if now is before and now is not _UNBOUND:
                return now
        values = [v for v in (now, before) if not isinstance(v, Poison)]
        scalar = next((v for v in values if isinstance(v, (bool, int, float)) or is_device(v)), 0)
        return Poison(name, state.loc, state.what, state, str(dtype_of(scalar)))

    def break_(self) -> bool:
        return self._leave("break", tirx.Break)

    def continue_(self) -> bool:
        return self._leave("continue", tirx.Continue)

    def _leave(self, word: str, make: Any) -> bool:
        b = bld.current()
        inside_if = False
        for frame in reversed(b.frames):
            if frame.kind == "pyfor":
                if inside_if:
                    raise TileSyntaxError(
                        f"{word} leaves a Python loop on a device condition", loc=source.current(), hint="loop with T.serial instead"
                    )
                return True
            if frame.kind in ("parallel", "pipelined", "vectorized", "unroll"):
                raise TileSyntaxError(
                    f"{word} has no meaning in T.{frame.kind.capitalize() if frame.kind in ('parallel', 'pipelined') else frame.kind}",
                    loc=source.current(),
                    hint="an `if` around the rest of the body, or T.serial",
                )
            if frame.device and frame.kind != "if":
                b.emit(make(b.span()))
                return False
            inside_if = inside_if or frame.device
        return True  # a Python while

    # -- with, functions ------------------------------------------------------------------------------------------
    def with_state(self, snapshot: dict[str, Callable[[], Any]]) -> State:
        state = State("T.Scale of a team", snapshot, True)
        state.device = False  # decided by what is opened
        return state

    def with_(self, manager: Any, names: tuple[str, ...], state: State) -> Any:
        state.device = state.device or getattr(manager, "conditional", False)
        if hasattr(manager, "name_targets"):
            manager.name_targets(names)
        return manager

    def depth(self) -> int:
        return bld.current().device_depth()

    def ret(self, value: Any, depth: int) -> Any:
        if bld.current().device_depth() != depth:
            raise TileSyntaxError(
                "return depends on a device value", loc=source.current(), hint="assign to a T.alloc_var and return it at the end"
            )
        return value

    def assert_(self, test: Any, message: Callable[[], Any]) -> None:
        if is_device(test):
            from tilescale.compiler.ops.assertion import device_assert

            device_assert(test, str(message()))
        elif not test:
            raise AssertionError(message())

    # -- assignments ----------------------------------------------------------------------------------------------
    def bind(self, name: str, value: Any, thunk: Callable[[], Any]) -> Any:
        """``name = value``: stores into a variable, or names a device scalar so that it is computed once, here."""
        now = _peek(thunk)
        if isinstance(now, Variable) and not isinstance(value, (Variable, Buffer)):
            now.store(value)
            return now
        if isinstance(value, Variable) and isinstance(now, Variable) and value is not now and now.name != value.name:
            now.store(value)
            return now
        b = bld.current()
        if isinstance(value, SymExpr):
            return value
        if hasattr(value, "asobject"):
            value = value.asobject()
        if is_expr(value):
            if isinstance(value, (tirx.IntImm, tirx.FloatImm)) or isinstance(value, ir.Var):
                return value
            var = tirx.Var(b.unique(name), value.ty)
            b.emit(tirx.Bind(var, value, b.span()))
            if isinstance(value, ir.TensorLoad):
                b.origins[var] = value
            elif str(value.ty) in ("int32", "int64"):
                b.definitions[var] = value
            return var
        for called, held in _parts(name, value):
            buffer = held.buffer if isinstance(held, Variable) else held
            if isinstance(buffer, Buffer) and buffer.var in b.unnamed:
                b.unnamed.remove(buffer.var)
                buffer.name = b.renames[buffer.var] = b.unique(called)
        return value

    def declare(self, name: str, annotation: Any, value: Any, thunk: Callable[[], Any]) -> Any:
        """``A: T.Tensor(…)`` in an eager kernel, and ``x: T.int32 = …``."""
        from tilescale.compiler.frontend.trace import declare_parameter
        from tilescale.language.annotations import TensorSpec
        from tilescale.language.dtypes import canonical

        if isinstance(annotation, TensorSpec):
            return declare_parameter(name, annotation, _peek(thunk))
        if value is None:
            raise TileSyntaxError(f"{name} is annotated and has no value", loc=source.current())
        given = value()
        if is_device(given):
            return self.bind(name, convert(given, canonical(annotation)), thunk)
        return given

    def store(self, target: Any, index: Any, value: Any) -> None:
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
        if isinstance(target, (Buffer, Variable)):
            target[index] = binary(op, target[index], value)
        else:
            target[index] = _PY_AUG[op](target[index], value)

    def slice_(self, low: Any, high: Any, step: Any) -> slice:
        return slice(low, high, step)

    # -- expressions ----------------------------------------------------------------------------------------------
    def and_(self, *thunks: Callable[[], Any]) -> Any:
        return _chain(thunks, tirx.And, stop_on=False)

    def or_(self, *thunks: Callable[[], Any]) -> Any:
        return _chain(thunks, tirx.Or, stop_on=True)

    def binop(self, op: str, a: Any, b: Any) -> Any:
        """``a op b``: Python's own, unless one side is IR."""
        if _in_ir(a) or _in_ir(b):
            return binary(op, a, b)
        return BINARY[op](a, b)

    def neg(self, value: Any) -> Any:
        return negative(value) if _in_ir(value) else -value

    def not_(self, value: Any) -> Any:
        return tirx.Not(_boolean(value)) if is_device(value) else not value

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
                result = value if result is True else tirx.And(_boolean(result), _boolean(value))
            elif not value:
                return value
            left = right
        return result

    def ifexp(self, test: Any, a: Callable[[], Any], b: Callable[[], Any]) -> Any:
        if not is_device(test):
            return a() if test else b()
        from tilescale.compiler.ops.math import if_then_else

        return if_then_else(test, a(), b())

    def builtin(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """``range``, ``min``, ``abs`` … over device values; Python's own where nothing is on the device or the name is rebound."""
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
        if name in ("abs", "round", "pow"):
            return getattr(math, name)(*args)
        if name == "print":
            from tilescale.compiler.ops import print as printing

            for a in args:
                printing.print(a)
            return None
        return func(*args, **kwargs)


def _in_ir(value: Any) -> bool:
    return is_device(value) and not isinstance(value, SymExpr)


def _boolean(value: Any) -> Any:
    e = as_expr(value, "bool")
    return e if str(e.ty) == "bool" else tirx.NE(e, tirx.const(0, str(e.ty)))


def _chain(thunks: tuple[Callable[[], Any], ...], join: Any, *, stop_on: bool) -> Any:
    """``and`` / ``or``: short-circuit for Python values, one device expression of the rest."""
    value: Any = None
    for thunk in thunks:
        x = thunk()
        if is_device(x):
            x = _boolean(x)
            value = x if not is_device(value) else join(value, x)
        else:
            if bool(x) is stop_on:
                return x if not is_device(value) else tirx.const(stop_on, "bool")
            value = x if not is_device(value) else value
    return value


_PY_MEMBERSHIP: dict[str, Callable[[Any, Any], Any]] = {
    "Is": lambda a, b: a is b,
    "IsNot": lambda a, b: a is not b,
    "In": lambda a, b: a in b,
    "NotIn": lambda a, b: a not in b,
}


def _iadd(op: str) -> Callable[[Any, Any], Any]:
    import operator

    name = {"+": "iadd", "-": "isub", "*": "imul", "/": "itruediv", "//": "ifloordiv", "%": "imod", "**": "ipow", "<<": "ilshift",
            ">>": "irshift", "&": "iand", "|": "ior", "^": "ixor", "@": "imatmul"}[op]  # fmt: skip
    return getattr(operator, name)


_PY_AUG = {op: _iadd(op) for op in ("+", "-", "*", "/", "//", "%", "**", "<<", ">>", "&", "|", "^", "@")}

__all__ = ["Hooks", "LoopNest", "dtype_of", "is_device"]
