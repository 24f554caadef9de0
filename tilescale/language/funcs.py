"""``@T.prim_func`` and ``@T.macro``: functions kept as they are until a kernel is compiled; nothing here
loads TVM."""

from __future__ import annotations

import contextlib
import copy
import dis
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from tilescale import source_text
from tilescale.errors import Loc, TileSyntaxError, TileTypeError

from .annotations import ScalarSpec, TensorSpec
from .dtypes import ALL as DTYPES
from .dtypes import PTR, dtype

#: what TileLang's ``pass_configs`` may ask of a kernel → their keys, by PassConfigKey and as TileLang spells
#: them in text
FAST_MATH, ORDERED_BY_HAND = "fast math", "threads ordered by hand"
SWITCHES = {
    FAST_MATH: ("TL_ENABLE_FAST_MATH", "tl.enable_fast_math"),
    ORDERED_BY_HAND: ("TL_DISABLE_THREAD_STORAGE_SYNC", "tl.disable_thread_storage_sync"),
}


def switches(pass_configs: dict[Any, Any]) -> tuple[frozenset[str], dict[Any, Any]]:
    """What these ask for, and those that decide nothing."""
    asked = frozenset(s for s, keys in SWITCHES.items() if any(pass_configs.get(k) for k in keys))
    return asked, {k: v for k, v in pass_configs.items() if not any(k in keys for keys in SWITCHES.values())}


def with_switches(func: types.FunctionType, asked: frozenset[str]) -> types.FunctionType:
    """The same function, whose kernels are asked for this (`SWITCHES`)."""
    made = types.FunctionType(
        func.__code__, func.__globals__, func.__name__, func.__defaults__, func.__closure__
    )
    made.__dict__.update(func.__dict__, _switches=switches_of(func) | asked)
    made.__kwdefaults__, made.__annotations__ = func.__kwdefaults__, func.__annotations__
    made.__qualname__, made.__module__, made.__doc__ = func.__qualname__, func.__module__, func.__doc__
    return made


def switches_of(func: Any) -> frozenset[str]:
    """What a function's kernels are asked for."""
    return getattr(func, "_switches", frozenset())


class PrimFunc:
    """A kernel as its author wrote it. ``params``: name → what its annotation says. Traced when it is
    compiled."""

    def __init__(self, func: types.FunctionType):
        functools.update_wrapper(self, func)
        self.func = func
        self.name = func.__name__
        self.params = parameters(func)

    def with_switches(self, asked: frozenset[str]) -> PrimFunc:
        """The same kernel, see `with_switches`. Its parameters are known: what their annotations name may be
        out of sight by now."""
        made = copy.copy(self)
        made.func = with_switches(self.func, asked)
        return made

    @property
    def loc(self) -> Loc:
        return Loc(self.func.__code__.co_filename, self.func.__code__.co_firstlineno)

    def trace(self, part: int | None = None) -> Any:
        """The kernel as tile IR (a :class:`tilescale.compiler.ir.program.TileProgram`); ``part``: which of
        its
        launches, where it has several."""
        from tilescale.compiler.frontend.trace import trace

        return trace(self, part)

    def check(
        self,
        ranks: int = 1,
        args: dict[str, Any] | None = None,
        *,
        schedule: str = "adversary",
        seeds: int = 10,
        bound: int = 10_000,
        limit: int = 2_000_000,
        level: str = "tile",
        depth: int = 2,
        roles: tuple[str, ...] = ("producer", "consumer"),
    ) -> Any:
        """Runs the kernel on the simulator under many schedules: :meth:`tilescale.kernel.Kernel.check`."""
        from tilescale.arrays import arguments
        from tilescale.compiler.checks.run import check

        given = arguments(args or {})
        return check(
            self,
            ranks,
            given,
            schedule=schedule,
            seeds=seeds,
            bound=bound,
            limit=limit,
            level=level,
            depth=depth,
            roles=roles,
            static=True,
        )

    def script(self) -> str:
        """The tile IR as text."""
        return self.trace().func.script()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TileTypeError(
            f"{self.name} is a kernel that is not compiled yet",
            loc=self.loc,
            hint=f"tilescale.compile({self.name})(…), or return it from a function under @tilescale.jit",
        )

    def __repr__(self) -> str:
        return f"<prim_func {self.name}>"


def parameters(func: types.FunctionType) -> dict[str, Any]:
    """Parameter names with what their annotations say (None where there is none); strings are evaluated where
    they were written."""
    code = func.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    annotations = func.__annotations__
    scope: dict[str, Any] | None = None
    out: dict[str, Any] = {}
    for name in names:
        given = annotations.get(name)
        if given is not PTR and isinstance(given, str) and given in DTYPES:
            given = DTYPES[given]
        if isinstance(given, str) and not isinstance(given, dtype):
            if scope is None:
                scope = {**func.__globals__, **_enclosing_locals(func)}
                for free, cell in zip(code.co_freevars, func.__closure__ or (), strict=True):
                    try:
                        scope[free] = cell.cell_contents
                    except ValueError:
                        continue
            try:
                # The user's own annotation, postponed by `from __future__ import annotations`.
                given = eval(given, scope)
            except NameError as error:
                raise TileSyntaxError(
                    f"the annotation of {name} uses {error.name!r}, which cannot be seen from here",
                    loc=Loc(code.co_filename, code.co_firstlineno),
                    hint="remove `from __future__ import annotations` from this file, or use the name in "
                    "the kernel's body",
                ) from None
        if given is PTR:
            given = TensorSpec("tensor", (1,), PTR, pointer=True)
        if isinstance(given, dtype):
            given = ScalarSpec(given)
        out[name] = given
    return out


def _enclosing_locals(func: types.FunctionType) -> dict[str, Any]:
    """The names of the functions around ``func`` while it is being decorated. Its closure has only what its
    body uses, and an annotation that `from __future__ import annotations` made a string uses nothing."""
    found: dict[str, Any] = {}
    inner, frame = func.__code__, inspect.currentframe()
    while frame is not None:
        if inner in frame.f_code.co_consts and frame.f_locals is not frame.f_globals:
            found = {**frame.f_locals, **found}
            inner = frame.f_code
        frame = frame.f_back
    return found


def prim_func(func: Callable[..., Any]) -> PrimFunc:
    """Marks a function as a kernel: parameters annotated with ``T.Tensor`` and friends, one ``with
    T.Kernel(…)`` in its body."""
    if not isinstance(func, types.FunctionType):
        raise TileTypeError("@T.prim_func takes a plain function", expected="@T.prim_func above a def")
    source_text.keep(func)
    made = PrimFunc(func)
    for name, spec in made.params.items():
        if not isinstance(spec, (TensorSpec, ScalarSpec)):
            raise TileTypeError(
                f"parameter {name!r} of kernel {func.__name__} has no annotation that says what it is",
                loc=parameter_loc(func, name),
                expected='T.Tensor((M, N), "float16"), T.SymmTensor(…), T.Signal(…) or a dtype such as '
                "T.int32",
            )
    return made


class Macro:
    """A helper whose control flow is traced like a kernel's; it may return values."""

    def __init__(self, func: types.FunctionType):
        functools.update_wrapper(self, func)
        self.func = func

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from tilescale.compiler.frontend.trace import call_macro

        return call_macro(self.func, args, kwargs)

    def __get__(self, instance: Any, owner: Any) -> Any:
        return self if instance is None else functools.partial(self.__call__, instance)


def macro(func: Callable[..., Any]) -> Macro:
    """Marks a helper that kernels call: its ifs and loops over device values become device code, and it may
    return values."""
    if not isinstance(func, types.FunctionType):
        raise TileTypeError("@T.macro takes a plain function")
    source_text.keep(func)
    return Macro(func)


def parameter_loc(func: types.FunctionType, name: str) -> Loc:
    """Where a parameter is declared in the user's source."""
    declared = _declared(func).get(name)
    return declared or Loc(func.__code__.co_filename, func.__code__.co_firstlineno)


def _declared(func: types.FunctionType) -> dict[str, Loc]:
    """Where each parameter is declared; empty without a source."""
    source = source_text.find(func)
    if source is None:
        return {}
    args, file = source.node.args, func.__code__.co_filename
    every = [*args.posonlyargs, *args.args, *args.kwonlyargs, *filter(None, (args.vararg, args.kwarg))]
    return {a.arg: Loc(file, a.lineno, a.col_offset, a.end_lineno, a.end_col_offset) for a in every}


def launches(func: types.FunctionType) -> bool:
    """Whether a function's own code begins a launch, or calls a macro that does. What functions inside of it
    do is not its own."""
    if not {"Kernel", "ClusterKernel"}.isdisjoint(func.__code__.co_names):
        return True
    closed = dict(zip(func.__code__.co_freevars, func.__closure__ or (), strict=True))
    for step in dis.get_instructions(func):
        found: Any = None
        if step.opname == "LOAD_GLOBAL":
            found = func.__globals__.get(step.argval)
        elif step.opname == "LOAD_DEREF" and step.argval in closed:
            with contextlib.suppress(ValueError):  # a name that is not bound yet
                found = closed[step.argval].cell_contents
        if isinstance(found, Macro) and found.func is not func and launches(found.func):
            return True
    return False
