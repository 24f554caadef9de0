"""``@tilescale.jit`` and ``tilescale.compile``: from a Python function to a kernel that runs, through the caches."""

from __future__ import annotations

import ast
import functools
import inspect
import tempfile
import textwrap
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tilescale import cache
from tilescale.errors import Loc, TileError, TileTypeError, TileValueError
from tilescale.fingerprint import Fingerprint, Unknown, toolchain
from tilescale.kernel import Artifact, Kernel
from tilescale.language.annotations import TensorSpec
from tilescale.language.dtypes import canonical
from tilescale.language.funcs import PrimFunc
from tilescale.language.symbolic import Const, Sym
from tilescale.log import say

TARGETS = ("cpu", "cuda", "hip", "sim")


def target_of(target: str | None, tensors: Sequence[Any] = ()) -> str:
    """The target to compile for: the given one, else by the device of the tensors, else the CPU.

    Raises:
        TileValueError: a target that does not exist, or that this version does not build for.
    """
    if target in (None, "auto"):
        kinds = {str(getattr(t, "device", "cpu")).split(":")[0] for t in tensors} - {"cpu"}
        target = "cpu" if not kinds else "cuda" if kinds == {"cuda"} else kinds.pop()
    name = str(target).split(" ")[0]
    if name in ("llvm", "c"):
        name = "cpu"
    if name not in TARGETS:
        raise TileValueError(f"there is no target {target!r}", expected="one of " + ", ".join(TARGETS))
    if name != "cpu":
        raise TileValueError(
            f"this version of TileScale does not compile for {name}", expected='target="cpu"', hint="move the tensors to the CPU"
        )
    return name


def compile(  # the public name
    func: PrimFunc,
    out_idx: Sequence[int] | int | None = None,
    target: str | None = None,
    *,
    instrument: bool = False,
    constants: str = "",
) -> Kernel:
    """Compiles a ``@T.prim_func``, or takes it from the disk cache.

    Args:
        func: the kernel. out_idx: parameters that calls allocate and return. target: "cpu" or None (by what is there).
        instrument: record when remote copies and waits began and ended (`tilescale.native.events`).
        constants: how the kernel's constants are named to people ("BM=64").

    Raises:
        TileError: whatever the language or the compiler refuses, with the user's file, line and expression.
    """
    if not isinstance(func, PrimFunc):
        raise TileTypeError(f"tilescale.compile is given {func!r}", expected="a function under @T.prim_func")
    chosen = target_of(target)
    return _kernel(func, func.trace, ("prim_func",), out_idx, chosen, instrument, constants)


def _kernel(
    identity: Any, traced: Callable[[], Any], more: tuple[Any, ...], out_idx: Any, target: str, instrument: bool, constants: str
) -> Kernel:
    """The kernel whose code ``identity`` and ``more`` decide; ``traced()`` makes its tile IR where it has to be compiled."""

    def build(path: Path) -> Artifact:
        from tilescale.compiler.driver import compile_cpu

        program = traced()
        say("info", f"compiling {program.name}({constants}) for {target}")
        fingerprint = int(key[:15], 16) if key else 0
        made = compile_cpu(program, path, instrument=instrument, fingerprint=fingerprint)
        return Artifact(made.name, path, made.desc, made.sites, made.params, made.returns, made.source, made.loc, constants)

    key = _key(identity, *more, target, instrument, constants)
    if key is None:
        with tempfile.TemporaryDirectory(prefix="tilescale") as folder:  # loaded libraries outlive their file
            return Kernel(build(Path(folder) / "kernel.so"), out_idx, traced)
    return Kernel(cache.get_or_build(key, build), out_idx, traced)


def _key(*parts: Any) -> str | None:
    f = Fingerprint()
    try:
        f.add(parts)
    except Unknown as unknown:
        say("info", f"a kernel captures {unknown} and is compiled anew in every process", once=True)
        return None
    f.text(toolchain())
    return f.digest()[:40]


def _settings(options: dict[str, Any]) -> None:
    """Refuses options that nobody reads; TileLang's switches for its own passes are accepted and named."""
    for name in options:
        if name in ("pass_configs", "execution_backend", "verbose", "debug_root_path", "compile_flags", "target_host"):
            say("info", f"@tilescale.jit({name}=…) has no effect here", once=True)
        else:
            raise TileTypeError(f"@tilescale.jit has no option {name!r}", expected="out_idx, target, instrument")


def jit(
    func: Callable[..., Any] | None = None,
    *,
    out_idx: Any = None,
    target: str | None = None,
    instrument: bool = False,
    **options: Any,
) -> Any:
    """Decorator. On a function that returns a ``@T.prim_func``: calls give compiled kernels. On a function whose body is the kernel
    (it opens ``T.Kernel`` itself): calls with tensors compile for their shapes, run, and return what the kernel returns.

    Args:
        out_idx: parameters that a kernel allocates and returns. target: "cpu", or None for what the tensors are on.
        instrument: as in :func:`compile`.
    """
    if func is None:
        return functools.partial(jit, out_idx=out_idx, target=target, instrument=instrument, **options)
    _settings(options)
    if isinstance(func, PrimFunc):
        return compile(func, out_idx, target, instrument=instrument)
    if not isinstance(func, types.FunctionType):
        raise TileTypeError("@tilescale.jit takes a function", expected="a function that returns a @T.prim_func, or an eager kernel")
    if _is_eager(func):
        if out_idx is not None:
            raise TileTypeError(f"{func.__name__} is an eager kernel and returns what it makes", hint="C = T.empty(…); return C")
        return EagerKernel(func, target, instrument)
    return Factory(func, out_idx, target, instrument)


def _is_eager(func: types.FunctionType) -> bool:
    """Whether the body opens ``T.Kernel`` itself, outside nested functions."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(func)))
    except (OSError, TypeError):
        return False

    def opens(node: ast.AST) -> bool:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
                continue
            if isinstance(child, ast.With):
                for item in child.items:
                    call = item.context_expr
                    name = call.func if isinstance(call, ast.Call) else None
                    if (isinstance(name, ast.Attribute) and name.attr == "Kernel") or (isinstance(name, ast.Name) and name.id == "Kernel"):
                        return True
            if opens(child):
                return True
        return False

    return opens(tree.body[0])


def _named(func: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments by name, defaults put in.

    Raises:
        TileTypeError: they do not fit the function.
    """
    try:
        bound = inspect.signature(func).bind(*args, **kwargs)
    except TypeError as error:
        raise TileTypeError(
            f"{func.__name__}: {error}", loc=Loc(func.__code__.co_filename, func.__code__.co_firstlineno),
            expected=f"{func.__name__}{inspect.signature(func)}",
        ) from None  # fmt: skip
    bound.apply_defaults()
    return dict(bound.arguments)


class Factory:
    """A function that makes kernels: ``matmul(M, N, K)`` is a compiled kernel, the same one for the same arguments."""

    def __init__(self, func: types.FunctionType, out_idx: Any, target: str | None, instrument: bool):
        functools.update_wrapper(self, func)
        self.func, self.out_idx, self.target, self.instrument = func, out_idx, target, instrument
        self._made: dict[Any, Kernel] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Kernel:
        memo = (args, tuple(sorted(kwargs.items())), tuple(type(a) for a in args))
        try:
            found = self._made.get(memo)
        except TypeError:  # an argument without a hash: made anew, the disk cache still knows it
            return self.make(*args, **kwargs)
        if found is None:
            found = self._made[memo] = self.make(*args, **kwargs)
        return found

    def make(self, *args: Any, **kwargs: Any) -> Kernel:
        """Compiles for these arguments, past the memory of this process."""
        made = self.get_tir(*args, **kwargs)
        return compile(made, self.out_idx, self.target, instrument=self.instrument, constants=self.constants(args, kwargs))

    def get_tir(self, *args: Any, **kwargs: Any) -> PrimFunc:
        """The ``@T.prim_func`` for these arguments, not compiled."""
        _named(self.func, args, kwargs)
        made = self.func(*args, **kwargs)
        if not isinstance(made, PrimFunc):
            code = self.func.__code__
            raise TileTypeError(
                f"{self.func.__name__} is under @tilescale.jit and returns {type(made).__name__}",
                loc=Loc(code.co_filename, code.co_firstlineno),
                expected="a function under @T.prim_func, or a body that opens T.Kernel itself",
            )
        return made

    def constants(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """The arguments as people read them."""
        return ", ".join(f"{k}={v}" for k, v in _named(self.func, args, kwargs).items())


class EagerKernel:
    """A kernel that is called with tensors: compiled for their dtypes and constant extents, then run."""

    def __init__(self, func: types.FunctionType, target: str | None, instrument: bool):
        functools.update_wrapper(self, func)
        self.func, self.target, self.instrument = func, target, instrument
        self.signature = inspect.signature(func)
        self._names = list(self.signature.parameters)
        self._defaults = {k: p.default for k, p in self.signature.parameters.items() if p.default is not inspect.Parameter.empty}
        self._made: dict[Any, tuple[Kernel, list[int]]] = {}
        self._dynamic: dict[str, tuple[bool, ...]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != len(self._names):
            values = list(_named(self.func, args, kwargs).values())
        else:
            values = list(args)
        key = []
        dynamic = self._dynamic
        for name, v in zip(self._names, values, strict=True):
            shape = getattr(v, "shape", None)
            if shape is None:
                key.append(v)
            elif name in dynamic:
                key.append((v.dtype, *(None if d else n for n, d in zip(shape, dynamic[name], strict=False)), len(shape)))
            else:
                key.append((v.dtype, *shape, len(shape)))
        try:
            found = self._made.get(tuple(key))
        except TypeError:
            found = None
        if found is None:
            found = self._compile(values, tuple(key))
        kernel, taken = found
        return kernel(*[values[k] for k in taken])

    def _compile(self, values: list[Any], key: tuple[Any, ...]) -> tuple[Kernel, list[int]]:
        """Traces and compiles for these arguments."""
        from tilescale.compiler.frontend.trace import TensorArg, trace_eager

        taken = [k for k, v in enumerate(values) if hasattr(v, "shape") and hasattr(v, "dtype") and len(v.shape)]
        target = target_of(self.target, [values[k] for k in taken])
        specs = PrimFunc(self.func).params

        def kind(name: str) -> str:
            return specs[name].kind if isinstance(specs.get(name), TensorSpec) else "tensor"

        tensors = {
            name: TensorArg(name, tuple(int(n) for n in values[k].shape), canonical(values[k].dtype), kind(name))
            for k, name in ((k, self._names[k]) for k in taken)
        }
        constants = {n: v for k, (n, v) in enumerate(zip(self._names, values, strict=True)) if k not in taken}
        shown = ", ".join(f"{k}={v}" for k, v in constants.items())
        plain = tuple((t.name, t.shape, t.dtype) for t in tensors.values())

        def traced() -> Any:
            return trace_eager(self.func, tensors, constants)

        kernel = _kernel(self.func, traced, ("eager", plain, constants), None, target, self.instrument, shown)
        made = (kernel, taken)
        for p in kernel.params:
            if p["kind"] != "scalar" and not p["output"]:
                self._dynamic.setdefault(p["name"], tuple(not isinstance(e, int) for e in p["shape"]))
        again = []
        for name, v in zip(self._names, values, strict=True):
            shape = getattr(v, "shape", None)
            flags = self._dynamic.get(name, ())
            again.append(v if shape is None else (v.dtype, *(None if d else n for n, d in zip(shape, flags, strict=False)), len(shape)))
        try:
            self._made[tuple(again)] = made
        except TypeError:
            say("info", f"{self.func.__name__} takes a constant without a hash and is looked up on disk at every call", once=True)
        return made


__all__ = ["Const", "EagerKernel", "Factory", "Sym", "TileError", "compile", "jit"]
