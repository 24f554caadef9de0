"""A launch's arrays as the flat memory that a kernel sees."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilescale.language.symbolic import Sym, settle


def strides_of(spec: Any, array: Any, symbols: dict[str, int]) -> tuple[int, ...] | None:
    """A parameter's strides in elements, None where it is row-major. Strides that are symbols and not in
    ``symbols`` are read off the array as it was given, and noted there."""
    if spec.strides is None:
        return None
    found = []
    for stride, given in zip(spec.strides, array.strides, strict=True):
        known = settle(stride)
        found.append(
            symbols.setdefault(known.name, given // array.itemsize) if isinstance(known, Sym) else int(known)
        )
    return tuple(found)


def laid_out(array: Any, strides: tuple[int, ...] | None) -> tuple[Any, Any]:
    """Flat memory that holds a copy of the array with these strides, and a view of it in the array's
    shape."""
    if strides is None:
        flat = np.array(array, copy=True, order="C").reshape(-1)
        return flat, flat.reshape(array.shape)
    size = 1 + sum((n - 1) * s for n, s in zip(array.shape, strides, strict=True)) if array.size else 0
    flat = np.zeros(size, array.dtype)
    view = np.lib.stride_tricks.as_strided(flat, array.shape, [s * array.itemsize for s in strides])
    view[...] = array
    return flat, view
