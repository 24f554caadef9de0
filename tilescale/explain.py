"""Refusals of the launcher as errors for people: the parameter's declaration with a caret, what was expected,
what to write instead.

Everything here is the slow path: the launcher, in C, says ``TS:<check>:<parameter>:<axis>:<expected>:<got>``
and no more.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from tilescale import env
from tilescale.device import RUN_HERE, Device
from tilescale.errors import InternalError, LaunchError, Loc, TileError, TileTypeError, TileValueError

_DEVICES = {
    1: "cpu",
    2: "cuda",
    4: "opencl",
    7: "vulkan",
    8: "metal",
    10: "rocm",
    12: "ext_dev",
    13: "cuda (managed)",
    14: "oneapi",
}


def place(held: Sequence[Any] | None) -> Loc | None:
    """A `Loc` out of a kernel's metadata."""
    return None if held is None else Loc(*held)


def expr_text(e: Any) -> str:
    """A symbolic extent of the metadata as its author would write it."""
    if not isinstance(e, list):
        return str(e)
    op, a, b = e[0], expr_text(e[1]), expr_text(e[2])
    return f"{op}({a}, {b})" if op in ("min", "max") else f"({a} {op} {b})"


def extent_text(e: Any) -> str:
    """The same without parentheses around the whole."""
    text = expr_text(e)
    return text[1:-1] if text.startswith("(") else text


def symbols_in(e: Any) -> list[str]:
    """The names of the symbols of an extent, each once."""
    if isinstance(e, list):
        return list(dict.fromkeys(s for part in e[1:] for s in symbols_in(part)))
    return [e] if isinstance(e, str) else []


def as_declared(p: dict[str, Any]) -> dict[str, Any]:
    """A parameter with the extents that its author wrote, where the kernel's follow from others."""
    return {**p, **p.get("declared", {})}


def shape_text(extents: Sequence[Any]) -> str:
    inner = ", ".join(map(extent_text, extents))
    return f"({inner},)" if len(extents) == 1 else f"({inner})"


def declaration(p: dict[str, Any]) -> str:
    """``T.Tensor((m, 64), "float32")``: what a parameter was declared as."""
    kind, p = p["kind"], as_declared(p)
    if kind == "scalar":
        return f"T.{p['dtype']}"
    if p.get("pointer"):
        return "T.ptr"
    if kind == "signal":
        return f"T.Signal({shape_text(p['shape'])})"
    if kind == "packets":
        return f'T.Packets({shape_text(p["slots"])}, "{p["of"]}"{_dense(p)})'
    if p["strides"] is not None:
        return f'T.StridedTensor({shape_text(p["shape"])}, {shape_text(p["strides"])}, "{p["dtype"]}")'
    return f'T.{"SymmTensor" if kind == "symm" else "Tensor"}({shape_text(p["shape"])}, "{p["dtype"]}")'


def allocation(p: dict[str, Any]) -> str:
    """What a rank writes to get symmetric memory for a parameter."""
    call = {"signal": "signals", "packets": "packets"}.get(p["kind"], "empty")
    shape, dtype = (p["slots"], p["of"]) if call == "packets" else (p["shape"], p["dtype"])
    of = "" if call == "signals" else f', "{dtype}"'
    return f"tilescale.comm.{call}({shape_text(shape)}{of}{_dense(p)})"


def _dense(p: dict[str, Any]) -> str:
    """What a box of packets without marks is asked for by."""
    return ", dense=True" if p.get("dense") else ""


def is_torch(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_numpy(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def written(params: Sequence[dict[str, Any]], symbol: str) -> Any:
    """The expression that an author wrote where the kernel has a symbol of its own; else the symbol."""
    for p in params:
        for e, made in zip(as_declared(p).get("shape", ()), p.get("shape", ()), strict=True):
            if made == symbol:
                return e
    return symbol


def _at(e: Any, n: int) -> int:
    """A linear expression of one symbol, of which n is the value."""
    if not isinstance(e, list):
        return n if isinstance(e, str) else int(e)
    a, b = _at(e[1], n), _at(e[2], n)
    return a + b if e[0] == "+" else a - b if e[0] == "-" else a * b


def _given_shape(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f" (its shape is {tuple(shape)})" if shape is not None else ""


class Refusal:
    """One refused call: the kernel's target and metadata, every parameter's argument, and what the launcher
    said."""

    def __init__(
        self,
        device: Device,
        meta: dict[str, Any],
        args: Sequence[Any],
        param: int,
        axis: int,
        expected: str,
        got: str,
    ):
        self.target = device
        self.meta, self.args, self.index, self.axis, self.expected, self.got = (
            meta,
            args,
            param,
            axis,
            expected,
            got,
        )
        self.p = meta["params"][param] if param >= 0 else {"name": meta["name"], "loc": meta["loc"]}
        self.name = self.p["name"]
        self.arg: Any = args[param] if 0 <= param < len(args) else None

    def error(
        self, kind: type[TileError], message: str, *, expected: str | None = None, hint: str | None = None
    ) -> TileError:
        return kind(f"{self.meta['name']}: {message}", loc=place(self.p["loc"]), expected=expected, hint=hint)

    # -- one method a check
    # ---------------------------------------------------------------------------------------
    def kind(self) -> TileError:
        given = type(self.arg).__name__ if self.got == "object" else self.got
        article = "" if given == "None" else "an " if given[0] in "aeiou" else "a "
        if self.expected == "tensor":
            wanted = f"{declaration(self.p)}: a torch tensor, a NumPy array, or anything with DLPack"
            return self.error(TileTypeError, f"{self.name} is {article}{given}", expected=wanted)
        hint = (
            f"{self.name}.item()"
            if self.got == "tensor"
            else f"int({self.name})"
            if self.got == "float"
            else None
        )
        wanted = f"{'an int' if self.expected == 'int' else 'a float'} ({declaration(self.p)})"
        return self.error(TileTypeError, f"{self.name} is {article}{given}", expected=wanted, hint=hint)

    def dtype(self) -> TileError:
        hint = f"{self.name}.to(torch.{self.expected})"
        if is_numpy(self.arg):
            exotic = self.expected.startswith(("bfloat", "float8"))
            hint = f"{self.name}.astype({'ml_dtypes.' + self.expected if exotic else repr(self.expected)})"
        if self.p["kind"] in ("signal", "packets"):
            hint = allocation(self.p)
        got = str(getattr(self.arg, "dtype", self.got)).removeprefix("torch.")
        return self.error(
            TileTypeError, f"{self.name} is a tensor of {got}", expected=declaration(self.p), hint=hint
        )

    def device(self) -> TileError:
        where = (
            str(self.arg.device)
            if is_torch(self.arg)
            else _DEVICES.get(int(self.got), f"device type {self.got}")
        )
        memory = self.target.memory
        given = f"torch.from_numpy({self.name})" if is_numpy(self.arg) else self.name
        return self.error(
            TileTypeError,
            f"{self.name} is on {where}, and the kernel is compiled for the {self.target.name} target",
            expected=f"a tensor {self.target.where}",
            hint=f"{given}.{memory}()"
            if where != "meta"
            else f'torch.empty_like({self.name}, device="{memory}")',
        )

    def gpu(self) -> TileError:
        return self.error(
            TileValueError,
            f"{self.name} is on the GPU {self.got}, and the tensors before it are on the GPU {self.expected}",
            expected="arguments on one GPU",
            hint=f'{self.name}.to("{self.target.memory}:{self.expected}")',
        )

    def tma(self) -> TileError:
        if self.expected == "1":
            wanted = "elements side by side along the last axis"
        else:
            wanted = f"a multiple of {self.expected} elements: the GPU copies its tiles in units of 16 bytes"
        return self.error(
            TileValueError,
            f"axis {self.axis} of {self.name} has stride {self.got}{_given_shape(self.arg)}",
            expected=wanted,
            hint=f"pad the rows of {self.name}",
        )

    def spoiled(self) -> TileError:
        return self.error(
            TileValueError,
            f"a launch with the box {self.name} failed, and may have left packets in it",
            expected="a box that only whole launches have used",
            hint=f"{allocation(self.p)} on all ranks",
        )

    def symbol(self) -> TileError:
        name = extent_text(written(self.meta["params"], self.meta["symbols"][self.axis]))
        return self.error(
            TileValueError,
            f"the extent {name} is {self.got}",
            expected=f"at most {self.expected}: kernels count in 32 bits",
        )

    def ndim(self) -> TileError:
        message = (
            f"{self.name} has {self.got} {'axis' if self.got == '1' else 'axes'}{_given_shape(self.arg)}"
        )
        return self.error(TileValueError, message, expected=f"{self.expected}: {declaration(self.p)}")

    def shape(self) -> TileError:
        extent = as_declared(self.p)["shape"][self.axis]
        message = f"axis {self.axis} of {self.name} has extent {self.got}{_given_shape(self.arg)}"
        wanted = f"{self.expected}: {declaration(self.p)}"
        if not isinstance(extent, int):
            wanted = f"{self.expected} = {extent_text(extent)}{self._defined(extent)}"
        return self.error(TileValueError, message, expected=wanted)

    def multiple(self) -> TileError:
        """A promise about a T.dynamic that the call breaks."""
        extent, strides = self.p["shape"][self.axis], self.p["strides"]
        promised = self.meta["multiples"]
        if strides is None and (asked := written(self.meta["params"], extent)) != extent:
            (symbol,), factor = symbols_in(asked), _at(asked, 1) - _at(asked, 0)
            own = int(self.expected) // factor
            return self.error(
                TileValueError,
                f"axis {self.axis} of {self.name} has extent {self.got}{_given_shape(self.arg)}",
                expected=f"a multiple of {self.expected}, as {extent_text(asked)} is"
                + (f" of a T.dynamic({symbol!r}, multiple_of={own})" if own > 1 else ""),
                hint=f"pad {self.name}",
            )
        symbol, what = (
            (extent, "extent") if extent in promised or strides is None else (strides[self.axis], "stride")
        )
        shown = f'T.dynamic("{symbol}", multiple_of={self.expected}), or T.assume'
        if any("of" in p and p["kind"] == "tensor" for p in self.meta["params"]):
            shown += ", or rows of 4-bit numbers, two a byte"
        return self.error(
            TileValueError,
            f"{symbol} is {self.got}, the {what} of axis {self.axis} of {self.name}{_given_shape(self.arg)}",
            expected=f"a multiple of {self.expected}, which the kernel was promised: {shown}",
            hint=f"pad {self.name}, or promise less",
        )

    def _defined(self, extent: Any) -> str:
        """Where the values of an extent's symbols in this call came from."""
        found = [text for s in symbols_in(extent) if (text := self._source(s, s == extent))]
        return f", {'' if isinstance(extent, str) else 'where '}{' and '.join(found)}" if found else ""

    def _source(self, symbol: str, alone: bool) -> str:
        """``n is 4 by axis 0 of A``, or ``2 * n is 8 …``, where that says what n is; ``alone``: where."""
        for solved in (False, True):
            for k, p in enumerate(self.meta["params"]):
                own = as_declared(p)
                for what, key in (("axis", "shape"), ("the stride of axis", "strides")):
                    for axis, (e, made) in enumerate(zip(own.get(key) or (), p.get(key) or (), strict=True)):
                        fits = symbol in symbols_in(e) and isinstance(made, str) if solved else e == symbol
                        if fits:
                            by = f"by {what} {axis} of {p['name']}"
                            given = getattr(self.args[k], "shape", ()) if key == "shape" else ()
                            value = f" is {given[axis]}" if axis < len(given) else ""
                            return by if alone and not solved else f"{extent_text(e)}{value} {by}"
        return ""

    def contig(self) -> TileError:
        # The launcher looks at strides first; a shape that is wrong as well is what a person wants to hear
        # of.
        for axis, (want, got) in enumerate(
            zip(self.p["shape"], getattr(self.arg, "shape", ()), strict=False)
        ):
            if isinstance(want, int) and want != got:
                return Refusal(
                    self.target, self.meta, self.args, self.index, axis, str(want), str(got)
                ).shape()
        fix = f"numpy.ascontiguousarray({self.name})" if is_numpy(self.arg) else f"{self.name}.contiguous()"
        return self.error(
            TileValueError,
            f"{self.name} is not contiguous: axis {self.axis} has stride {self.got}{_given_shape(self.arg)}",
            expected=f"row-major, stride {self.expected} there: {declaration(self.p)}",
            hint=f"{fix}, or declare it T.StridedTensor(shape, strides, dtype)",
        )

    def stride(self) -> TileError:
        return self.error(
            TileValueError,
            f"axis {self.axis} of {self.name} has stride {self.got}{_given_shape(self.arg)}",
            expected=f"{self.expected}: {declaration(self.p)}",
        )

    def null(self) -> TileError:
        return self.error(
            TileValueError,
            f"{self.name} has no memory{_given_shape(self.arg)}",
            expected="elements in memory: a FakeTensor has none, nor a tensor whose storage was given back",
        )

    def align(self) -> TileError:
        return self.error(
            TileValueError,
            f"{self.name} begins {self.got} bytes behind a multiple of {self.expected}",
            expected=f"an address that is a multiple of {self.expected}"
            + (
                "; the kernel reads so many bytes at once"
                if self.target.gpu
                else f", the size of {self.p['dtype']}"
            ),
            hint=f"{self.name}.{'copy' if is_numpy(self.arg) else 'clone'}()",
        )

    def range(self) -> TileError:
        return self.error(
            TileValueError, f"{self.name} is {self.got}", expected=f"a value that fits {self.expected}"
        )

    def overlap(self) -> TileError:
        other = self.meta["params"][self.axis]
        written = [p["name"] for p in (self.p, other) if p["written"]]
        return self.error(
            TileValueError,
            f"{self.name} and {other['name']} share memory, and the kernel writes {' and '.join(written)}",
            expected="arguments that do not overlap, unless all are only read",
            hint=f"{self.name}.{'copy' if is_numpy(self.arg) else 'clone'}()",
        )

    def notsymm(self) -> TileError:
        return self.error(
            TileTypeError,
            f"{self.name} is {self.got}",
            expected=f"{declaration(self.p)}: symmetric memory of this rank",
            hint=f"{self.name} = {allocation(self.p)}",
        )

    def team(self) -> TileError:
        return self.error(
            TileValueError,
            f"symmetric arguments of different teams: {self.expected} and, for {self.name}, {self.got}",
            expected="one team in a launch",
        )

    def _launch(self, message: str, expected: str, hint: str | None = None) -> TileError:
        return TileValueError(
            f"{self.meta['name']}: {message}",
            loc=place(self.meta["launch_loc"]),
            expected=expected,
            hint=hint,
        )

    def grid(self) -> TileError:
        what = (
            "the grid's extents"
            if self.axis < 0
            else f"the grid's axis {'xyz'[self.axis]} of {self.got} blocks"
        )
        wanted = "no axis negative, and fewer than 2³¹ blocks in all"
        if self.target.gpu and self.axis > 0:
            wanted += f", at most {self.expected} along y and z"
        return self._launch(f"{what} cannot be launched", wanted)

    def cluster(self) -> TileError:
        axis = "xyz"[self.axis]
        message = f"the grid's axis {axis} is {self.got}, its clusters are {self.expected} wide"
        return self._launch(message, f"a multiple of {self.expected}")

    def parts(self) -> TileError:
        """A collective that does not fit the ranks that launch; in the simulator's words."""
        asked = self.meta["demands"][self.axis]
        if asked["root"]:
            text = f"there is no participant {self.got} that could be the root, there are {self.expected}"
            hint = f"0 ≤ root < {self.expected}"
        else:
            text = f"{self.expected} take part, and {asked['whole']} has {self.got} parts"
            hint = f"a leading axis of {self.expected}, one for each who takes part"
        return TileValueError(
            f"{self.meta['name']}: {asked['collective']}: {text}", loc=place(asked["loc"]), hint=hint
        )

    def resident(self) -> TileError:
        meta, spare = self.meta, env.SPARE.get()
        left = f", {spare} multiprocessors left to others (TILESCALE_SPARE)" if spare else ""
        return self._launch(
            f"blocks wait for others, the grid has {self.got} blocks, and {self.expected} are resident at "
            "once "
            f"({meta['threads']} threads and {meta['shared_bytes']} bytes of shared memory each{left})",
            f"at most {self.expected} blocks where blocks wait",
            "a smaller grid whose blocks loop over tiles with T.Persistent",
        )


_CHECKS: dict[str, Callable[[Refusal], TileError]] = {
    name: getattr(Refusal, name)
    for name in (
        "kind",
        "dtype",
        "device",
        "ndim",
        "shape",
        "multiple",
        "contig",
        "stride",
        "null",
        "align",
        "range",
        "overlap",
        "notsymm",
        "team",
        "grid",
        "cluster",
        "parts",
        "resident",
        "spoiled",
        "gpu",
        "tma",
        "symbol",
    )
}


def explain(
    device: Device, meta: dict[str, Any], sites: Sequence[str], args: Sequence[Any], text: str
) -> TileError:
    """The error behind what the launcher of ``device`` says, which begins with ``TS:``. ``args``: one for
    each parameter, outputs too."""
    if text.startswith("TS:failed:"):
        return failure(text)
    if text.startswith("TS:run:"):
        return _running(device, meta, sites, text)
    _, check, param, axis, expected, got = text.split(":", 5)
    method = _CHECKS.get(check)
    if method is None:
        return InternalError(f"{meta['name']}: the launcher refused the call: {text}")
    return method(Refusal(device, meta, args, int(param), int(axis), expected, got))


def failure(text: str) -> LaunchError:
    """The error behind ``TS:failed:<kernel>|<file>|<line>|<message>``: a launch on a GPU, of this kernel or
    an earlier one, has failed."""
    name, file, line, message = text.removeprefix("TS:failed:").split("|", 3)
    loc = Loc(file, int(line)) if file and line.isdigit() else None
    return LaunchError(f"{name}: {message}", loc=loc, hint=_agreed(message, loc))


def _agreed(message: str, loc: Loc | None) -> str | None:
    """What to write where ranks' launches differ though they launch one kernel."""
    same = "launched the same kernel with different "
    if same + "shapes" not in message and same + "code or constants" not in message:
        return None
    if loc is None or "/tilescale/ops/ranks/" not in loc.file:
        return "extents and constants that are alike on all ranks"
    return (
        "arguments of the same shape on all ranks; where they have different numbers of rows, rows= of an "
        "operation or a layer (tokens= of moe_dispatch), alike on all ranks, says how many there are"
    )


def _running(device: Device, meta: dict[str, Any], sites: Sequence[str], text: str) -> LaunchError:
    _, _, site, message = text.split(":", 3)
    loc = None
    if 0 <= int(site) < len(sites):
        _, _, file, line, _ = (sites[int(site)].split("|", 4) + [""] * 4)[:5]
        if file and line.isdigit():
            loc = Loc(file, int(line))
            message = message.removesuffix(f" ({file}:{line})")
    if "no kernel image" in message:
        message += f"; the kernel is compiled for {meta.get('arch')}"
    loc = loc or place(meta["loc"])
    hint = RUN_HERE if device.absent and device.absent in message else _agreed(message, loc)
    return LaunchError(f"{meta['name']}: {message}", loc=loc, hint=hint)
