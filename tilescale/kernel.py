"""A compiled kernel: called with tensors, and asked what it is."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from tilescale.errors import LaunchError, Loc, TileError, TileTypeError, TileValueError
from tilescale.language.dtypes import canonical
from tilescale.language.symbolic import _FOLD

#: NumPy dtypes of ml_dtypes, which DLPack cannot carry → (DLPack's type code, bits)
_RETYPED = {"bfloat16": (4, 16), "float8_e4m3fn": (10, 8), "float8_e5m2": (12, 8)}


@dataclass
class Artifact:
    """A compiled kernel at rest: what the disk cache keeps. ``params`` is described in compiler/driver.py."""

    name: str
    library: Path
    desc: bytes
    sites: str
    params: list[dict[str, Any]]
    returns: list[int]
    source: str
    loc: tuple[str, int]
    constants: str = ""
    extra: dict[str, Any] = field(default_factory=dict)


class Kernel:
    """A compiled kernel. ``kernel(*tensors_and_scalars)`` runs it; parameters in ``out_idx`` are allocated and returned.

    Raises (when called):
        TileTypeError, TileValueError: an argument that does not fit its parameter, by name, with the declaration's line.
        LaunchError: a launch that failed while it ran.
    """

    def __init__(self, artifact: Artifact, out_idx: Sequence[int] | int | None = None, traced: Callable[[], Any] | None = None):
        from tilescale.native import make_kernel

        self.artifact, self.name, self.params = artifact, artifact.name, artifact.params
        self._traced = traced
        self.config: Any = None
        self.latency: float | None = None
        count = len(self.params)
        wanted = [out_idx] if isinstance(out_idx, int) else list(out_idx or [])
        for k in wanted:
            if not -count <= k < count:
                raise TileValueError(f"out_idx {k} of {self.name}, which has {count} parameters", loc=Loc(*artifact.loc))
        outputs = sorted({k % count for k in wanted} | {k for k, p in enumerate(self.params) if p["output"]})
        for k in outputs:
            if self.params[k]["kind"] != "tensor":
                p = self.params[k]
                raise TileValueError(f"out_idx names {p['name']}, which is no plain tensor", loc=_loc(p))
        self._outputs = outputs
        returned = artifact.returns or [k % count for k in wanted] or outputs
        self._returned = returned
        self._single = len(returned) == 1 and (isinstance(out_idx, int) or len(wanted) <= 1)
        names = "\n".join(f"param|{p['name']}|||" for p in self.params)
        label = f"{self.name}({artifact.constants})" if artifact.constants else self.name
        self._launch = make_kernel(artifact.library, artifact.desc, f"{artifact.sites}\n{names}".strip("\n"), label)
        self._checked = [k for k, p in enumerate(self.params) if any(isinstance(e, list) for e in p.get("shape") or ())]
        self._plain = not outputs and not self._checked

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._plain and not kwargs:
            try:
                self._launch(*args)
            except (TypeError, ValueError, RuntimeError) as error:
                self._again(error, list(args))
            return None
        return self._general(args, kwargs)

    # -- the slow paths -------------------------------------------------------------------------------------------
    def _general(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        full = self._arranged(args, kwargs)
        if self._checked or self._outputs:
            symbols = self._symbols(full)
            for k in self._checked:
                if k not in self._outputs:
                    self._check_expressions(k, full[k], symbols)
            like = next((a for k, a in enumerate(full) if k not in self._outputs and hasattr(a, "shape")), None)
            for k in self._outputs:
                full[k] = _empty(tuple(_evaluate(e, symbols) for e in self.params[k]["shape"]), self.params[k]["dtype"], like)
        try:
            self._launch(*full)
        except (TypeError, ValueError, RuntimeError) as error:
            self._again(error, full)
        if not self._outputs:
            return None
        out = [full[k] for k in self._returned]
        return out[0] if len(out) == 1 else tuple(out)

    def _arranged(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Positional and named arguments, one a parameter, None where the call allocates."""
        names = [p["name"] for p in self.params]
        takes = [k for k in range(len(names)) if k not in self._outputs]
        full: list[Any] = [None] * len(names)
        if len(args) > len(takes):
            self._count(len(args))
        for k, value in zip(takes, args, strict=False):
            full[k] = value
        for name, value in kwargs.items():
            if name not in names or names.index(name) in self._outputs:
                import difflib

                close = difflib.get_close_matches(name, names, 1)
                raise TileTypeError(
                    f"{self.name} has no parameter {name!r}", loc=Loc(*self.artifact.loc), expected=", ".join(names),
                    hint=f"{close[0]}=…" if close else None,
                )  # fmt: skip
            if full[names.index(name)] is not None:
                raise TileTypeError(f"{self.name} got {name!r} twice", loc=Loc(*self.artifact.loc))
            full[names.index(name)] = value
        if any(full[k] is None for k in takes):
            self._count(sum(full[k] is not None for k in takes))
        return full

    def _count(self, got: int) -> NoReturn:
        takes = [p["name"] for k, p in enumerate(self.params) if k not in self._outputs]
        raise TileTypeError(
            f"{self.name} takes {len(takes)} arguments, {got} given", loc=Loc(*self.artifact.loc), expected=f"({', '.join(takes)})"
        )

    def _symbols(self, full: list[Any]) -> dict[str, int]:
        """Symbolic extents, read off the arguments."""
        found: dict[str, int] = {}
        for p, a in zip(self.params, full, strict=True):
            for e, n in zip(p.get("shape") or (), getattr(a, "shape", ()), strict=False):
                if isinstance(e, str):
                    found.setdefault(e, int(n))
        return found

    def _check_expressions(self, k: int, value: Any, symbols: dict[str, int]) -> None:
        p = self.params[k]
        for axis, (e, got) in enumerate(zip(p["shape"], getattr(value, "shape", ()), strict=False)):
            if isinstance(e, list) and _evaluate(e, symbols) != got:
                raise TileValueError(
                    f"axis {axis} of {p['name']} has extent {got}", loc=_loc(p), expected=f"{_show(e)} = {_evaluate(e, symbols)}"
                )

    def _again(self, error: Exception, full: list[Any]) -> None:
        """After a refusal: once more with what tvm-ffi cannot take by itself made ready, or the refusal in the user's words."""
        text = str(error)
        if not text.startswith("TS:"):
            ready = [_ready(a) for a in full]
            if any(a is not b for a, b in zip(ready, full, strict=True)):
                try:
                    self._launch(*ready)
                    return
                except (TypeError, ValueError, RuntimeError) as second:
                    error, text = second, str(second)
        if not text.startswith("TS:"):
            raise TileTypeError(f"{self.name}: {text.splitlines()[0]}", loc=Loc(*self.artifact.loc)) from error
        if text.startswith("TS:kind:"):
            ready = [_ready(a) for a in full]
            if any(a is not b for a, b in zip(ready, full, strict=True)):
                try:
                    self._launch(*ready)
                    return
                except (TypeError, ValueError, RuntimeError) as second:
                    raise self._explained(str(second), full) from None
        raise self._explained(text, full) from None

    def _explained(self, text: str, full: list[Any]) -> TileError:
        """The launcher's terse refusal as an error with the parameter's declaration, what was expected, what to write instead."""
        what, rest = text[3:].split(":", 1)
        if what == "run":
            site, message = rest.split(":", 1)
            return LaunchError(f"{self.name}: {message}", loc=self._site(int(site)))
        number, axis_text, tail = rest.split(":", 2)
        expected, _, got = tail.partition(":")
        index, axis = int(number), int(axis_text)
        if what == "nargs":
            return self._wrong_count(int(got))
        if index < 0:
            return self._launch_refused(what, axis, expected, got)
        p = self.params[index]
        name, loc = p["name"], _loc(p)
        value = full[index] if index < len(full) else None
        shown = _describe(value)
        if what == "kind":
            need = f"a {p['dtype']} tensor of shape {_shape(p)}" if p["kind"] != "scalar" else f"a {p['dtype']} number"
            return TileTypeError(f"{name} is given {shown}", loc=loc, expected=need)
        if what == "dtype":
            return TileTypeError(f"{name} is of {got}", loc=loc, expected=p["dtype"], hint=f"{name}.to(torch.{p['dtype']})")
        if what == "device":
            return TileTypeError(
                f"{name} is {shown}, not in this processor's memory", loc=loc, expected="a CPU tensor", hint=f"{name}.cpu()"
            )
        if what == "ndim":
            return TileValueError(f"{name} has {got} axes: {shown}", loc=loc, expected=f"{expected} axes: {_shape(p)}")
        if what == "shape":
            return TileValueError(
                f"axis {axis} of {name} has extent {got}: {shown}", loc=loc, expected=f"{expected}, in {name}: {_shape(p)}"
            )
        if what == "contig":
            return TileValueError(
                f"{name} is not contiguous: axis {axis} has stride {got}", loc=loc, expected=f"row-major, stride {expected}",
                hint=f"{name}.contiguous(), or declare {name} a T.StridedTensor",
            )  # fmt: skip
        if what == "stride":
            return TileValueError(f"axis {axis} of {name} has stride {got}", loc=loc, expected=f"stride {expected}")
        if what == "align":
            return TileValueError(f"{name} does not start at a multiple of its {expected} bytes", loc=loc)
        if what == "range":
            return TileValueError(f"{name} is given {got}", loc=loc, expected=f"a value of {p['dtype']}")
        if what == "overlap":
            other = self.params[axis]["name"]
            return TileValueError(
                f"{name} and {other} overlap in memory and one of them is written", loc=loc, expected="arguments of their own memory",
                hint=f"{name}.clone()",
            )  # fmt: skip
        if what == "notsymm":
            call = "tilescale.comm.signals(shape)" if p["kind"] == "signal" else "tilescale.comm.empty(shape, dtype)"
            return TileTypeError(
                f"{name} is declared T.{'Signal' if p['kind'] == 'signal' else 'SymmTensor'} and is given an ordinary tensor: {got}",
                loc=loc, expected="symmetric memory, the same on every rank", hint=f"{name} = {call}",
            )  # fmt: skip
        if what == "team":
            return TileValueError(f"{name} belongs to team {got}, another argument to team {expected}", loc=loc, expected="one team")
        return TileValueError(f"{name}: {what}, expected {expected}, got {got}", loc=loc)

    def _wrong_count(self, got: int) -> TileError:
        try:
            self._count(got)
        except TileTypeError as error:
            return error

    def _launch_refused(self, what: str, axis: int, expected: str, got: str) -> TileError:
        loc = Loc(*self.artifact.loc)
        if what == "resident":
            return TileValueError(
                f"{self.name} starts {got} blocks that wait for one another", loc=loc,
                expected=f"at most {expected}, which are resident together", hint="loop over tiles with T.Persistent",
            )  # fmt: skip
        if what == "grid":
            return TileValueError(f"axis {axis} of the grid of {self.name} has {got} blocks", loc=loc, expected=f"1 to {expected}")
        if what == "cluster":
            return TileValueError(f"axis {axis} of the grid of {self.name} has {got} blocks", loc=loc, expected=f"a multiple of {expected}")
        return TileValueError(f"{self.name}: {what}, expected {expected}, got {got}", loc=loc)

    def _site(self, index: int) -> Loc:
        lines = self.artifact.sites.split("\n")
        if 0 <= index < len(lines) and lines[index].count("|") >= 3:
            _, _, file, line, *_ = lines[index].split("|")
            if file:
                text = linecache.getline(file, int(line)).rstrip()
                return Loc(file, int(line), len(text) - len(text.lstrip()), int(line), len(text))
        return Loc(*self.artifact.loc)

    # -- looking at it --------------------------------------------------------------------------------------------
    def get_kernel_source(self, kind: str = "thread") -> str:
        """The kernel's code: "thread" (thread IR), "tile" (tile IR), "scheduled", "llvm" or "asm".

        Raises:
            TileValueError: another kind, or one that a kernel loaded from the cache has to be traced again for and cannot be.
        """
        if kind == "thread":
            return self.artifact.source
        if kind in ("tile", "scheduled"):
            steps = self.trace()
            return steps[0][1] if kind == "tile" else steps[-1][1]
        if kind in ("llvm", "asm"):
            from tilescale.compiler.cpu import codegen
            from tilescale.compiler.driver import thread_functions

            functions = thread_functions(self._program())
            return codegen.get_llvm_ir(functions) if kind == "llvm" else codegen.get_asm(functions)
        raise TileValueError(f"there is no source {kind!r}", expected="thread, tile, scheduled, llvm or asm")

    def _program(self) -> Any:
        if self._traced is None:
            raise TileValueError(f"{self.name} cannot be traced again", hint="compile it with tilescale.compile(prim_func)")
        return self._traced()

    def trace(self) -> list[tuple[str, str]]:
        """What every pass left behind: (name, text), the traced tile IR first."""
        from tilescale.compiler.passes import pipeline

        _, steps = pipeline.run(self._program(), keep=True)
        return [(name, text) for name, text, _ in steps.steps]

    def get_profiler(self, tensor_supply: Callable[..., Any] | None = None, **symbols: int) -> Any:
        """Inputs made from the parameters' declarations, timing and comparison; ``symbols`` are the dynamic extents."""
        from tilescale.profiler import Profiler

        return Profiler(self, tensor_supply, symbols)

    def __repr__(self) -> str:
        return f"<kernel {self.name}({', '.join(p['name'] for p in self.params)})>"


def _loc(p: dict[str, Any]) -> Loc | None:
    return Loc(*p["loc"]) if p["loc"] else None


def _evaluate(e: Any, symbols: dict[str, int]) -> int:
    if isinstance(e, int):
        return e
    if isinstance(e, str):
        return symbols[e]
    op, a, b = e
    return int(_FOLD[op](_evaluate(a, symbols), _evaluate(b, symbols)))


def _show(e: Any) -> str:
    return f"({_show(e[1])} {e[0]} {_show(e[2])})" if isinstance(e, list) else str(e)


def _shape(p: dict[str, Any]) -> str:
    return "(" + ", ".join(_show(e) for e in p["shape"]) + ("," if len(p["shape"]) == 1 else "") + ")"


def _describe(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        where = f" on {value.device}" if hasattr(value, "device") and str(value.device) != "cpu" else ""
        return f"a tensor of {str(value.dtype).replace('torch.', '')} {tuple(value.shape)}{where}"
    return f"{value!r} ({type(value).__name__})"


def _ready(value: Any) -> Any:
    """An argument that tvm-ffi can take: NumPy scalars as numbers, ml_dtypes arrays under their own dtype, others unchanged."""
    kind = str(getattr(value, "dtype", ""))
    if type(value).__module__ == "numpy" and type(value).__name__ == "ndarray":
        if kind in _RETYPED:
            from tilescale.native import retype

            code, bits = _RETYPED[kind]
            return retype(value.view(f"uint{bits}"), code, bits)
        if kind == "bool":
            from tilescale.native import retype

            return retype(value.view("uint8"), 6, 8)
        if value.ndim == 0:
            return value.item()
    if type(value).__module__.startswith("numpy") and hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        return value.item()
    if getattr(value, "requires_grad", False):
        return value.detach()
    return value


def _empty(shape: tuple[int, ...], dtype: str, like: Any) -> Any:
    """An uninitialised tensor of the library that the other arguments come from (torch where there is none)."""
    if like is not None and type(like).__module__ == "numpy":
        import numpy

        if dtype in _RETYPED:
            import ml_dtypes

            return numpy.empty(shape, getattr(ml_dtypes, dtype))
        return numpy.empty(shape, dtype)
    import torch

    return torch.empty(shape, dtype=getattr(torch, canonical(dtype)))
