"""What decides the code of a kernel, as a hash that needs neither a trace nor TVM.

A kernel's manifest is: the source text and place of its function and, transitively, of every Python function,
macro and class that it names; the values of the globals, closure cells, module attributes and defaults that
they name; what its parameters' annotations say. Names are found in the syntax tree and not in the bytecode,
which has forgotten the annotations of local names.

What cannot be hashed by value (an open file, a torch tensor) raises `Unhashable`: such a kernel is compiled
in each process.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import enum
import functools
import hashlib
import os
import sys
import sysconfig
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tilescale import source_text
from tilescale.errors import TileError
from tilescale.language.annotations import ScalarSpec, TensorSpec
from tilescale.language.funcs import Macro, PrimFunc, switches_of
from tilescale.language.symbolic import SymExpr, symbols_of

_HERE = Path(__file__).resolve().parent
#: Code that is fixed by a version (ours by `sources`) and never followed.
_FIXED = ("tilescale", "torch", "numpy", "ml_dtypes", "tvm", "tvm_ffi", "builtins")
_STDLIB = frozenset(sys.stdlib_module_names) - {"test"}
_FUNCTION_LIMIT = 2000


class Unhashable(TileError):
    """A value that a kernel uses and that has no hash across processes."""


def _top(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _is_fixed(module: str | None) -> bool:
    """Whether a module's code never matters beyond its version. Kernels of ours, in tilescale.ops, are hashed
    like anybody's."""
    top = _top(module)
    if top == "tilescale" and (module == "tilescale.ops" or str(module).startswith("tilescale.ops.")):
        return False
    return top in _FIXED or top in _STDLIB


@dataclasses.dataclass(frozen=True)
class _Names:
    """The free names of a function's source, with the attribute chains that start at them: ``a.b.c`` is ("a",
    "b", "c")."""

    text: str
    chains: tuple[tuple[str, ...], ...]


class _Collect(ast.NodeVisitor):
    def __init__(self) -> None:
        self.chains: dict[tuple[str, ...], None] = {}

    def visit_Attribute(self, node: ast.Attribute) -> None:
        names: list[str] = []
        at: ast.expr = node
        while isinstance(at, ast.Attribute):
            names.append(at.attr)
            at = at.value
        if isinstance(at, ast.Name):
            chain = (at.id, *reversed(names))
            self.chains[chain] = None
        else:
            self.visit(at)

    def visit_Name(self, node: ast.Name) -> None:
        self.chains[(node.id,)] = None


#: id of a code object → it and its names. By identity: two that are equal may differ in the annotations of
#: their local names, and come from different files.
_known: dict[int, tuple[types.CodeType, _Names]] = {}


def _names(func: types.FunctionType) -> _Names:
    code = func.__code__
    held = _known.get(id(code))
    if held is None:
        held = _known[id(code)] = (code, _names_in_source(func) or _names_in_bytecode(code))
    return held[1]


def _names_in_source(func: types.FunctionType) -> _Names | None:
    """None where a function has no definition whose text is the one that it was compiled from: lambdas, what
    dataclasses and enums generate, helpers whose file has changed since. No kernel is compiled from such, so
    their local annotations mean nothing and the bytecode has everything."""
    source = source_text.find(func)
    if source is None:
        return None
    collect = _Collect()
    # Decorators and defaults were evaluated when the function was made; their values are hashed as what they
    # are.
    for part in ast.iter_child_nodes(source.node):
        if part not in source.node.decorator_list:
            collect.visit(part)
    return _Names(source.text, tuple(collect.chains))


def _names_in_bytecode(code: types.CodeType) -> _Names:
    text = [code.co_code.hex(), repr(code.co_names), repr(code.co_varnames)]
    chains: dict[tuple[str, ...], None] = {(name,): None for name in (*code.co_names, *code.co_freevars)}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = _names_in_bytecode(constant)
            text.append(inner.text)
            chains.update(dict.fromkeys(inner.chains))
        else:
            text.append(_shown(constant))
    return _Names("\n".join(text), tuple(chains))


def _shown(constant: Any) -> str:
    """A constant of bytecode, alike in all processes: the order of a set's strings is not, which frozen
    dataclasses have from Python 3.12 on."""
    if isinstance(constant, frozenset):
        return f"frozenset({sorted(map(_shown, constant))})"
    if isinstance(constant, tuple):
        return f"({', '.join(map(_shown, constant))})"
    return repr(constant)


class Fingerprint:
    """Feeds values into a hash, each with a tag, so that 1, True and "1" differ."""

    def __init__(self) -> None:
        self.hash = hashlib.blake2b(digest_size=16)
        self.seen: dict[int, int] = {}
        self.alive: list[Any] = []  # so that no id is used twice

    def put(self, *parts: str | bytes) -> None:
        for part in parts:
            data = part if isinstance(part, bytes) else part.encode(errors="surrogatepass")
            self.hash.update(len(data).to_bytes(8, "little") + data)

    def hexdigest(self) -> str:
        return self.hash.hexdigest()

    def _first_time(self, value: Any, tag: str) -> bool:
        """Whether an object is met for the first time; later it is named by its number, which also ends
        cycles."""
        known = self.seen.get(id(value))
        if known is not None:
            self.put("again", tag, str(known))
            return False
        self.seen[id(value)] = len(self.seen)
        self.alive.append(value)
        return True

    # -- values
    # ---------------------------------------------------------------------------------------------------
    def value(self, v: Any, what: str) -> None:
        """Adds a value; ``what`` names it for people.

        Raises:
            Unhashable: the value has no hash that another process would agree with.
        """
        if (
            v is None
            or isinstance(v, (bool, int, float, complex, bytes, type(Ellipsis)))
            and not isinstance(v, enum.Enum)
        ):
            self.put(type(v).__name__, repr(v))
        elif isinstance(v, str) and not isinstance(v, enum.Enum):
            self.put("str", str(v))
        elif isinstance(v, SymExpr):
            self.put(
                "symbol",
                str(v),
                getattr(v, "dtype", ""),
                *(f"{s}: {s.multiple_of}" for s in symbols_of(v) if s.multiple_of > 1),
            )
        elif isinstance(v, (list, tuple)):
            self.put(type(v).__name__, str(len(v)))
            for k, x in enumerate(v):
                self.value(x, f"{what}[{k}]")
        elif isinstance(v, (dict, types.MappingProxyType)):
            self.put("dict", str(len(v)))
            for k, x in v.items():
                self.value(k, f"a key of {what}")
                self.value(x, f"{what}[{k!r}]")
        elif isinstance(v, (set, frozenset)):
            self.put("set", *sorted(_separate(x, what) for x in v))
        elif isinstance(v, range | slice):
            self.put(type(v).__name__, repr(v))
        else:
            self._object(v, what)

    def _object(self, v: Any, what: str) -> None:
        if isinstance(v, enum.Enum):
            self.put("enum", type(v).__module__, type(v).__qualname__, v.name)
            self.value(v.value, what)
        elif isinstance(v, TensorSpec):
            self.put("tensor", v.kind, str(v.dtype), str(v.keep), str(v.of), str(v.dense))
            self.value((v.shape, v.strides, v.slots), what)
        elif isinstance(v, ScalarSpec):
            self.put("scalar", str(v.dtype))
        elif isinstance(v, PrimFunc):
            if self._first_time(v, "kernel"):
                self.put("kernel")
                self.value(v.params, what)
                self.function(v.func)
        elif isinstance(v, Macro):
            self.put("macro")
            self.function(v.func)
        elif isinstance(v, types.FunctionType):
            self.function(v)
        elif isinstance(v, types.MethodType):
            self.value(v.__func__, what)
            self.value(v.__self__, f"what {what} is bound to")
        elif isinstance(v, functools.partial):
            self.put("partial")
            self.value((v.func, v.args, v.keywords), what)
        elif isinstance(v, (staticmethod, classmethod)):
            self.value(v.__func__, what)
        elif isinstance(v, property):
            self.value((v.fget, v.fset), what)
        elif isinstance(v, types.ModuleType):
            self._module(v, what)
        elif isinstance(v, type):
            self._class(v, what)
        elif (
            callable(v)
            and _is_fixed(getattr(v, "__module__", None) or type(v).__module__)
            and hasattr(v, "__name__")
        ):
            self.put(
                "fixed",
                str(getattr(v, "__module__", "")),
                type(v).__qualname__,
                getattr(v, "__qualname__", v.__name__),
            )
        elif callable(v) and hasattr(v, "__wrapped__") and _is_fixed(type(v).__module__):
            self.put("wrapped", type(v).__qualname__)  # functools.lru_cache and its kin
            self.value(v.__wrapped__, what)
        elif (
            type(v).__name__ in ("IntImm", "FloatImm") and _top(type(v).__module__) == "tvm"
        ):  # T.infinity(dtype) and its kin
            self.put("constant", str(v.ty), repr(v.value))
        else:
            self._instance(v, what)

    def _module(self, v: types.ModuleType, what: str) -> None:
        """A module that is passed around as a value: all of its source may matter."""
        if _is_fixed(v.__name__):
            self.put("module", v.__name__)
            return
        source = source_text.module_as_imported(v)
        if source is None:
            raise Unhashable(
                f"{what} is the module {v.__name__}, whose source is not there, or has changed since it was "
                "imported"
            )
        self.put("module", v.__name__, str(v.__file__), source)  # the file as a function's place

    def _class(self, v: type, what: str) -> None:
        if _is_fixed(v.__module__):
            self.put("class", v.__module__, v.__qualname__)
        elif self._first_time(v, "class"):
            self.put("class", v.__module__, v.__qualname__)
            for base in v.__bases__:
                self.value(base, f"the base of {what}")
            for name, member in vars(v).items():
                if name not in ("__dict__", "__weakref__", "__doc__", "__module__") and not isinstance(
                    member, (types.MemberDescriptorType, types.GetSetDescriptorType)
                ):
                    if (
                        name.startswith(("__dataclass", "__abstract"))
                        or name.startswith("_")
                        and issubclass(v, enum.Enum)
                    ):
                        continue
                    self.put(name)
                    self.value(member, f"{what}.{name}")

    def _instance(self, v: Any, what: str) -> None:
        kind = type(v)
        top = _top(kind.__module__)
        if top == "torch" and kind.__name__ in ("dtype", "device", "Size"):
            self.put("torch", repr(v))
        elif top == "numpy" and kind.__name__ == "ndarray":
            if v.dtype.hasobject or v.nbytes > 1 << 20:
                raise Unhashable(f"{what} is an array of {v.nbytes} bytes")
            self.put("array", str(v.dtype), str(v.shape), v.tobytes())
        elif top == "numpy" and (
            hasattr(v, "dtype") or kind.__name__.endswith("DType") or hasattr(v, "itemsize")
        ):
            self.put("numpy", kind.__name__, repr(v))
        elif _is_fixed(kind.__module__):
            raise Unhashable(f"{what} is a {kind.__module__}.{kind.__qualname__}")
        elif self._first_time(v, "instance"):
            self.put("instance")
            self._class(kind, f"the class of {what}")
            slots = [n for c in kind.__mro__ for n in getattr(c, "__slots__", ()) if hasattr(v, n)]
            if not hasattr(v, "__dict__") and not slots:
                raise Unhashable(f"{what} is a {kind.__qualname__}, whose contents cannot be seen")
            self.value({**{n: getattr(v, n) for n in slots}, **getattr(v, "__dict__", {})}, what)

    # -- functions
    # ------------------------------------------------------------------------------------------------
    def function(self, f: types.FunctionType) -> None:
        """Adds a function: its text and place, and what it names."""
        if _is_fixed(f.__module__):
            self.put("fixed", str(f.__module__), f.__qualname__)
            return
        if not self._first_time(f, "function"):
            return
        if len(self.seen) > _FUNCTION_LIMIT:
            raise Unhashable(f"more than {_FUNCTION_LIMIT} functions and objects are used")
        code, names = f.__code__, _names(f)
        # The place counts: reports of a cached kernel name it.
        place = code.co_filename, str(code.co_firstlineno)
        self.put("function", f.__qualname__, *place, names.text, *sorted(switches_of(f)))
        self.value((f.__defaults__, f.__kwdefaults__), f"a default of {f.__name__}")
        for what, found in _resolved(f, names):
            self.put(what)
            self.value(found, what)


def _separate(value: Any, what: str) -> str:
    one = Fingerprint()
    one.value(value, what)
    return one.hexdigest()


def _resolved(f: types.FunctionType, names: _Names) -> Iterator[tuple[str, Any]]:
    """``(dotted name, value)`` of what a function's free names stand for now. Through modules the chain is
    followed to its end."""
    cells = dict(zip(f.__code__.co_freevars, f.__closure__ or (), strict=True))
    local = {*f.__code__.co_varnames, *f.__code__.co_cellvars}
    for head, *rest in names.chains:
        if head in cells:
            try:
                value = cells[head].cell_contents
            except ValueError:  # not bound yet
                continue
        elif head in local:
            continue
        elif head in f.__globals__:
            value = f.__globals__[head]
        elif hasattr(builtins, head):
            continue
        else:
            continue  # bound inside, or unknown: then the trace says so
        name = head
        for attr in rest:
            if not isinstance(value, types.ModuleType) or _is_fixed(value.__name__):
                break
            name = f"{name}.{attr}"
            value = getattr(value, attr, None)
        yield name, value


# ---- the rest of the key


@functools.lru_cache(maxsize=1)
def sources() -> str:
    """A hash of the compiler's and the language's own source: another version of TileScale never meets this
    one's kernels."""
    h = hashlib.blake2b(digest_size=16)
    root = _HERE / "compiler" if (_HERE / "compiler").is_dir() else _HERE.parent / "compiler"
    for folder in (root, _HERE / "language"):
        for path in sorted(_python_files(folder)):
            with open(path, "rb") as f:
                h.update(path[len(str(folder)) :].encode() + b"\0" + f.read() + b"\0")
    for path in (str(_HERE / "native" / "ts_rt.h"), str(_HERE / "cache.py"), str(_HERE / "kernel.py")):
        with open(path, "rb") as f:
            h.update(f.read())
    return h.hexdigest()


def _python_files(folder: str | os.PathLike[str]) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                if entry.name != "__pycache__":
                    yield from _python_files(entry.path)
            elif entry.name.endswith(".py"):
                yield entry.path


@functools.lru_cache(maxsize=1)
def processor() -> str:
    """What the code is compiled for: this machine's processor and its features, as Linux tells them."""
    wanted = (
        "vendor_id",
        "cpu family",
        "model",
        "model name",
        "flags",
        "Features",
        "CPU implementer",
        "CPU part",
    )
    found = [os.uname().machine]
    try:
        with open("/proc/cpuinfo") as f:
            for (
                line
            ) in f:  # the first processor's paragraph: reading on would cost milliseconds on large machines
                if not line.strip():
                    break
                if line.partition("\t")[0].strip() in wanted:
                    found.append(line.strip())
    except OSError:
        import platform

        found.append(platform.processor())
    return "\n".join(found)


def environment() -> tuple[str, ...]:
    """What decides the code besides the kernel itself."""
    return (sources(), processor(), f"{sys.version_info[0]}.{sys.version_info[1]}", sysconfig.get_platform())
