"""What operations on whole tiles compute. Sums are taken in float64 and rounded once to the accumulator's
dtype, so that their order says nothing and every target is measured against the same number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilescale.compiler.sim import numerics


def converted(stored: Any, src: str, dst: str) -> Any:
    """Elements as they lie in memory, from one dtype to another."""
    if src == dst:
        return stored
    array = numerics.decode(np.atleast_1d(stored), src)
    return numerics.encode(numerics.cast(array, src, dst), dst).reshape(np.shape(stored))


def matrix(stored: Any) -> Any:
    """A region as rows and columns: its axes of extent other than one, filled up from the back."""
    shape = [e for e in stored.shape if e != 1]
    if len(shape) == 2:
        return stored.reshape(shape)
    axes = [k for k, e in enumerate(stored.shape) if e != 1]
    for k in reversed(range(stored.ndim)):
        if len(axes) < 2 and k not in axes:
            axes.append(k)
    return stored.reshape([stored.shape[k] for k in sorted(axes)])


def tf32(x: Any) -> Any:
    """float32 cut to tf32: the lower 13 bits of the mantissa zero."""
    return (np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def product(a: Any, b: Any, c: Any, dtypes: tuple[str, str, str]) -> Any:
    """C + A · B for matrices as they lie in memory; ``c`` is None where C starts from zero. Rounded once,
    integers wrap."""
    wide = np.float64 if numerics.FLOATS.count(dtypes[2]) else np.int64
    x, y = (numerics.decode(m, dt).astype(wide) for m, dt in zip((a, b), dtypes[:2], strict=True))
    total = x @ y
    if c is not None:
        total = numerics.decode(c, dtypes[2]).astype(wide) + total
    return numerics.encode(total, dtypes[2])


def _extreme(ufunc: Any, initial: Any = np._NoValue) -> Callable[[Any, int], Any]:
    return lambda x, axis: ufunc.reduce(x, axis=axis, initial=initial)


_REDUCE: dict[str, Callable[[Any, int], Any]] = {
    "sum": _extreme(np.add),
    "prod": _extreme(np.multiply),
    "max": _extreme(np.maximum),
    "min": _extreme(np.minimum),
    "fmax": _extreme(np.fmax, -np.inf),
    "fmin": _extreme(np.fmin, np.inf),
    "bitand": _extreme(np.bitwise_and),
    "bitor": _extreme(np.bitwise_or),
    "bitxor": _extreme(np.bitwise_xor),
}


def reduction(src: Any, before: Any, axis: int, op: str, dtypes: tuple[str, str]) -> Any:
    """``src`` reduced along ``axis`` (and with what the result holds ``before``, unless None) as it lies in
    ``dtypes[1]``'s memory. NaN wins in max and min, and loses in fmax and fmin; floats accumulate in
    float32, float64 where a side is float64."""
    source, target = dtypes
    acc = target
    if target in numerics.FLOATS:
        acc = "float64" if "float64" in dtypes else "float32"
    x = numerics.decode(src, source).astype(acc)
    kind = op.removeprefix("abs")
    if kind != op:
        x = np.abs(x)
    if acc == "float32" and kind in ("sum", "prod"):
        x = x.astype(np.float64)
    made = _REDUCE[kind](x, axis).astype(acc)
    if op == "absfmax":
        made = np.maximum(made, 0)  # of NaNs alone
    if before is not None:
        held = numerics.decode(np.atleast_1d(before), target).astype(acc).reshape(made.shape)
        made = _REDUCE[kind](np.stack([held, made]), 0)
    return numerics.encode(made, target)


def scan(src: Any, axis: int, op: str, reverse: bool, dtypes: tuple[str, str]) -> Any:
    """Running sums or maxima along ``axis``, in order."""
    source, target = dtypes
    acc = target
    if target in numerics.FLOATS:
        acc = "float64" if "float64" in dtypes else "float32"
    x = numerics.decode(src, source).astype(acc)
    x = np.flip(x, axis) if reverse else x
    made = (np.add if op == "sum" else np.maximum).accumulate(x, axis=axis, dtype=acc)
    return numerics.encode(np.flip(made, axis) if reverse else made, target)


ATOMIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "max": numerics.maximum,
    "min": numerics.minimum,
    "or": lambda a, b: a | b,
    "and": lambda a, b: a & b,
    "xor": lambda a, b: a ^ b,
    "exch": lambda a, b: b,
}


def updated(before: Any, value: Any, kind: str, dtype: str) -> Any:
    """What an atomic update makes of an element, both as values; integers wrap, floats are rounded."""
    if kind == "load":
        return before
    if kind == "store":
        return value
    made = ATOMIC[kind](before, value)
    return (
        numerics.wrap(int(made), dtype)
        if dtype not in numerics.FLOATS
        else numerics.decode(numerics.encode(made, dtype), dtype)
    )
