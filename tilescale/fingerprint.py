"""What a kernel depends on, in one hash, without tracing it or loading TVM: its code and that of every function it can call,
and every value that they capture, transitively.

Code is compared as Python compiled it (which holds the file's name and lines too: they are part of error messages), values by what
they are. A value of unknown nature makes the kernel unfit for the disk cache, which is said.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import marshal
import platform
import sys
import types
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from tilescale.language.annotations import ScalarSpec, TensorSpec
from tilescale.language.funcs import Macro, PrimFunc
from tilescale.language.symbolic import Sym, SymExpr

_ROOT = Path(__file__).resolve().parent.parent
_TVM = "0.27.0.post1"
#: Bytecode in a form whose bytes depend on the code alone: later versions of marshal share references by their count.
_MARSHAL_VERSION = 2


class Unknown(Exception):
    """A captured value that has no fingerprint."""


class Fingerprint:
    """Gathers what is fed to it into one hash."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []

    def text(self, *parts: str) -> None:
        for part in parts:
            data = part.encode()
            self._hash.update(len(data).to_bytes(8, "little") + data)

    def digest(self) -> str:
        return self._hash.hexdigest()

    def add(self, value: Any) -> None:
        """Feeds a value of any nature.

        Raises:
            Unknown: it has none that can be compared across processes.
        """
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes, type(Ellipsis))):
            self.text(type(value).__name__, repr(value))
            return
        if id(value) in self._seen:
            self.text("again", str(self._seen[id(value)]))
            return
        self._seen[id(value)] = len(self._seen)
        self._kept.append(value)
        for kinds, method in _METHODS:
            if isinstance(value, kinds):
                method(self, value)
                return
        self._other(value)

    def _sequence(self, value: Any) -> None:
        self.text(type(value).__name__, str(len(value)))
        for item in sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value:
            self.add(item)

    def _mapping(self, value: Any) -> None:
        self.text("dict", str(len(value)))
        for key, item in value.items():
            self.add(key)
            self.add(item)

    def _prim_func(self, value: PrimFunc) -> None:
        self.text("prim_func", value.name)
        self.add(value.params)
        self.add(value.func)

    def _macro(self, value: Macro) -> None:
        self.text("macro")
        self.add(value.func)

    def _symbol(self, value: SymExpr) -> None:
        self.text("symbol", str(value), getattr(value, "dtype", ""))

    def _spec(self, value: Any) -> None:
        for f in fields(value):
            self.text(f.name)
            self.add(getattr(value, f.name))

    def _enum(self, value: enum.Enum) -> None:
        self.text("enum", type(value).__qualname__, value.name, repr(value.value))

    def _function(self, func: types.FunctionType) -> None:
        module = func.__module__ or ""
        if module == "tilescale" or module.startswith("tilescale."):
            self.text("ours", module, func.__qualname__)
            return
        self.text("function", func.__qualname__)
        self._hash.update(marshal.dumps(func.__code__, _MARSHAL_VERSION))
        self.add(func.__defaults__)
        self.add(func.__kwdefaults__)
        for name, cell in zip(func.__code__.co_freevars, func.__closure__ or (), strict=True):
            self.text(name)
            try:
                self.add(cell.cell_contents)
            except ValueError:
                self.text("unbound")
        names = _names(func.__code__)
        for name in sorted(names & func.__globals__.keys()):
            self.text(name)
            held = func.__globals__[name]
            self._module(held, names) if isinstance(held, types.ModuleType) else self.add(held)

    def _module(self, module: types.ModuleType, names: set[str]) -> None:
        """A user's module by the attributes that the code may take from it; others by name and version."""
        file = getattr(module, "__file__", None)
        self.text("module", module.__name__, str(getattr(module, "__version__", "")))
        ours = module.__name__ == "tilescale" or module.__name__.startswith("tilescale.")
        if ours or file is None or "site-packages" in file or file.startswith((sys.base_prefix, sys.prefix)):
            return
        for name in sorted(names & vars(module).keys()):
            held = vars(module)[name]
            self.text(name)
            self.text("module", held.__name__) if isinstance(held, types.ModuleType) else self.add(held)

    def _partial(self, value: functools.partial) -> None:
        self.text("partial")
        self.add(value.func)
        self.add(value.args)
        self.add(value.keywords)

    def _builtin(self, value: Any) -> None:
        self.text("builtin", str(value.__module__), value.__qualname__)

    def _class(self, value: type) -> None:
        self.text("class", value.__module__, value.__qualname__)
        if value.__module__.split(".")[0] in ("builtins", "tilescale", "torch", "numpy", "ml_dtypes"):
            return
        for name, member in vars(value).items():
            if isinstance(member, (types.FunctionType, staticmethod, classmethod)):
                self.text(name)
                self.add(getattr(member, "__func__", member))
            elif isinstance(member, (bool, int, float, str, tuple)) and not name.startswith("__"):
                self.text(name)
                self.add(member)

    def _method(self, value: types.MethodType) -> None:
        self.add(value.__func__)
        self.add(value.__self__)

    def _other(self, value: Any) -> None:
        kind = type(value)
        if kind.__module__.split(".")[0] in ("torch", "numpy", "ml_dtypes") and kind.__name__ in ("dtype", "device"):
            self.text("foreign", str(value))
        elif kind.__module__.startswith("numpy") and getattr(value, "shape", None) == ():
            self.text("numpy", str(value.dtype), repr(value.item()))
        elif is_dataclass(value):
            self.add(kind)
            self._spec(value)
        elif hasattr(value, "__wrapped__") and isinstance(value.__wrapped__, types.FunctionType):
            self.add(value.__wrapped__)
        elif hasattr(value, "__dict__") and kind.__module__ not in ("builtins",) and not hasattr(value, "__array_interface__"):
            if any(hasattr(value, a) for a in ("__fspath__", "fileno", "data_ptr")):
                raise Unknown(f"a {kind.__qualname__}")
            self.add(kind)
            self.add(vars(value))
        else:
            raise Unknown(f"a {kind.__qualname__}")


_METHODS: list[tuple[Any, Callable[[Fingerprint, Any], None]]] = [
    (enum.Enum, Fingerprint._enum),
    ((tuple, list, set, frozenset, range), Fingerprint._sequence),
    ((dict, types.MappingProxyType), Fingerprint._mapping),
    (PrimFunc, Fingerprint._prim_func),
    (Macro, Fingerprint._macro),
    (Sym, Fingerprint._symbol),
    (SymExpr, Fingerprint._symbol),
    ((TensorSpec, ScalarSpec), Fingerprint._spec),
    (types.FunctionType, Fingerprint._function),
    (functools.partial, Fingerprint._partial),
    (types.MethodType, Fingerprint._method),
    (types.BuiltinFunctionType, Fingerprint._builtin),
    (type, Fingerprint._class),
]


def _names(code: types.CodeType) -> set[str]:
    """Every name that a code object and those nested in it may look up."""
    found = set(code.co_names)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            found |= _names(const)
    return found


@functools.cache
def toolchain() -> str:
    """This TileScale, this Python, this TVM, this processor: whatever else decides the code."""
    f = Fingerprint()
    f.text(_TVM, *map(str, sys.version_info[:2]), platform.machine(), _processor())
    folders = ("compiler", "tilescale/language", "tilescale/native")
    installed = not (_ROOT / "pyproject.toml").exists()
    for folder in folders:
        base = _ROOT / (folder if not installed or folder.startswith("tilescale") else f"tilescale/{folder}")
        for path in sorted([*base.rglob("*.py"), *base.rglob("*.[ch]")]):
            stat = path.stat()
            f.text(path.name, str(stat.st_size), str(stat.st_mtime_ns))
    return f.digest()


def _processor() -> str:
    """The processor's model and features, as the kernel lists them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part", "cpu family", "model")
    return "\n".join(line for line in lines if line.split(":")[0].strip() in wanted)
