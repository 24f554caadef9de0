"""Runs a rewritten kernel once and keeps what it emitted: the tile IR, its parameters, its symbols and its
launch."""

from __future__ import annotations

import difflib
import functools
import inspect
import linecache
import re
import types
from dataclasses import dataclass, replace
from typing import Any

from tilescale import language, packets
from tilescale.compiler.builder import state as bld
from tilescale.compiler.builder.held import Element, held
from tilescale.compiler.builder.lanes import VectorTile
from tilescale.compiler.builder.values import (
    Buffer,
    Region,
    Variable,
    as_expr,
    dtype_of,
    resolved,
    symbol_expr,
)
from tilescale.compiler.frontend.conditions import by_condition
from tilescale.compiler.frontend.groups import by_warpgroup
from tilescale.compiler.frontend.hooks import Hooks
from tilescale.compiler.frontend.own import threads_own
from tilescale.compiler.frontend.rewrite import rewritten
from tilescale.compiler.frontend.scratch import own_scratch
from tilescale.compiler.frontend.solved import Solved, solve
from tilescale.compiler.frontend.staged import staged
from tilescale.compiler.ir import source
from tilescale.compiler.ir.multiples import Promises
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.program import Param, TileProgram
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.tvm_compat import ir, is_expr, structural_map, tirx
from tilescale.errors import Loc, TileError, TileNameError, TileSyntaxError, TileTypeError, TileValueError
from tilescale.language.annotations import Ref, ScalarSpec, Tensor, TensorSpec
from tilescale.language.dtypes import Narrow
from tilescale.language.elsewhere import INSTEAD
from tilescale.language.funcs import PrimFunc, parameter_loc, switches_of
from tilescale.language.symbolic import Const, Sym, SymExpr, settle, shown, symbols_of
from tilescale.language.vectors import Vector

SCOPES = {
    "tensor": "global",
    "symm": "global.symm",
    "signal": "global.signal",
    "packets": "global.packets",
}
_hooks = Hooks()


class _Eager:
    """What is known of an eager kernel's arguments while it is traced, and the parameters declared so far."""

    def __init__(self, func: types.FunctionType, extents: dict[str, int], solved: Solved):
        self.func, self.extents, self.solved = func, extents, solved
        #: the tensors of the call, by the names of their parameters
        self.tensors: dict[str, TensorArg] = {}
        self.params: dict[str, Param] = {}
        #: what tensors said of T.const extents, for errors
        self.learnt: dict[str, str] = {}

    def declare_output(self, shape: tuple[Any, ...], dt: Any) -> Buffer:
        """``T.empty(shape, dtype)``: a tensor that the call allocates and returns."""
        name = f"out{len([p for p in self.params.values() if p.output])}"
        spec = self.solved.spec(name, Tensor(tuple(settle(s) for s in shape), dt))
        buffer = make_buffer(name, spec, source.current())
        self.params[name] = Param(name, spec, buffer.var, source.current(), output=True)
        return buffer


@dataclass(frozen=True)
class TensorArg:
    """Stands for a tensor argument of an eager kernel until the kernel says what it is; shape and dtype are
    None where the kernel is compiled ahead of any call."""

    name: str
    shape: tuple[int, ...] | None
    dtype: str | None
    kind: str

    def __repr__(self) -> str:
        return f"{self.name}, which the kernel has not declared"

    def __getitem__(self, index: Any) -> Any:
        raise TileTypeError(
            f"{self.name} is not declared",
            loc=source.current(),
            expected="a declaration in the kernel's body, before the first use",
            hint=f'{self.name}: T.Tensor((…,), "{self.dtype or "float32"}")',
        )

    def __setitem__(self, index: Any, value: Any) -> None:
        self[index]


def _run(func: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return rewritten(func, _hooks)(*args, **kwargs)


def call_macro(func: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a macro inside the trace that is under way. Arguments have their values from here on; tiles and
    cells are what they are."""
    bld.current()

    def given(value: Any, name: str) -> Any:
        told = func.__annotations__.get(name)
        by_name = told.rsplit(".", 1)[-1] in ("Ref", "Var") if isinstance(told, str) else False
        return _cell(value, name, func.__name__) if told in (Ref, Sym) or by_name else held(value, name)

    names = [*func.__code__.co_varnames[: func.__code__.co_argcount], *["value"] * len(args)]
    return _run(func, tuple(map(given, args, names)), {k: given(v, k) for k, v in kwargs.items()})


def _cell(value: Any, name: str, macro: str) -> Variable:
    """What a macro's ``x: T.Ref`` is: a cell, or an element of memory."""
    if isinstance(value, Variable):
        return value
    buffer = bld.current().buffers.get(value.source) if isinstance(value, ir.TensorLoad) else None
    if buffer is not None and buffer.kind != "signal" and not buffer.packed:
        return Element(value)
    raise TileValueError(
        f"{name} of {macro} is {value}, and the macro takes a cell",
        loc=source.current(),
        expected="what T.alloc_var gives, or an element of a tile or a tensor",
        hint=f"{name} = T.alloc_var(dtype, {value}) in front of the call",
    )


def _extent(value: Any, what: str, loc: Loc | None) -> Any:
    settled = settle(value)
    if isinstance(settled, SymExpr):
        return symbol_expr(settled)
    known = constant(settled) if not isinstance(settled, bool) else None
    if known is None:
        raise TileTypeError(
            f"{what} is {value!r}", loc=loc, expected="an integer, T.dynamic or an expression of them"
        )
    if known <= 0:
        raise TileValueError(f"{what} is {known}", loc=loc, expected="a positive extent")
    if known >= 1 << 63:
        raise TileValueError(f"{what} is {known}", loc=loc, expected="a number that int64 holds")
    return known


def make_buffer(name: str, spec: TensorSpec, loc: Loc | None) -> Buffer:
    """The buffer of a tensor parameter in the trace that is under way."""
    b = bld.current()
    if spec.kind == "packets":
        return _box(name, spec, loc)
    if isinstance(spec.of, Narrow):
        return _halved(name, spec, loc)
    shape = tuple(_extent(s, f"extent {k} of {name}", loc) for k, s in enumerate(spec.shape))
    var = tirx.decl_buffer(
        shape,
        str(spec.dtype),
        b.unique(name),
        strides=_strides(name, spec, loc),
        scope=SCOPES[spec.kind],
        data_alignment=1,
        layout=None,
    )
    buffer = Buffer(var, name, shape, spec.dtype, SCOPES[spec.kind], spec.kind)
    b.buffers[var] = buffer
    return VectorTile(buffer, spec.of) if isinstance(spec.of, Vector) else buffer


def _strides(name: str, spec: TensorSpec, loc: Loc | None) -> list[Any] | None:
    if spec.strides is None:
        return None
    if len(spec.strides) != len(spec.shape):
        raise TileValueError(f"{name} has {len(spec.shape)} axes and {len(spec.strides)} strides", loc=loc)
    if isinstance(spec.of, Narrow):  # two a byte: an odd stride is none of theirs
        for s in (s.args[0] for s in spec.strides if isinstance(s, SymExpr) and s.op == "//"):
            if isinstance(s, Sym):
                bld.current().promise(s.name, 2)
    return [as_expr(_extent(s, f"stride {k} of {name}", loc)) for k, s in enumerate(spec.strides)]


def _box(name: str, spec: TensorSpec, loc: Loc | None) -> Buffer:
    """The buffer of a T.Packets parameter: its author indexes elements, the IR packets (int64, 8 bytes of
    data each).

    Raises:
        TileValueError: rows that are no whole packets.
    """
    assert spec.of is not None
    b, count, slots = bld.current(), packets.each(spec.of.bits), spec.slots or ()
    shape = tuple(_extent(s, f"extent {k} of {name}", loc) for k, s in enumerate(slots))
    last = settle(slots[-1]) if slots else 1
    promised = last.multiple_of if isinstance(last, Sym) else last
    if not isinstance(promised, int) or promised % count:
        raise TileValueError(
            f"the rows of {name} are of {last} elements of {spec.of}, and a packet has {count}",
            loc=loc,
            expected=f"a last extent that is a multiple of {count} ({packets.DATA} bytes)",
            hint=f"T.dynamic({last.name!r}, multiple_of={count})" if isinstance(last, Sym) else None,
        )
    rows = shape[-1] // count if isinstance(shape[-1], int) else tirx.floordiv(shape[-1], as_expr(count))
    var = tirx.decl_buffer(
        (*shape[:-1], rows), "int64", b.unique(name), scope=SCOPES[spec.kind], data_alignment=1, layout=None
    )
    made = Buffer(var, name, shape, str(spec.of), SCOPES[spec.kind], spec.kind)
    made.dense = spec.dense
    b.buffers[var] = made
    return made


def _halved(name: str, spec: TensorSpec, loc: Loc | None) -> Buffer:
    """The buffer of a tensor of 4-bit numbers: its author indexes numbers, the IR bytes.

    Raises:
        TileValueError: rows that are no whole bytes.
    """
    b, slots = bld.current(), spec.slots or ()
    shape = tuple(_extent(s, f"extent {k} of {name}", loc) for k, s in enumerate(slots))
    last = settle(slots[-1])
    if isinstance(last, Sym):
        b.promise(last.name, 2)  # a call gives whole bytes: no other extent fits
    elif constant(resolved(tirx.floormod(as_expr(last), as_expr(2)))) != 0:
        raise TileValueError(
            f"the rows of {name} are of {last} numbers of {spec.of}, two of which share a byte",
            loc=loc,
            expected="an even last extent",
        )
    half = shape[-1] // 2 if isinstance(shape[-1], int) else tirx.floordiv(shape[-1], as_expr(2))
    var = tirx.decl_buffer(
        (*shape[:-1], half),
        str(spec.dtype),
        b.unique(name),
        strides=_strides(name, spec, loc),
        scope=SCOPES[spec.kind],
        data_alignment=1,
        layout=None,
    )
    assert spec.of is not None
    made = Buffer(var, name, shape, spec.of, SCOPES[spec.kind], spec.kind)
    made.packed = True
    b.buffers[var] = made
    return made


def trace(prim: PrimFunc, part: int | None = None) -> TileProgram:
    """Traces a ``@T.prim_func``. ``part``: which of its launches is meant; None where it has to have one
    alone.

    Raises:
        TileError: anything that the language refuses, with the user's file, line and expression.
    """
    builder = bld.Builder(prim.name)
    builder.make_tensor = make_buffer
    params: list[Param] = []
    solved = solve(prim.params)
    builder.solved, builder.switches = solved.symbols, switches_of(prim.func)
    with bld.tracing(builder):
        values: dict[str, Any] = {}
        for name, declared in prim.params.items():
            spec = solved.spec(name, declared)
            loc = parameter_loc(prim.func, name)
            if isinstance(spec, ScalarSpec):
                var = tirx.Var(builder.unique(name), str(spec.dtype))
                values[name], params = var, [*params, Param(name, spec, var, loc)]
            else:
                buffer = make_buffer(name, spec, loc)
                values[name], params = buffer, [*params, Param(name, spec, buffer.var, loc)]
        with translated(prim.func):
            result = _run(prim.func, (), values)
        if result is not None:
            raise TileSyntaxError(
                f"kernel {prim.name} returns a value",
                loc=prim.loc,
                hint="write results into a tensor parameter",
            )
        return _finish(builder, prim.name, params, prim.loc, part)


def trace_eager(
    func: types.FunctionType,
    tensors: dict[str, TensorArg],
    constants: dict[str, Any],
    extents: dict[str, int] | None = None,
    part: int | None = None,
    solved: Solved | None = None,
) -> TileProgram:
    """Traces an eager kernel for arguments of the given shapes and dtypes (``tensors``) and the given values
    (``constants``); ``extents`` says what ``T.const`` names are where no tensor does. ``part``: as
    :func:`trace`. ``solved``: what the extents of all parameters say, as the first trace of it finds
    out."""
    builder = bld.Builder(func.__name__)
    loc = Loc(func.__code__.co_filename, func.__code__.co_firstlineno)
    state = _Eager(func, extents or {}, solved or Solved())
    builder.solved = state.solved.symbols
    builder.eager, builder.make_tensor, builder.switches = state, make_buffer, switches_of(func)
    state.tensors = tensors
    with bld.tracing(builder):
        values: dict[str, Any] = {**constants, **tensors}
        specs = PrimFunc(func).params
        for name, spec in specs.items():
            if isinstance(spec, TensorSpec) and name in tensors:
                values[name] = declare_parameter(name, spec, tensors[name])
        with translated(func):
            result = _run(func, (), values)
        late = {c.name: c.value for c in builder.unknown if c.value is not None}
        late = {name: value for name, value in late.items() if name not in state.extents}
        if late:  # a later tensor says what an earlier one's `n * heads` does not: once more, with that
            return trace_eager(func, tensors, constants, {**state.extents, **late}, part, solved)
        if solved is None and (found := _solved(state.params)).symbols:
            return trace_eager(func, tensors, constants, state.extents, part, found)
        returned = result if isinstance(result, tuple) else () if result is None else (result,)
        for name, arg in tensors.items():
            if name not in state.params:
                raise TileTypeError(
                    f"tensor {name!r} is passed to {func.__name__}, which never says what it is",
                    loc=parameter_loc(func, name),
                    hint=f"{name}: T.Tensor({arg.shape or '(…)'}, T.{arg.dtype or 'float32'})",
                )
        outputs = [p for p in state.params.values() if p.output]
        params = [state.params[n] for n in tensors] + outputs
        program = _finish(builder, func.__name__, params, loc, part)
        order = [p.var for p in params]
        for value in returned:
            if not isinstance(value, Buffer) or not any(value.var.same_as(v) for v in order):
                raise TileSyntaxError(
                    f"{func.__name__} returns {value!r}",
                    loc=loc,
                    expected="tensors made by T.empty, or tensor arguments",
                )
            program.returns.append(next(k for k, v in enumerate(order) if value.var.same_as(v)))
        return program


def _solved(params: dict[str, Param]) -> Solved:
    return solve({name: p.spec for name, p in params.items() if not p.output})


def declare_parameter(name: str, spec: TensorSpec, value: Any) -> Any:
    """``A: T.Tensor((M, K), dtype)`` in an eager kernel: checks the argument, learns the constants, gives the
    buffer."""
    state = bld.current().eager
    if state is not None and name not in state.params:  # its name may hold something else by now
        value = state.tensors.get(name, value)
    if state is None or not isinstance(value, TensorArg):
        raise TileSyntaxError(
            f"{name} is annotated as a tensor and is not a tensor argument of an eager kernel",
            loc=source.current(),
            expected="a parameter of the @tilescale.jit function",
        )
    loc = source.current() or parameter_loc(state.func, name)
    if value.shape is not None and len(value.shape) != len(spec.shape):
        raise TileValueError(
            f"{name} has {len(value.shape)} axes", loc=loc, expected=f"{len(spec.shape)} axes"
        )
    pairs = ("int8",) if str(spec.of) == "float4_e2m1fn" else ()  # bytes, whatever their sign
    if value.dtype not in (None, spec.dtype, spec.of, *pairs):
        raise TileTypeError(f"{name} is of {value.dtype}", loc=loc, expected=str(spec.dtype))
    given, halves = value.shape, isinstance(spec.of, Narrow)
    if given is not None and halves:  # a byte is two numbers
        given = (*given[:-1], 2 * given[-1])
    for axis, want in enumerate(spec.slots or spec.shape if halves else spec.shape):
        got = given[axis] if given is not None else None
        unknown = {s.name: s for s in symbols_of(want) if getattr(s, "value", None) is None}
        names = state.learnt if isinstance(want, int) else [s.name for s in symbols_of(want)]
        told = " and ".join(dict.fromkeys(state.learnt[n] for n in names if n in state.learnt))
        why = f", where {told}" if told else ""
        if not _learn(want, got, state.extents):
            raise TileValueError(
                f"axis {axis} of {name} has extent {got}",
                loc=loc,
                expected=f"{shown(want)} of a whole number {' and '.join(unknown)}{why}",
            )
        said = f"{shown(want)} is {got} by axis {axis} of {name}"
        if got is not None:
            state.learnt |= {name: said for name, s in unknown.items() if isinstance(settle(s), int)}
        if isinstance(want, Const) and want.value is None:
            raise TileValueError(
                f"extent {want.name} of {name} is not given",
                loc=loc,
                hint=f"{state.func.__name__}.compile({want.name}=…)",
            )
        settled = settle(want)
        if got is not None and isinstance(settled, int) and settled != got:
            of = "" if isinstance(want, int) else f" = {shown(want)}"
            raise TileValueError(
                f"axis {axis} of {name} has extent {got}",
                loc=loc,
                expected=f"{settled}{of}{why}",
            )
    spec = state.solved.spec(name, spec)
    shape = tuple(settle(s) for s in spec.shape)
    slots = None if spec.slots is None else tuple(settle(s) for s in spec.slots)
    known = replace(spec, shape=shape, slots=slots)
    buffer = make_buffer(name, known, loc)
    state.params[name] = Param(name, known, buffer.var, loc)
    return buffer


def _learn(want: Any, got: int | None, given: dict[str, Any]) -> bool:
    """The values of constants that an extent, of which an argument may say the value, or the call of
    ``compile`` tells: ``n`` of ``n * heads`` too, so that what stands in front of ``n`` alone has it. False
    where no integer would do."""
    if got is None or not isinstance(want, Sym):
        for symbol in symbols_of(want):
            if isinstance(symbol, Const) and symbol.value is None:
                symbol.value = given.get(symbol.name)
    if got is None:
        return True
    if isinstance(want, Const) and want.value is None:
        want.value = got
    elif isinstance(want, SymExpr) and not isinstance(want, Sym) and want.op in ("+", "-", "*"):
        a, b = (settle(x) for x in want.args)
        if isinstance(a, int) == isinstance(b, int):
            return True
        (known, other), left = ((a, b), False) if isinstance(a, int) else ((b, a), True)
        if want.op == "+":
            return _learn(other, got - known, given)
        if want.op == "-":
            return _learn(other, got + known if left else known - got, given)
        if known:
            return got % known == 0 and _learn(other, got // known, given)
    return True


def _finish(builder: bld.Builder, name: str, params: list[Param], loc: Loc, part: int | None) -> TileProgram:
    if builder.launch is None:
        raise TileSyntaxError(
            f"kernel {name} has no launch", loc=loc, hint="with T.Kernel(grid_x, threads=128) as bx:"
        )
    every = [*builder.earlier, (builder.launch, builder.bodies[0])]
    if part is None and len(every) > 1:
        raise TileSyntaxError(
            f"{name} has {len(every)} launches, which one call makes one after the other",
            loc=every[1][0].loc,
            expected="a kernel of one T.Kernel: what looks at a single program has no order of several",
            hint=f"tilescale.compile({name}), whose calls run on every target",
        )
    launch, statements = every[part or 0]
    params = [*params, *builder.workspaces.values()]
    apart = by_condition(own_scratch(sequence(statements), builder), launch.threads, builder)
    apart = by_warpgroup(staged(apart, builder), launch.threads, builder)
    body, rows = threads_own(apart, launch.threads, builder)
    renames = {}
    for old, new in builder.renames.items():
        renames[old] = ir.Var(new, old.ty)
    if renames:
        body = structural_map(body, (ir.Var, lambda v: renames.get(v, v)))
    for p in params:  # symbols of a shape that the body never used still need a slot
        if isinstance(p.spec, TensorSpec):
            for s in (*p.spec.shape, *(p.spec.strides or ()), *(p.spec.slots or ())):
                if isinstance(s, Sym) and not isinstance(settle(s), int) and s.name not in builder.symbols:
                    builder.symbols[s.name] = tirx.Var(s.name, s.dtype)
                for symbol in symbols_of(s):
                    builder.promise(symbol.name, symbol.multiple_of)
    if len(every) > 1:
        name = f"{name}_{(part or 0) + 1}"
    func = tirx.PrimFunc([*(p.var for p in params), *builder.symbols.values()], body).with_attr(
        "global_symbol", name
    )
    hints = dict(launch.hints)
    if rows:
        hints["rows"] = {renames.get(r, r): renames.get(own, own) for r, own in rows.items()}
    if "layouts" in hints:  # by the variables that the program has
        hints["layouts"] = {
            renames.get(b.var, b.var): (layout, at) for b, (layout, at) in hints["layouts"].items()
        }
    multiples = Promises({n: k for n, k in builder.multiples.items() if n in builder.symbols})
    for symbol_name in multiples:
        multiples.of(builder.symbols[symbol_name], symbol_name)
    return TileProgram(
        name,
        func,
        params,
        dict(builder.symbols),
        launch,
        loc,
        hints,
        multiples=multiples,
        launches=len(every),
    )


class translated:
    """Turns whatever goes wrong while user code is traced into an error of ours, placed in the user's
    source."""

    def __init__(self, func: types.FunctionType):
        self.func = func

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, tb: Any) -> None:
        if error is None or not isinstance(error, Exception):
            return
        loc = source.of_exception(error)
        if isinstance(error, TileError):
            error.at(loc)
            return
        if isinstance(error, NameError):
            raise _unknown_name(error, self.func, loc) from None
        if isinstance(error, RecursionError):
            raise TileSyntaxError(
                "functions call themselves without end while the kernel is traced", loc=loc,
                expected="a recursion that Python values end: of a device `if` both branches are traced",
                hint="a loop over T.serial, or a depth that is a Python number",
            ) from None  # fmt: skip
        text = str(error).strip().splitlines()
        message = text[0] if text else type(error).__name__
        if "Cannot use and / or / not" in message or "cannot be interpreted as an integer" in message:
            raise TileSyntaxError(
                "a device value is used where Python needs to know it now",
                loc=loc,
                hint="decorate the helper that does this with @T.macro; loop over device values with "
                "T.serial",
            ) from error
        if (
            isinstance(error, (ArithmeticError, LookupError))
            and type(error).__module__ == "builtins"
            and _of_users(error)
        ):
            own: Any = type(error)
            raise _placed(own)(f"{own.__name__}: {message}", loc=loc).with_traceback(tb) from error
        if "ffi.BigInt" in message or "exceeds range of int" in message:
            raise TileValueError(
                "an integer that no dtype holds",
                loc=loc,
                expected=f"{-(1 << 63)} to {(1 << 63) - 1}",
            ) from error
        if isinstance(error, AttributeError) and (said := _no_attribute(error)) is not None:
            raise TileTypeError(said[0], loc=loc, expected=said[1], hint=said[2]) from error
        if isinstance(error, (TypeError, AttributeError)) or _from_tvm(error):
            if re.search(r"must be real number, not \w+$|loop of ufunc does not support argument", message):
                raise TileTypeError(
                    "a function of Python numbers or arrays got a device value",
                    loc=loc,
                    hint="the language's own, such as T.exp, T.sqrt, T.max",
                ) from error
            raise TileTypeError(message, loc=loc, hint=_keyword_hint(message)) from error


def _of_users(error: BaseException) -> bool:
    """Whether an error was raised by the user's own Python, rather than in a function that it calls or that
    stands in for it."""
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    return tb is not None and not source.is_ours(tb.tb_frame.f_code.co_filename)


@functools.cache
def _placed(kind: type[Exception]) -> Any:
    """An error of Python's that knows its place: still a KeyError to those who expect one."""
    return type(f"Tile{kind.__name__}", (TileError, kind), {"__module__": __name__, "__doc__": kind.__doc__})


def _no_attribute(error: AttributeError) -> tuple[str, str, str | None] | None:
    """What a value of the kernel is asked for and does not have, in words that its author knows; None where
    it is no such value."""
    obj, name = error.obj, error.name
    if isinstance(obj, (Buffer, Region, Variable)):
        what = (
            f"{obj.name}, a part of {obj.buffer.name},"
            if isinstance(obj, Region) and obj.name != obj.buffer.name
            else obj.name
        )
        has = [n for n in ("shape", "dtype", "ndim", "name") if hasattr(obj, n)]
    elif is_expr(obj):
        what, has = f"a value of {dtype_of(obj)}", []
    else:
        return None
    close = difflib.get_close_matches(str(name), has, 1)
    word = getattr(language, str(name), None) if str(name) in language.__all__ else None
    hint = f".{close[0]}" if close else f"T.{name}(…)" if word is not None else None
    return f"{what} has no {name!r}", ", ".join(has) or "arithmetic, comparisons and the functions of T", hint


def _from_tvm(error: BaseException) -> bool:
    tb = error.__traceback__
    last = ""
    while tb is not None:
        last, tb = tb.tb_frame.f_code.co_filename, tb.tb_next
    return "/tvm" in last or "tvm_ffi" in last or "pxi" in last


def _keyword_hint(message: str) -> str | None:
    """For a keyword argument that a word of the language does not have: the one that was probably meant, or
    those that it has."""
    found = re.match(r"(\w+)(?:\.__init__)?\(\) got an unexpected keyword argument '(\w+)'", message)
    word = getattr(language, found[1], None) if found is not None and found[1] in language.__all__ else None
    if found is None or word is None:
        return None
    known = [p.name for p in inspect.signature(word).parameters.values() if p.kind is not p.VAR_POSITIONAL]
    close = [k for k in known if found[2] in k.split("_")] or difflib.get_close_matches(found[2], known, 1)
    return f"{close[0]}=…" if close else f"one of {', '.join(known)}"


def _unknown_name(error: NameError, func: types.FunctionType, loc: Loc | None) -> TileError:
    name = getattr(error, "name", None) or str(error).split("'")[1]
    known = [*func.__code__.co_varnames, *func.__code__.co_freevars, *func.__globals__]
    close = difflib.get_close_matches(name, [k for k in known if not k.startswith("__")], 1)
    foreign = INSTEAD.get(name) or _of_module(name, loc)
    plainly = foreign if name.lower() != name or name.startswith("__") or name not in INSTEAD else None
    word = f"T.{name}" if name in language.__all__ else None
    hint = plainly or word or (close[0] if close else foreign or f"define {name!r} before it is used")
    return TileNameError(f"{name!r} is not defined", loc=loc, hint=hint)


def _of_module(name: str, loc: Loc | None) -> str | None:
    """What stands for a word of a module that is not imported, as ``tl.program_id``."""
    text = linecache.getline(loc.file, loc.line) if loc is not None else ""
    words = re.findall(rf"\b{re.escape(name)}\.(\w+)", text)
    return next((INSTEAD.get(w) or (f"T.{w}" if w in language.__all__ else None) for w in words), None)
