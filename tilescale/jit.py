"""``@tilescale.jit`` in both its styles, and ``tilescale.compile``. Imports neither torch nor TVM.

A *factory* defines and returns a ``@T.prim_func``; calling it compiles that for the arguments given. In the
*eager* style the function's body is the kernel; calling it with tensors compiles it for their dtypes and
constant extents, runs it and returns its outputs.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tilescale import devices, source_text, tracing
from tilescale.compat import switches, unused
from tilescale.devices import is_auto, parse_target, resolve_target
from tilescale.errors import TileError, TileTypeError, TileValueError
from tilescale.jitted import Jit, frozen, loc_of, one_by_one, without_collection

if TYPE_CHECKING:
    from tilescale.compiler.ir.program import TileProgram
    from tilescale.kernel import Kernel
    from tilescale.language.funcs import PrimFunc


def compile(  # the name that users know
    func: PrimFunc | TileProgram,
    out_idx: int | Iterable[int] | None = None,
    target: Any = None,
    *,
    instrument: bool = False,
    name: str | None = None,
    execution_backend: Any = None,
    target_host: Any = None,
    verbose: Any = None,
    pass_configs: Any = None,
    compile_flags: Any = None,
) -> Kernel:
    """Compiles a ``@T.prim_func``, or takes it from the disk cache; or what get_tir of an eager kernel gives.

    Args:
        out_idx: the parameters (an index or several; negative ones count from the end) that calls allocate
            and return.
        target: "cpu"; "cuda" (this machine's GPU, or sm_90a to be looked at) or "cuda:sm_80"; "sim" (the
            simulator: no code is made, calls raise FindingError where something is wrong); or "auto":
            TILESCALE_TARGET, or where that names none what the first call's tensors lie on. Without tensors,
            or asked for its code before, a kernel is made for this machine's GPU if there is one.
        instrument: log remote operations and waits as the kernel runs (tilescale.native.events).
        name: what reports call the kernel, by default its name and the constants that it captured.
        pass_configs: see `tilescale.PassConfigKey`: ``{PassConfigKey.TL_ENABLE_FAST_MATH: True}`` makes T.exp
            and its kin of float32, and divisions of it, the fast ones; what decides nothing here is said in
            the log.
        execution_backend, target_host, verbose, compile_flags: TileLang's words for how its compiler works;
            they decide nothing here either.

    Raises:
        TileError: whatever the language or the target refuses, placed in the kernel's source.
    """
    from tilescale.language.funcs import PrimFunc

    asked, pass_configs = switches(pass_configs)
    given = {
        "execution_backend": execution_backend, "target_host": target_host, "verbose": verbose,
        "pass_configs": pass_configs, "compile_flags": compile_flags,
    }  # fmt: skip
    unused("tilescale.compile", given)
    by_call = is_auto(target)
    if not isinstance(func, PrimFunc):
        from tilescale.compiler.ir.program import TileProgram

        if isinstance(func, TileProgram):
            return _of_program(func, out_idx, target, instrument, name)
        raise TileTypeError(
            f"tilescale.compile takes a @T.prim_func, and this is a {type(func).__name__}",
            hint="@T.prim_func above it",
        )
    func = func.with_switches(asked) if asked else func
    with without_collection():
        from tilescale import build, simulator

        outputs = normal_out_idx(out_idx, len(func.params), func)

        def make(chosen: str) -> Kernel:
            with without_collection():
                return build.from_prim_func(
                    func,
                    outputs,
                    instrument or (not devices.of(chosen).mute and tracing.wanted()),
                    name,
                    chosen,
                )

        if by_call:
            from tilescale.undecided import Undecided

            if devices.may_have_gpu():
                return Undecided(lambda kind: make(devices.named(kind)), func.trace)
        chosen = resolve_target(target)
        return (
            simulator.from_prim_func(func, outputs, instrument, name)
            if devices.of(chosen).simulated
            else make(chosen)
        )


def _of_program(
    program: TileProgram,
    out_idx: int | Iterable[int] | None,
    target: Any,
    instrument: bool,
    name: str | None,
) -> Kernel:
    """The kernel of what an eager kernel's ``get_tir`` gives. Its source is not at hand, so nothing is cached
    on disk; without ``out_idx`` calls allocate what the program says (T.empty)."""
    from tilescale import build, simulator

    outputs = None if out_idx is None else normal_out_idx(out_idx, len(program.params), program)
    chosen, label, traced = resolve_target(target), name or program.name, lambda: program
    with without_collection():
        if devices.of(chosen).simulated:
            made = simulator.program_of(None, traced)
            made.require_here()
            return simulator.kernel_of(made, label, traced, instrument, outputs)
        return build.loaded(None, traced, label, instrument, chosen, outputs)


#: TileLang's name of what ``@tilescale.jit`` makes, in both styles
JITImpl = Jit


class _Compiles(type):
    def __call__(
        cls, func: PrimFunc, out_idx: int | Iterable[int] | None = None, target: Any = None, **words: Any
    ) -> Kernel:
        return compile(func, out_idx, target, **words)

    def __instancecheck__(cls, value: object) -> bool:
        from tilescale.kernel import Kernel

        return isinstance(value, Kernel)


class JITKernel(metaclass=_Compiles):
    """TileLang's name of `Kernel`, whose call compiles: ``JITKernel(func, out_idx=[1], target="cuda")`` is
    `compile`."""


def par_compile(
    funcs: Iterable[PrimFunc], *, num_workers: int | None = None, ignore_error: bool = False, **words: Any
) -> list[Kernel | None]:
    """A kernel for each of ``funcs``, by TileLang's name. They are compiled one after the other.

    Args:
        ignore_error: None for one that is refused. words: those of `compile`. num_workers decides nothing.
    """
    unused("par_compile", {"num_workers": num_workers})
    made: list[Kernel | None] = []
    for func in funcs:
        try:
            made.append(compile(func, **words))
        except TileError:
            if not ignore_error:
                raise
            made.append(None)
    return made


def normal_out_idx(out_idx: int | Iterable[int] | None, n: int, func: Any) -> tuple[int, ...]:
    """Indices from 0, in the order given. Raises TileValueError for one that names no parameter, or one
    twice."""
    if out_idx is None:
        return ()
    wanted = [out_idx] if isinstance(out_idx, int) else list(out_idx)
    out = []
    for k in wanted:
        if not isinstance(k, int) or not -n <= k < n:
            raise TileValueError(
                f"out_idx {k!r} of {func.name}, which has {n} parameters",
                loc=func.loc,
                expected=f"-{n} … {n - 1}",
            )
        out.append(k % n)
    if len(set(out)) != len(out):
        raise TileValueError(f"out_idx={wanted} names a parameter twice", loc=func.loc)
    return tuple(out)


class Factory(Jit):
    """``@tilescale.jit`` over a function that returns a ``@T.prim_func``."""

    def __call__(self, *args: Any, **kwargs: Any) -> Kernel:
        """The kernel for these compile-time constants; compiled once for equal ones."""
        self.fresh()
        key = (tuple(map(frozen, args)), tuple((k, frozen(v)) for k, v in kwargs.items()))
        kernel = self.kernels.get(key)
        if kernel is None:
            kernel = self.kernels[key] = self._make(args, kwargs)
        return kernel

    def compile(self, *args: Any, **kwargs: Any) -> Kernel:
        """The same as a call."""
        return self(*args, **kwargs)

    def program(self, *args: Any, **kwargs: Any) -> TileProgram:
        return self.prim_func(*args, **kwargs).trace()

    def get_tir(self, *args: Any, **kwargs: Any) -> PrimFunc:
        """The same as :meth:`prim_func`, under TileLang's name."""
        return self.prim_func(*args, **kwargs)

    def prim_func(self, *args: Any, **kwargs: Any) -> PrimFunc:
        """What the function returns for these constants, not compiled."""
        from tilescale.language.funcs import PrimFunc, switches_of

        self.bound(args, kwargs)
        made = self.func(*args, **kwargs)
        if not isinstance(made, PrimFunc):
            raise TileTypeError(
                f"{self.name} returned {'None' if made is None else 'a ' + type(made).__name__}",
                loc=loc_of(self.func),
                expected="a @T.prim_func that it defines (a factory), or `with T.Kernel(…)` in its own body "
                "(an eager kernel)",
            )
        asked = switches_of(self.func)
        return made.with_switches(asked) if asked else made

    def _make(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Kernel:
        from tilescale.build import label_of

        made = self.prim_func(*args, **kwargs)
        # Many kernels are called main; their factory's name tells them apart.
        label = label_of(self.name if made.name == "main" else made.name, self.bound(args, kwargs).arguments)
        return compile(made, self.out_idx, self.target, instrument=self.instrument, name=label)

    def par_compile(
        self, configs: Iterable[Any], num_workers: int | None = None, ignore_error: bool = False
    ) -> list[Kernel | None]:
        """A kernel for each of ``configs``, a tuple of arguments or a dict of named ones. They are compiled
        one after the other: TVM's analyzers are not meant for several threads. ``ignore_error``: None for one
        that is refused."""
        return one_by_one(self, configs, num_workers, ignore_error)

    def get_kernel_source(self, *args: Any, **kwargs: Any) -> str:
        """`Kernel.get_kernel_source` of the kernel for these constants."""
        return self(*args, **kwargs).get_kernel_source()


def jit(
    func: Any = None,
    *,
    out_idx: int | Iterable[int] | None = None,
    target: Any = None,
    instrument: bool = False,
    pass_configs: dict[Any, Any] | None = None,
    execution_backend: Any = None,
    target_host: Any = None,
    verbose: Any = None,
    debug_root_path: Any = None,
    compile_flags: Any = None,
    mode: Any = None,
) -> Any:
    """Compiles kernels when they are called: ``@tilescale.jit`` or ``@tilescale.jit(out_idx=[-1])``.

    Above a function that defines and returns a ``@T.prim_func`` it makes a factory: calling it with
    compile-time constants gives a `Kernel`. Above a function whose own body holds ``with T.Kernel(…)``, or
    calls a macro that does, it makes an eager kernel: calling it with tensors runs it. Above a
    ``@T.prim_func`` it is :func:`compile`, as in TileLang's first releases; of a method that is bound to its
    object it makes what the method's decorator would.

    Args:
        out_idx: parameters of the prim_func that calls allocate and return (factories; eager kernels say it
            with T.empty).
        target: see :func:`compile`; with "auto" the tensors of a call decide.
        instrument: log remote operations and waits as the kernel runs.
        pass_configs: see `tilescale.PassConfigKey`: ``{PassConfigKey.TL_ENABLE_FAST_MATH: True}`` makes T.exp
            and its kin of float32, and divisions of it, the fast ones; what decides nothing here is said in
            the log.
        execution_backend, target_host, verbose, debug_root_path, compile_flags, mode: TileLang's words for
            how its compiler works; they decide nothing here either.

    Raises:
        TileTypeError: not a function. TileValueError: a target that this version does not have.
    """
    if func is None:
        return functools.partial(
            jit, out_idx=out_idx, target=target, instrument=instrument, pass_configs=pass_configs,
            execution_backend=execution_backend, target_host=target_host, verbose=verbose,
            debug_root_path=debug_root_path, compile_flags=compile_flags, mode=mode,
        )  # fmt: skip
    from tilescale.language.funcs import PrimFunc, launches, with_switches

    if isinstance(func, PrimFunc):
        unused(func.name, {"debug_root_path": debug_root_path, "mode": mode})
        return compile(
            func, out_idx, target, instrument=instrument, pass_configs=pass_configs,
            execution_backend=execution_backend, target_host=target_host, verbose=verbose,
            compile_flags=compile_flags,
        )  # fmt: skip
    if isinstance(func, types.MethodType):
        made = jit(
            func.__func__, out_idx=out_idx, target=target, instrument=instrument, pass_configs=pass_configs,
            execution_backend=execution_backend, target_host=target_host, verbose=verbose,
            debug_root_path=debug_root_path, compile_flags=compile_flags, mode=mode,
        )  # fmt: skip
        return made.__get__(func.__self__, type(func.__self__))
    if not isinstance(func, types.FunctionType):
        raise TileTypeError(
            f"@tilescale.jit takes a function or a @T.prim_func, and this is a {type(func).__name__}",
            hint="@tilescale.jit above a def",
        )

    source_text.keep(func)
    parse_target(target)
    asked, pass_configs = switches(pass_configs)
    func = with_switches(func, asked) if asked else func
    given = {
        "pass_configs": pass_configs, "execution_backend": execution_backend, "target_host": target_host,
        "verbose": verbose, "debug_root_path": debug_root_path, "compile_flags": compile_flags, "mode": mode,
    }  # fmt: skip
    unused(func.__name__, given)
    if not launches(func):
        return Factory(func, out_idx, target, instrument)
    if out_idx is not None:
        raise TileError(
            f"{func.__name__} is an eager kernel, whose outputs are not named by out_idx",
            loc=loc_of(func),
            hint="C = T.empty(…); return C",
        )
    from tilescale.eager import Eager

    return Eager(func, None, target, instrument)
