"""Eager kernels: the function's body is the kernel, and a call with tensors finds, or makes, the compiled one
that fits them.

What fits is decided by the dtypes, by the compile-time arguments, and by those extents that the kernel bakes
in: the first trace says which are ``T.dynamic``. From then on a call reads exactly that off its arguments, in
a function generated for the way it is called.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from tilescale import cache, devices, env, folders, log, tracing
from tilescale.build import (
    compiled,
    digest,
    for_this_job,
    in_order,
    kernel_of,
    key_of,
    label_of,
    label_of_launch,
    loaded,
)
from tilescale.devices import is_auto, resolve_target
from tilescale.errors import TileTypeError
from tilescale.explain import is_numpy, is_torch
from tilescale.jitted import Jit, frozen, loc_of, one_by_one, without_collection
from tilescale.kernel import Kernel
from tilescale.language.annotations import TensorSpec
from tilescale.language.dtypes import canonical, dtype
from tilescale.language.funcs import parameter_loc

if TYPE_CHECKING:
    from tilescale.compiler.ir.program import TileProgram

#: Kinds of compile-time arguments whose == and hash are their value's.
_SIMPLE = (int, float, bool, str, type(None), dtype)
#: A kernel that is called with ever new constant extents must not grow its tables without end.
_TABLE_LIMIT = 4096

Shapes = dict[str, tuple[int, ...]]
Baked = dict[str, set[int]]


def is_tensor(value: Any) -> bool:
    return is_torch(value) or is_numpy(value) or hasattr(value, "__dlpack__")


def stands_for_tensor(value: Any) -> bool:
    """A tensor, or the declaration of one with extents that are numbers: ``T.Tensor((64, 64), "float16")``
    in place of an argument, where nothing is run."""
    if isinstance(value, TensorSpec):
        return all(isinstance(e, int) for e in value.shape)
    return is_tensor(value)


class Eager(Jit):
    """``@tilescale.jit`` over a function whose body is the kernel: ``c = matmul(a, b)``.

    ``compile(a, b)`` gives the `Kernel` for such tensors without running it (tensors on torch's meta device
    will do), ``compile(M=1024, N=512)`` the one for those T.const extents.
    """

    def __init__(self, func: Any, out_idx: Any, target: Any, instrument: bool):
        super().__init__(func, out_idx, target, instrument or tracing.wanted())
        #: parameter → its axes whose extents are part of the code; None until a trace, or the disk, has said
        #: so
        self.baked: Baked | None = None
        self.dispatch: dict[Any, Callable[..., Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.fresh():
            self.dispatch.clear()
            self.baked = None
        pattern = (len(args), *kwargs) if kwargs else len(args)
        call = self.dispatch.get(pattern)
        if call is not None:
            return call(*args, **kwargs)
        result = self.slow(*args, **kwargs)
        self.dispatch[pattern] = dispatcher(self, pattern, args, kwargs)
        return result

    def slow(self, *args: Any, **kwargs: Any) -> Any:
        """A call that looks at everything."""
        tensors, constants = self._split(args, kwargs)
        return self._kernel(tensors, constants)(*tensors.values())

    def compile(self, *args: Any, **kwargs: Any) -> Kernel:
        """The kernel for arguments like these, or, without tensors, for T.const extents and constants given
        by name: ``matmul.compile(a, b)``, ``matmul.compile(M=1024, N=512, K=256, block_M=128)``. A
        declaration, ``T.Tensor((64, 64), "float16")``, stands for a tensor.

        Raises:
            TileTypeError: a name that is neither a parameter nor an extent. TileValueError: an extent that is
            missing.
        """
        if args or any(stands_for_tensor(v) for v in kwargs.values()):
            return self._kernel(*self._split(args, kwargs))
        return self._ahead(kwargs)

    def _named(self, given: dict[str, Any]) -> tuple[list[str], dict[str, Any], dict[str, int]]:
        """What a call without tensors says: the names of the tensors, the constants, the T.const extents."""
        parameters = self.signature.parameters
        defaults = {k: p.default for k, p in parameters.items() if p.default is not p.empty}
        constants = {**defaults, **{k: v for k, v in given.items() if k in parameters}}
        sizes = {k: v for k, v in given.items() if k not in parameters}
        for name, value in sizes.items():
            if not isinstance(value, int):
                raise TileTypeError(
                    f"{self.name} has no parameter {name!r}",
                    loc=loc_of(self.func),
                    expected=f"{self.name}{self.signature}",
                )
        return [name for name in parameters if name not in constants], constants, sizes

    def _ahead_program(
        self, names: list[str], constants: dict[str, Any], sizes: dict[str, int], part: int | None = None
    ) -> TileProgram:
        from tilescale.compiler.frontend.trace import TensorArg, trace_eager

        tensors = {name: TensorArg(name, None, None, "tensor") for name in names}
        return trace_eager(self.func, tensors, dict(constants), sizes, part)

    def _ahead(self, given: dict[str, Any]) -> Kernel:
        names, constants, sizes = self._named(given)

        whole, target = label_of(self.name, {**sizes, **constants}), resolve_target(self.target)

        def part(k: int) -> Kernel:
            key = key_of(
                self.name,
                self.func,
                "ahead",
                names,
                constants,
                sizes,
                self.instrument,
                *([k] if k else []),
                *devices.code_key(target),
            )
            label = label_of_launch(whole, k)

            def program() -> TileProgram:
                return self._ahead_program(names, constants, sizes, k)

            if devices.of(target).simulated:
                return self._simulated(key, label, program)
            return loaded(key, program, label, self.instrument, target)

        with without_collection():
            return in_order(part)

    def program(self, *args: Any, **kwargs: Any) -> TileProgram:
        from tilescale.compiler.frontend.trace import TensorArg, trace_eager

        if not args and not any(stands_for_tensor(v) for v in kwargs.values()):
            return self._ahead_program(*self._named(kwargs))
        tensors, constants = self._split(args, kwargs)
        given = {
            name: TensorArg(name, tuple(map(int, t.shape)), self._dtype(name, t), "tensor")
            for name, t in tensors.items()
        }
        return trace_eager(self.func, given, dict(constants))

    def get_tir(self, *args: Any, **kwargs: Any) -> TileProgram:
        """The same as :meth:`program`, under TileLang's name; without tensors for T.const extents and
        constants given by name."""
        return self.program(*args, **kwargs)

    def par_compile(
        self, configs: Iterable[Any], num_workers: int | None = None, ignore_error: bool = False
    ) -> list[Kernel | None]:
        """`compile` for each of ``configs``, a tuple of arguments or a dict of named ones, one after the
        other. ``ignore_error``: None for one that is refused."""
        return one_by_one(self.compile, configs, num_workers, ignore_error)

    def get_kernel_source(self, *args: Any, **kwargs: Any) -> str:
        """`Kernel.get_kernel_source` of the kernel for arguments like these."""
        return self.compile(*args, **kwargs).get_kernel_source()

    # -- which kernel
    # ---------------------------------------------------------------------------------------------
    def _split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Arguments by name: the tensors, in the order of the signature, and the compile-time rest."""
        given = self.bound(args, kwargs).arguments
        tensors = {name: value for name, value in given.items() if stands_for_tensor(value)}
        return tensors, {name: value for name, value in given.items() if name not in tensors}

    def _dtype(self, name: str, tensor: Any) -> str:
        try:
            return str(canonical(tensor.dtype))
        except (TileTypeError, AttributeError):
            raise TileTypeError(
                f"{self.name}: {name} is a tensor of {getattr(tensor, 'dtype', 'unknown dtype')}, which the "
                "language does not have",
                loc=parameter_loc(self.func, name),
            ) from None

    def _kernel(self, tensors: dict[str, Any], constants: dict[str, Any]) -> Kernel:
        shapes = {name: tuple(map(int, t.shape)) for name, t in tensors.items()}
        dtypes = {name: self._dtype(name, t) for name, t in tensors.items()}
        target = resolve_target(self.target, filter(is_tensor, tensors.values()))
        fixed = (
            target,
            tuple(dtypes.items()),
            tuple(map(len, shapes.values())),
            tuple((k, frozen(v)) for k, v in constants.items()),
        )
        kernel = None if self.baked is None else self.kernels.get((fixed, extents(self.baked, shapes)))
        if kernel is None:
            with without_collection():
                kernel = in_order(lambda k: self._obtain(shapes, dtypes, constants, target, k))
            assert self.baked is not None
            if len(self.kernels) >= _TABLE_LIMIT:
                self.kernels.clear()
            self.kernels[fixed, extents(self.baked, shapes)] = kernel
        return kernel

    def _learn(self, baked: Mapping[str, Any]) -> None:
        """What is baked only grows; functions that read less off their arguments are thrown away."""
        merged = {name: set(axes) | (self.baked or {}).get(name, set()) for name, axes in baked.items()}
        for name, axes in (self.baked or {}).items():
            merged.setdefault(name, axes)
        if merged != self.baked:
            self.baked = merged
            self.dispatch.clear()

    # -- making it
    # ------------------------------------------------------------------------------------------------
    def _simulated(self, key: str | None, label: str, program: Callable[[], TileProgram]) -> Kernel:
        """For the target sim: nothing lies on the disk."""
        from tilescale import simulator

        made = simulator.program_of(key, program)
        made.require_here()
        self._learn(baked_extents(made.traced))
        return simulator.kernel_of(made, label, program, self.instrument, None)

    def _obtain(
        self, shapes: Shapes, dtypes: dict[str, str], constants: dict[str, Any], target: str, part: int
    ) -> Kernel:
        """Launch ``part`` of a call. From the disk, or traced and compiled. Which extents are baked lies
        beside the kernels, so that a
        new process that finds both needs no trace."""

        def program() -> TileProgram:
            from tilescale.compiler.frontend.trace import TensorArg, trace_eager

            # A trace learns the values of T.const, so each has arguments of its own.
            args = {name: TensorArg(name, shape, dtypes[name], "tensor") for name, shape in shapes.items()}
            return trace_eager(self.func, args, dict(constants), part=part)

        label = label_of(
            self.name, {**{name: "x".join(map(str, s)) for name, s in shapes.items()}, **constants}
        )
        label = label_of_launch(label, part)
        ranks = [len(s) for s in shapes.values()]
        family = key_of(
            self.name,
            self.func,
            list(dtypes.items()),
            ranks,
            constants,
            self.instrument,
            *([part] if part else []),
            *devices.code_key(target),
        )
        if devices.of(target).simulated:
            return self._simulated(
                None if family is None else digest(f"{family} {sorted(shapes.items())}"), label, program
            )
        if family is None or env.DUMP.get() is not None:
            traced = program()
            self._learn(baked_extents(traced))
            return kernel_of(
                *compiled(None, lambda: traced, label, self.instrument, target),
                label,
                program,
                self.instrument,
            )
        while True:
            self._learn(_Family(family).read() or {} if self.baked is None else {})
            found = cache.lookup(self._key(family, shapes)) if self.baked else None
            if found is None:
                with cache.locked(family):
                    return self._compile(family, shapes, program, label, target)
            try:
                found = for_this_job(self._key(family, shapes), found, program)
                return kernel_of(found, True, label, program, self.instrument)
            except RuntimeError as error:
                log.say("warning", f"the cached kernel {label} does not load ({error}) and is rebuilt")
                cache.discard(self._key(family, shapes))

    def _compile(
        self, family: str, shapes: Shapes, program: Callable[[], TileProgram], label: str, target: str
    ) -> Kernel:
        """Under the family's lock: another process may have come first."""
        self._learn(_Family(family).read() or {})
        found = cache.lookup(self._key(family, shapes)) if self.baked else None
        if found is not None:
            return kernel_of(
                for_this_job(self._key(family, shapes), found, program), True, label, program, self.instrument
            )
        traced = program()
        self._learn(baked_extents(traced))
        assert self.baked is not None
        _Family(family).write(self.baked)
        entry = compiled(
            self._key(family, shapes), lambda: traced, label, self.instrument, target, locked=True
        )
        return kernel_of(*entry, label, program, self.instrument)

    def _key(self, family: str, shapes: Shapes) -> str:
        assert self.baked is not None
        return digest(f"{family} {sorted(extents(self.baked, shapes))}")


def baked_extents(program: TileProgram) -> dict[str, list[int]]:
    """Parameter → axes whose extents a trace turned into constants."""
    from tilescale.language.symbolic import settle

    return {
        p.name: [k for k, e in enumerate(p.spec.shape) if isinstance(settle(e), int)]
        for p in program.params
        if not p.output
    }


def extents(baked: Baked, shapes: Shapes) -> tuple[Any, ...]:
    """The constant extents of a call. A parameter that nothing is known of counts whole."""
    return tuple(
        (name, tuple((k, e) for k, e in enumerate(shape) if name not in baked or k in baked[name]))
        for name, shape in shapes.items()
    )


class _Family:
    """On disk: which extents the kernels of one function, dtypes and constants bake in."""

    def __init__(self, key: str):
        self.name = f"{key}.json"

    def read(self) -> dict[str, list[int]] | None:
        for folder in folders.readable("eager"):
            with contextlib.suppress(OSError, ValueError):
                return json.loads((folder / self.name).read_text())
        return None

    def write(self, baked: Baked) -> None:
        path = folders.writable("eager") / self.name
        aside = path.with_suffix(f".{os.getpid()}")
        aside.write_text(json.dumps({name: sorted(axes) for name, axes in baked.items()}))
        os.replace(aside, path)


def dispatcher(
    eager: Eager, pattern: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[..., Any]:
    """One way of calling an eager kernel (so many arguments by position, these by name) as a generated
    function: it reads dtypes, constant extents and compile-time arguments, looks them up, and calls the
    kernel."""
    parameters = eager.signature.parameters
    names = list(parameters)
    values = dict(zip(names, args)) | kwargs
    plain = all(
        p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and not is_tensor(p.default)
        for p in parameters.values()
    )
    if not plain or not all(is_tensor(v) or type(v) in _SIMPLE for v in values.values()):
        return eager.slow
    lines, parts = [], []
    by_device = is_auto(eager.target)
    for name, value in values.items():
        if not is_tensor(value):
            parts.append(f"type({name}), {name}")
            continue
        known = (eager.baked or {}).get(name)
        lines.append(f"_s_{name} = {name}.shape")
        if by_device and is_torch(value):  # what is no torch tensor has no such flag and goes the slow way
            parts += [f"{name}.{d.flag}" for d in devices.TABLE.values() if d.flag]
            by_device = False  # the launcher refuses tensors on different devices
        if known is None or len(known) == len(value.shape):
            parts.append(f"{name}.dtype, _s_{name}")
        else:
            parts += [f"{name}.dtype", f"len(_s_{name})", *(f"_s_{name}[{k}]" for k in sorted(known))]
    head = ", ".join([*names[: len(args)], *(["*", *kwargs] if kwargs else [])])
    again = ", ".join([*names[: len(args)], *(f"{k}={k}" for k in kwargs)])
    tensors = ", ".join(n for n in names if n in values and is_tensor(values[n]))
    body = "\n".join(
        f"        {line}" for line in [*lines, f"_key = ({', '.join(parts)},)", "_kernel = _table.get(_key)"]
    )
    text = f"""def call({head}):
    try:
{body}
    except (AttributeError, TypeError, IndexError):
        return _slow({again})
    if _kernel is None:
        _kernel = _find(_key, {again})
    return _kernel({tensors})
"""
    table: dict[Any, Kernel] = {}

    def find(_key: Any, *args: Any, **kwargs: Any) -> Kernel:
        kernel = eager.compile(*args, **kwargs)
        if (
            eager.dispatch.get(pattern) is made
        ):  # else more extents turned out to be baked in, and the key says too little
            if len(table) >= _TABLE_LIMIT:
                table.clear()
            table[_key] = kernel
        return kernel

    scope: dict[str, Any] = {"_table": table, "_find": find, "_slow": eager.slow}
    exec(compile(text, f"<call of {eager.name}>", "exec"), scope)
    made = scope["call"]
    return made
