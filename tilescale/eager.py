"""Eager kernels: the function's body is the kernel, and a call with tensors compiles it for their dtypes and constant extents."""

from __future__ import annotations

import inspect
import types
from typing import Any

from tilescale import build
from tilescale.errors import TileTypeError
from tilescale.jit import Jit, frozen
from tilescale.kernel import Kernel
from tilescale.language.annotations import TensorSpec
from tilescale.language.dtypes import canonical
from tilescale.language.funcs import PrimFunc


class Eager(Jit):
    """``@tilescale.jit`` over a function that opens ``T.Kernel`` itself."""

    def __init__(self, func: types.FunctionType, out_idx: Any, target: Any, instrument: bool):
        super().__init__(func, out_idx, target, instrument)
        self._names = list(self.signature.parameters)
        self._defaults = {k: p.default for k, p in self.signature.parameters.items() if p.default is not inspect.Parameter.empty}
        self._made: dict[Any, tuple[Kernel, list[int]]] = {}
        #: parameter → which of its extents are T.dynamic: known after the first trace, and left out of the keys from then on
        self._dynamic: dict[str, tuple[bool, ...]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != len(self._names):
            args = tuple(self.bound(args, kwargs).arguments.values())
        found = self._made.get(self._key(args))
        if found is None:
            found = self._compiled(args)
        kernel, taken = found
        return kernel(*[args[k] for k in taken])

    def _key(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """What decides the code of a call: dtypes, extents that are no T.dynamic, other arguments by value."""
        key: list[Any] = []
        dynamic = self._dynamic
        for name, v in zip(self._names, values, strict=True):
            shape = getattr(v, "shape", None)
            if shape is None:
                key.append(frozen(v))
            elif name in dynamic:
                key.append((v.dtype, len(shape), *(None if d else n for n, d in zip(shape, dynamic[name], strict=False))))
            else:
                key.append((v.dtype, len(shape), *shape))
        return tuple(key)

    def _kind(self, name: str) -> str:
        spec = PrimFunc(self.func).params.get(name)
        return spec.kind if isinstance(spec, TensorSpec) else "tensor"

    def _compiled(self, values: tuple[Any, ...]) -> tuple[Kernel, list[int]]:
        """Compiles for the arguments of a call."""
        from tilescale.compiler.frontend.trace import TensorArg, trace_eager

        taken = [k for k, v in enumerate(values) if hasattr(v, "shape") and hasattr(v, "dtype") and len(v.shape)]
        tensors = {}
        for k in taken:
            name = self._names[k]
            tensors[name] = TensorArg(name, tuple(int(n) for n in values[k].shape), canonical(values[k].dtype), self._kind(name))
        constants = {n: v for k, (n, v) in enumerate(zip(self._names, values, strict=True)) if k not in taken}
        plain = tuple((t.name, t.shape, t.dtype) for t in tensors.values())

        def program() -> Any:
            return trace_eager(self.func, tensors, constants)

        kernel = self._load(("call", plain, constants), constants, program)
        for p in kernel.params:
            if p["name"] in tensors:
                self._dynamic.setdefault(p["name"], tuple(not isinstance(e, int) for e in p["shape"]))
        made = (kernel, taken)
        self._made[self._key(values)] = made
        return made

    def compile(self, **given: Any) -> Kernel:
        """The kernel for the given ``T.const`` extents and constants, ahead of any call: ``matmul.compile(M=…, N=…, block_M=128)``.

        Raises:
            TileTypeError: a name that is neither a parameter nor an extent. TileValueError: an extent that is missing.
        """
        from tilescale.compiler.frontend.trace import TensorArg, trace_eager

        constants = {**self._defaults, **{k: v for k, v in given.items() if k in self.signature.parameters}}
        extents = {k: v for k, v in given.items() if k not in self.signature.parameters}
        for name, value in extents.items():
            if not isinstance(value, int):
                raise TileTypeError(f"{self.name} has no parameter {name!r}", expected=f"{self.name}{self.signature}")
        tensors = {name: TensorArg(name, None, None, self._kind(name)) for name in self._names if name not in constants}

        def program() -> Any:
            return trace_eager(self.func, tensors, constants, extents)

        return self._load(("ahead", tuple(tensors), constants, extents), {**extents, **constants}, program)

    def _load(self, identity: tuple[Any, ...], constants: dict[str, Any], program: Any) -> Kernel:
        label = build.label_of(self.name, constants)
        key = build.key_of(self.name, self.func, *identity, self.instrument)
        entry, cached = build.obtain(key, program, label, self.instrument)
        outputs = tuple(k for k, p in enumerate(entry.meta["params"]) if p["output"])
        returns = tuple(entry.meta["returns"])
        return Kernel(entry, label, program, out_idx=outputs, returns=returns, from_cache=cached, instrument=self.instrument)
