"""What a call gives for a parameter ``p: T.ptr``: an address, or a tensor, which has to be what the kernel
takes the memory there for (``T.make_tensor``), as far as the call tells."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tilescale.arrays import as_numpy, is_tensor
from tilescale.device import Device
from tilescale.errors import TileError, TileTypeError, TileValueError
from tilescale.explain import is_torch, place, shape_text

_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv}


@dataclass(frozen=True)
class Pointers:
    """A kernel's name, target and parameters, and which of those its calls give."""

    name: str
    device: Device
    params: Sequence[dict[str, Any]]
    inputs: Sequence[int]


def address_in(kernel: Pointers, k: int, args: Sequence[Any], address: Callable[[Any], int | None]) -> Any:
    """What the launcher gets for input ``k`` of ``args``: a tensor of one int64, where the kernel reads it.
    ``address``: the function that gives a tensor's, or None.

    Raises:
        TileTypeError, TileValueError: no address, or a tensor that the kernel takes for another one.
        TypeError: ``TS:device:…``, a tensor of the other kind of memory.
    """
    import numpy

    value = args[k]
    at = value if isinstance(value, int) and not isinstance(value, bool) else address(value)
    p = kernel.params[kernel.inputs[k]]
    if at is None:
        raise TileTypeError(
            f"{kernel.name} takes an address, not {type(value).__name__}, for {p['name']}",
            loc=place(p["loc"]),
            expected="a tensor, or what its data_ptr() gives",
        )
    if is_tensor(value):
        _judge(kernel, k, value, args)
    if not 0 <= at < 1 << 64:
        raise TileValueError(
            f"{kernel.name}: {p['name']} is {at}, which is no address",
            loc=place(p["loc"]),
            expected="what a tensor's data_ptr() gives: 64 bits without a sign",
        )
    word = numpy.array([at], numpy.uint64).view(numpy.int64)
    if not kernel.device.gpu:
        return word
    torch = sys.modules["torch"]
    return torch.from_numpy(word).to("cuda")


def _judge(kernel: Pointers, k: int, value: Any, args: Sequence[Any]) -> None:
    p, torch = kernel.params[kernel.inputs[k]], is_torch(value)
    value = value if torch else as_numpy(value)
    name, there = p["name"], value.device.type if torch else "cpu"
    if there != kernel.device.memory:
        raise TypeError(f"TS:device:{kernel.inputs[k]}:-1:-1:1")  # 1: of what is no torch tensor, a CPU's
    taken = p.get("points") or ()
    if not taken:
        return

    def error(kind: type[TileError], message: str, expected: str, hint: str) -> TileError:
        return kind(f"{kernel.name}: {message}", loc=place(p["loc"]), expected=expected, hint=hint)

    dtype = str(value.dtype).removeprefix("torch.") if torch else value.dtype.name
    dtypes = list(dict.fromkeys(of["dtype"] for of in taken))
    if dtype not in dtypes:
        raise error(
            TileTypeError,
            f"{name} is a tensor of {dtype}",
            f"{' or '.join(dtypes)}, of which T.make_tensor takes it",
            f"{name}.to(torch.{dtypes[0]})" if torch else f'{name}.astype("{dtypes[0]}")',
        )
    shape = tuple(value.shape)
    steps = value.stride() if torch else [s // value.itemsize for s in value.strides]
    in_order = value.is_contiguous() if torch else value.flags.c_contiguous
    begins = value.data_ptr() if torch else value.ctypes.data
    if begins % 16 and value.nbytes:
        raise error(
            TileValueError,
            f"{name} begins at an address that is no multiple of 16",
            "tensors that do, as memory that is allocated does: kernels move it in vectors",
            f"{name}.clone()" if torch else f"{name}.copy()",
        )
    given = f"(its shape is {shape}, its strides are {tuple(steps)})"
    if not in_order and any(of["strides"] is None for of in taken):
        fix = f"{name}.contiguous()" if torch else f"numpy.ascontiguousarray({name})"
        raise error(
            TileValueError,
            f"{name} is not contiguous {given}",
            "row-major, as T.make_tensor takes it without strides",
            f"{fix}; or T.make_tensor(…, strides=…)",
        )
    have = 0 if 0 in shape else 1 + sum((n - 1) * abs(s) for n, s in zip(shape, steps, strict=True))
    for of in taken:
        need = _needed(of, kernel, args)
        if need is not None and need > have:
            strides = "" if of["strides"] is None else f", strides={shape_text(of['strides'])}"
            raise error(
                TileValueError,
                f"{name} has {have} elements {given}",
                f"{need} at least: T.make_tensor({name}, {shape_text(of['shape'])}{strides})",
                f"a larger {name}, or smaller extents",
            )


def _needed(of: dict[str, Any], kernel: Pointers, args: Sequence[Any]) -> int | None:
    """How many elements from the first to the last one of a tensor that a call makes; None where the call
    does not tell."""
    extents = [_value(e, kernel, args) for e in of["shape"]]
    if None in extents:
        return None
    shape = [int(e) for e in extents if e is not None]
    if any(n <= 0 for n in shape):
        return 0
    if of["strides"] is None:
        return math.prod(shape)
    steps = [_value(e, kernel, args) for e in of["strides"]]
    return (
        None if None in steps else 1 + sum((n - 1) * int(s or 0) for n, s in zip(shape, steps, strict=True))
    )


def _value(e: Any, kernel: Pointers, args: Sequence[Any]) -> int | None:
    """An extent of the metadata in this call."""
    if isinstance(e, list):
        a, b = (_value(x, kernel, args) for x in e[1:])
        return None if a is None or b is None or (e[0] == "//" and b == 0) else int(_OPERATORS[e[0]](a, b))
    if not isinstance(e, str):
        return e
    for arg, p in zip(args, (kernel.params[k] for k in kernel.inputs), strict=False):
        if p["name"] == e and p["kind"] == "scalar":
            return arg if isinstance(arg, int) else None  # the launcher refuses what is no number
        if e in p.get("shape", ()):
            found = getattr(arg, "shape", ())
            axis = p["shape"].index(e)
            return int(found[axis]) if axis < len(found) else None
    return None
