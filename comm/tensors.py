"""Symmetric memory as torch tensors and NumPy arrays. torch and NumPy are imported when first needed."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Sequence
from typing import Any

from tilescale.comm.backend import Block
from tilescale.errors import TileTypeError, TileValueError

_BYTES = {
    "bool": 1,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "uint16": 2,
    "int32": 4,
    "uint32": 4,
    "int64": 8,
    "uint64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
_ALIASES = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "int": "int64",
    "float8_e4m3": "float8_e4m3fn",
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
}


def dtype_name(dtype: Any) -> str:
    """``torch.float16``, ``numpy.float16``, ``numpy.dtype("float16")``, ``"float16"`` → ``"float16"``; else
    TileTypeError."""
    if isinstance(dtype, str):
        name = dtype
    elif isinstance(dtype, type):
        name = {float: "float32", int: "int64", bool: "bool"}.get(dtype, dtype.__name__)
    else:
        name = getattr(dtype, "name", None) or str(dtype)
    name = name.removeprefix("torch.")
    name = _ALIASES.get(name, name)
    if name not in _BYTES:
        raise TileTypeError(f"dtype {dtype!r} has no symmetric memory", expected=", ".join(_BYTES))
    return name


def normal_shape(shape: int | Sequence[int]) -> tuple[int, ...]:
    """An extent or a sequence of extents as a tuple of ints. Raises TileValueError for negative ones."""
    import operator

    try:
        extents = (
            (operator.index(shape),) if not isinstance(shape, Sequence) else tuple(map(operator.index, shape))
        )
    except TypeError as e:
        raise TileTypeError(f"shape {shape!r}", expected="an integer or a sequence of integers") from e
    if any(x < 0 for x in extents):
        raise TileValueError(f"shape {extents} has a negative extent")
    return extents


def byte_size(shape: tuple[int, ...], dtype: str) -> int:
    return math.prod(shape) * _BYTES[dtype]


def has_torch() -> bool:
    """Whether torch can be imported. A None in sys.modules says that it cannot."""
    return (
        sys.modules["torch"] is not None
        if "torch" in sys.modules
        else importlib.util.find_spec("torch") is not None
    )


def choose(like: str | None) -> str:
    """``"torch"`` or ``"numpy"``; None: torch where it is installed."""
    if like is None:
        return "torch" if has_torch() else "numpy"
    if like not in ("torch", "numpy"):
        raise TileValueError(f"like={like!r}", expected='"torch" or "numpy"')
    if like == "torch" and not has_torch():
        raise TileValueError(
            "like='torch' without torch, which is not installed", expected="numpy", hint='like="numpy"'
        )
    return like


def _numpy_dtype(name: str) -> Any:
    import numpy

    if name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        import ml_dtypes

        return numpy.dtype(getattr(ml_dtypes, name))
    return numpy.dtype(name)


def wrap(
    block: Block,
    shape: tuple[int, ...],
    dtype: str,
    like: str,
    at: int = 0,
    strides: tuple[int, ...] | None = None,
) -> Any:
    """The block's memory from byte ``at`` on as a tensor; ``strides`` in elements, row-major when None."""
    if block.device is not None:
        return _on_gpu(block, shape, dtype, like, at, strides)
    import numpy

    raw, size = numpy.asarray(block), _BYTES[dtype]
    if like == "numpy":
        in_bytes = None if strides is None else tuple(s * size for s in strides)
        return numpy.ndarray(shape, _numpy_dtype(dtype), raw, at, in_bytes)
    import torch

    flat = torch.from_numpy(raw[at : at + (len(raw) - at) // size * size]).view(getattr(torch, dtype))
    if strides is None:
        return flat[: math.prod(shape)].view(shape)
    return flat.as_strided(shape, strides)


def _on_gpu(
    block: Block, shape: tuple[int, ...], dtype: str, like: str, at: int, strides: tuple[int, ...] | None
) -> Any:
    if like == "numpy":
        raise TileTypeError("symmetric memory lies on GPUs, where NumPy cannot reach", hint='like="torch"')
    import torch

    from tilescale.comm.dlpack import Carrier

    flat = torch.from_dlpack(Carrier(block))
    item = _BYTES[dtype]
    flat = flat[at : at + (block.nbytes - at) // item * item].view(getattr(torch, dtype))
    return flat[: math.prod(shape)].view(shape) if strides is None else flat.as_strided(shape, strides)


def unwrap(tensor: Any) -> tuple[int, tuple[int, ...], str, str, tuple[int, ...]]:
    """Address, shape, dtype, kind and strides (in elements) of a torch tensor or a NumPy array. Raises
    TileTypeError."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return (
            tensor.data_ptr(),
            tuple(tensor.shape),
            dtype_name(tensor.dtype),
            "torch",
            tuple(tensor.stride()),
        )
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(tensor, numpy.ndarray):
        address, item = tensor.__array_interface__["data"][0], tensor.itemsize
        return (
            address,
            tensor.shape,
            dtype_name(tensor.dtype),
            "numpy",
            tuple(s // item for s in tensor.strides),
        )
    raise TileTypeError(
        f"{type(tensor).__name__} is no tensor",
        expected="a torch tensor or a NumPy array in symmetric memory",
    )


def fill(block: Block, shape: tuple[int, ...], dtype: str, like: str, value: Any) -> None:
    tensor = wrap(block, shape, dtype, like)
    if like == "numpy":
        tensor[...] = value
    else:
        tensor.fill_(value)
