"""None for a tensor that a kernel never touches: what a call hands to the launcher in its place."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tilescale.arrays import numpy_dtype
from tilescale.explain import is_torch
from tilescale.language.symbolic import FOLD


def stand_in(
    params: Sequence[dict[str, Any]],
    inputs: Sequence[int],
    multiples: Mapping[str, int],
    k: int,
    args: Sequence[Any],
) -> Any:
    """A tensor of any content for parameter ``k``, where the first tensor of the call lies. Its extents are
    those that the other arguments say; one that nothing else says is the least that the kernel takes."""
    said: dict[str, int] = {}
    for at, arg in zip(inputs, args, strict=True):
        for e, extent in zip(params[at].get("shape", ()), getattr(arg, "shape", ()), strict=False):
            if isinstance(e, str):
                said.setdefault(e, int(extent))
    known, p = {**multiples, **said}, params[k]
    shape = [_value(e, known) for e in p["shape"]]
    steps = p["strides"]
    like = next((a for a in args if is_torch(a)), None)
    if like is not None:
        torch = sys.modules["torch"]
        dtype = getattr(torch, p["dtype"])
        if steps is None:
            return torch.empty(shape, dtype=dtype, device=like.device)
        return torch.empty_strided(shape, [_value(s, known) for s in steps], dtype=dtype, device=like.device)
    import numpy

    if steps is None:
        return numpy.empty(shape, numpy_dtype(p["dtype"]))
    strides = [_value(s, known) for s in steps]
    room = 1 + sum(max(n - 1, 0) * s for n, s in zip(shape, strides, strict=True))
    held = numpy.empty(room, numpy_dtype(p["dtype"]))
    return numpy.lib.stride_tricks.as_strided(held, shape, [s * held.itemsize for s in strides])


def _value(e: Any, known: dict[str, int]) -> int:
    if isinstance(e, list):
        return int(FOLD[e[0]](_value(e[1], known), _value(e[2], known)))
    return known.get(e, 1) if isinstance(e, str) else int(e)
