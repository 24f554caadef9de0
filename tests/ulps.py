"""How far apart two arrays of one dtype are, in units of the last place."""

from __future__ import annotations

from typing import Any

import numpy as np

_ORDINAL = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


def ulps(a: Any, b: Any) -> Any:
    """For each element, how many representable values lie between the two, one end counted (float64; 0: one
    value). NaN equals NaN and is infinitely far from all others; zeros of either sign are one value; integers
    are apart by their difference.

    Raises:
        TypeError: the dtypes differ.
    """
    a, b = np.asarray(a), np.asarray(b)
    if a.dtype != b.dtype:
        raise TypeError(f"{a.dtype} and {b.dtype} have no common last place")
    if a.dtype.kind in "iub":
        return np.abs(a.astype(np.float64) - b.astype(np.float64))
    nan_a, nan_b = (np.isnan(x.astype(np.float64)) for x in (a, b))
    x, y = _ordinal(a), _ordinal(b)
    # No overflow.
    apart = np.where(
        (x < 0) == (y < 0), np.abs(x - y).astype(np.float64), np.abs(x).astype(np.float64) + np.abs(y)
    )
    return np.where(nan_a & nan_b, 0.0, np.where(nan_a | nan_b, np.inf, apart))


def _ordinal(x: Any) -> Any:
    """The place of each value in the order of its dtype's values; negative ones count down from zero."""
    kind = _ORDINAL[x.dtype.itemsize]
    bits = np.ascontiguousarray(x).view(kind).astype(np.int64)
    return np.where(bits < 0, -(bits & np.iinfo(kind).max), bits)


def worst(a: Any, b: Any) -> dict[str, float]:
    """The greatest distance, and which part of the elements is one value."""
    far = ulps(a, b)
    return {"most": float(far.max()), "equal": round(float((far == 0).mean()), 4)}
