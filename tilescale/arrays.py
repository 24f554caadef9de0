"""Tensors of any library as NumPy arrays of the same memory, small floats as ml_dtypes'. A leaf: imports
nothing of ours."""

from __future__ import annotations

import sys
from typing import Any

#: floats that NumPy has no name for → an integer of that width, by which their bits are handed over
SMALL_FLOATS = {"bfloat16": "int16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}

#: where a view of a peer's memory that sees who reads it (hosts.py) has the array itself
PEERS = "peers_array"


def is_tensor(value: Any) -> bool:
    """Whether a value has the shape and memory of a tensor: torch's, NumPy's, or anything with DLPack."""
    return hasattr(value, "__dlpack__") or hasattr(value, "__array_interface__") or hasattr(value, PEERS)


def as_numpy(value: Any) -> Any:
    """A torch tensor, a NumPy array or anything with DLPack as an array over the same memory, with the same
    strides.

    Raises:
        TypeError, ValueError, RuntimeError, BufferError: a tensor on another device, of a layout or a dtype
        that NumPy cannot see.
    """
    import numpy

    if isinstance(value, (numpy.ndarray, numpy.ma.MaskedArray)):
        return value
    if hasattr(value, PEERS):
        return getattr(value, PEERS)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        name = str(value.dtype).removeprefix("torch.")
        plain = value.detach()
        if name in SMALL_FLOATS:
            import ml_dtypes

            return plain.view(getattr(torch, SMALL_FLOATS[name])).numpy().view(getattr(ml_dtypes, name))
        return plain.numpy()
    return numpy.from_dlpack(value)


def numpy_dtype(name: str) -> Any:
    """NumPy's dtype of that name, ml_dtypes' where NumPy has none."""
    import numpy

    if name in SMALL_FLOATS:
        import ml_dtypes

        return numpy.dtype(getattr(ml_dtypes, name))
    return numpy.dtype(name)


def arguments(args: Any) -> Any:
    """The tensors in a dict of arguments (in its lists and behind its functions of the rank, too) as NumPy
    arrays."""
    if isinstance(args, dict):
        return {name: arguments(value) for name, value in args.items()}
    if isinstance(args, (list, tuple)):
        return [arguments(value) for value in args]
    if callable(args) and not is_tensor(args):
        return lambda rank: arguments(args(rank))
    return as_numpy(args) if is_tensor(args) and getattr(args, "shape", ()) != () else args
