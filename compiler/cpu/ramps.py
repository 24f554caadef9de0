"""Vector indices as ramps again: what TVM's vectoriser hides behind a conversion becomes one contiguous
access.

Global memory is indexed in 64 bits and loops count in 32, so an index reads ``int64(row) * n +
int64(column)``. Vectorised, its last term is a conversion of a ramp, which the code generator does not see
through: it would load the lanes one by one.
"""

from __future__ import annotations

from typing import Any

from tilescale.compiler.tvm_compat import structural_mutate, tirx

_INTEGERS = ("int32x", "int64x")


def fold(node: Any, mutator: Any) -> Any:
    """Sums, products and conversions of integer ramps and broadcasts, folded from the inside out. (Indices do
    not overflow.)"""
    e = mutator.default_mutate(node)
    if not str(e.ty).startswith(_INTEGERS):
        return e
    if isinstance(e, tirx.Cast):
        inner = _parts(e.value)
        if inner is None or not str(e.value.ty).startswith(_INTEGERS):
            return e
        dtype = str(e.ty).split("x")[0]
        base, step, lanes = inner
        return _vector(tirx.Cast(dtype, base), None if step is None else tirx.Cast(dtype, step), lanes)
    a, b = _parts(e.a), _parts(e.b)
    if a is None or b is None:
        return e
    (x, dx, lanes), (y, dy, _) = a, b
    if isinstance(e, tirx.Mul):
        if dx is not None and dy is not None:
            return e
        step = dx * y if dx is not None else x * dy if dy is not None else None
        return _vector(x * y, step, lanes)
    if isinstance(e, tirx.Sub):
        dy = None if dy is None else 0 - dy
        y = 0 - y
    step = dx if dy is None else dy if dx is None else dx + dy
    return _vector(x + y, step, lanes)


def _parts(e: Any) -> tuple[Any, Any, Any] | None:
    """(first lane, step or None, lanes) of a ramp or broadcast."""
    if isinstance(e, tirx.Ramp):
        return e.base, e.stride, e.lanes
    if isinstance(e, tirx.Broadcast):
        return e.value, None, e.lanes
    return None


def _vector(base: Any, step: Any, lanes: Any) -> Any:
    return tirx.Broadcast(base, lanes) if step is None else tirx.Ramp(base, step, lanes)


def fold_ramps() -> Any:
    """The pass."""

    def run(func: Any, _module: Any, _context: Any) -> Any:
        body = structural_mutate(func.body, [((tirx.Cast, tirx.Add, tirx.Sub, tirx.Mul), fold)])
        return func if body.same_as(func.body) else func.with_body(body)

    return tirx.transform.prim_func_pass(run, opt_level=0, name="tilescale.fold_ramps")
