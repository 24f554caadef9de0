"""Copies and fills between views: whole tiles as vectors, tiles over an edge row by row with the valid part
cut out once a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tilescale.compiler.cpu import convert
from tilescale.compiler.cpu.codegen import host_cpu
from tilescale.compiler.cpu.expr import lit, loop, seq, vector_loop
from tilescale.compiler.cpu.tile import const
from tilescale.compiler.cpu.view import View
from tilescale.compiler.tvm_compat import tirx

if TYPE_CHECKING:
    from tilescale.compiler.cpu.lower import Lowering as CpuLowering

Stmt = Any
Expr = Any


def _element(src: View, dst: View, indices_src: Sequence[Expr], indices_dst: Sequence[Expr]) -> Stmt:
    if convert.storage_dtype(src.dtype) == convert.storage_dtype(dst.dtype) and src.dtype == dst.dtype:
        return tirx.BufferStore(
            dst.buf, tirx.BufferLoad(src.buf, [src.at(indices_src)]), [dst.at(indices_dst)]
        )
    value = convert.cast(convert.load(src.buf, src.at(indices_src), src.dtype), src.dtype, dst.dtype)
    return convert.store(dst.buf, dst.at(indices_dst), value, dst.dtype)


def _lanes(*dtypes: str) -> int:
    width = max(_bytes(d) for d in dtypes)
    return max(2, host_cpu().vector_bytes // width)


def _bytes(dtype: str) -> int:
    name = convert.canonical(dtype)
    return (
        1 if name == "bool" or "8" in name.split("_")[0] else 2 if "16" in name else 8 if "64" in name else 4
    )


def _zero(dtype: str) -> Expr:
    return lit(0, convert.storage_dtype(dtype))


def _counted(extent: Any, body: Callable[[Expr], Stmt], name: str = "i") -> Stmt:
    """A loop over a constant or a run-time extent."""
    known = const(extent)
    if known is not None:
        return loop(name, known, body)
    var = tirx.Var(name, str(extent.ty))
    return tirx.For(var, tirx.IntImm(str(extent.ty), 0), extent, tirx.ForKind.SERIAL, body(var))


def _span(low: Expr, high: Expr, body: Callable[[Expr], Stmt], name: str) -> Stmt:
    """``body(i)`` for low ≤ i < high; nothing where the range is empty."""
    var = tirx.Var(name, "int32")
    return tirx.For(
        var,
        tirx.IntImm("int32", 0),
        tirx.max(high - low, tirx.IntImm("int32", 0)),
        tirx.ForKind.SERIAL,
        body(var + low),
    )


def copy(cx: CpuLowering, src: View, dst: View) -> Stmt:
    """dst = src, element by element; outside src reads zero, outside dst nothing is written.

    The views have the same shape, axes of extent one aside.
    """
    src, dst = _aligned(src, dst)
    whole = _whole(src, dst)
    conditions = [c for v in (src, dst) for c in _inside_conditions(v)]
    if not conditions:
        return whole
    return tirx.IfThenElse(cx.all(conditions), whole, _edge(src, dst))


def _aligned(src: View, dst: View) -> tuple[View, View]:
    """Both views with the same axes: those of extent one are dropped, or kept on both sides where one may lie
    outside."""

    def reduced(v: View) -> tuple[View, list[int]]:
        keep = [k for k, e in enumerate(v.shape) if const(e) != 1]
        return v, keep

    (_, ks), (_, kd) = reduced(src), reduced(dst)
    extra_s = [k for k in range(len(src.shape)) if k not in ks and src.valid[k] is not None]
    extra_d = [k for k in range(len(dst.shape)) if k not in kd and dst.valid[k] is not None]

    def build(v: View, front_own: list[int], front_other: int, back: list[int], own_first: bool) -> View:
        own: list[Any] = [(v.shape[k], v.strides[k], v.valid[k]) for k in front_own]
        other = [(1, 0, None)] * front_other
        rows = (own + other if own_first else other + own) + [
            (v.shape[k], v.strides[k], v.valid[k]) for k in back
        ]
        shape, strides, valid = (tuple(r[c] for r in rows) for c in range(3))
        return View(v.buf, v.dtype, shape, strides, v.offset, valid, v.index_dtype, v.is_global)

    return build(src, extra_s, len(extra_d), ks, True), build(dst, extra_d, len(extra_s), kd, False)


def _inside_conditions(v: View) -> list[Expr]:
    out = []
    for extent, valid in zip(v.shape, v.valid, strict=True):
        if valid is not None:
            low, high = valid
            out += [low <= 0] if const(low) != 0 else []
            out.append(high >= (extent if not isinstance(extent, int) else tirx.IntImm("int32", extent)))
    return out


def _whole(src: View, dst: View) -> Stmt:
    """All of it lies inside."""
    if not dst.shape:
        return _element(src, dst, [], [])
    shape = [d if const(d) is not None else s for s, d in zip(src.shape, dst.shape, strict=True)]
    inner = const(shape[-1])
    unit = const(src.strides[-1]) == 1 and const(dst.strides[-1]) == 1

    def axis(k: int, indices: list[Expr]) -> Stmt:
        if k == len(shape) - 1:
            body = lambda j: _element(src, dst, [*indices, j], [*indices, j])  # noqa: E731
            if inner is not None and unit and inner > 1:
                return vector_loop(inner, _lanes(src.dtype, dst.dtype), body)
            return _counted(shape[k], body, "j")
        return _counted(shape[k], lambda i: axis(k + 1, [*indices, i]))

    return axis(0, [])


def _edge(src: View, dst: View) -> Stmt:
    """Some of it lies outside: every row is cut into its written and its read part once, so no element is
    tested."""
    rank = len(dst.shape)

    def bounds(v: View, k: int) -> tuple[Expr, Expr]:
        extent = v.shape[k] if not isinstance(v.shape[k], int) else tirx.IntImm("int32", v.shape[k])
        if v.valid[k] is None:
            return tirx.IntImm("int32", 0), extent
        low, high = v.valid[k]  # type: ignore[misc]
        return tirx.max(low, tirx.IntImm("int32", 0)), tirx.min(high, extent)

    def axis(k: int, indices: list[Expr], readable: Expr | None) -> Stmt:
        wlow, whigh = bounds(dst, k)
        rlow, rhigh = bounds(src, k)
        if k < rank - 1:

            def body(i: Expr) -> Stmt:
                inside = tirx.And(i >= rlow, i < rhigh) if src.valid[k] is not None else None
                both = (
                    inside if readable is None else readable if inside is None else tirx.And(readable, inside)
                )
                return axis(k + 1, [*indices, i], both)

            return _span(wlow, whigh, body, "i")
        zero = lambda j: tirx.BufferStore(dst.buf, _zero(dst.dtype), [dst.at([*indices, j])])  # noqa: E731
        move = lambda j: _element(src, dst, [*indices, j], [*indices, j])  # noqa: E731
        first = tirx.min(tirx.max(wlow, rlow), whigh)
        last = tirx.max(tirx.min(whigh, rhigh), first)
        filled = seq(
            [_span(wlow, first, zero, "j"), _span(first, last, move, "j"), _span(last, whigh, zero, "j")]
        )
        if readable is None:
            return filled
        return tirx.IfThenElse(readable, filled, _span(wlow, whigh, zero, "j"))

    if rank == 0:
        return _element(src, dst, [], [])
    return axis(0, [], None)


def held(value: Expr) -> tuple[list[Stmt], Expr]:
    """Statements that evaluate a value of a storage dtype once, by way of a slot (see lets.py), and what
    stands for it behind them."""
    if isinstance(value, (tirx.IntImm, tirx.FloatImm, tirx.Var)):
        return [], value
    dtype, zero = str(value.ty), [tirx.IntImm("int32", 0)]
    slot = tirx.decl_buffer((1,), dtype, "held", layout=None, scope="local", data_alignment=64)
    var = tirx.Var("held", dtype)
    return [
        tirx.AllocBuffer(slot),
        tirx.BufferStore(slot, value, zero),
        tirx.Bind(var, tirx.BufferLoad(slot, zero)),
    ], var


def fill(cx: CpuLowering, dst: View, value: Expr) -> Stmt:
    """Every element of dst that lies inside becomes ``value`` (a compute value), which is evaluated once: it
    may read dst."""
    dst = dst.squeeze()
    first, stored = held(convert.encode(value, dst.dtype))

    def put(ids: list[Any]) -> Any:
        return tirx.BufferStore(dst.buf, stored, [dst.at(ids)])

    if not dst.shape:
        return seq([*first, put([])])
    inner = const(dst.shape[-1])

    def axis(k: int, indices: list[Expr]) -> Stmt:
        last = k == len(dst.shape) - 1
        valid = dst.valid[k]
        if valid is not None:
            extent = dst.shape[k] if not isinstance(dst.shape[k], int) else tirx.IntImm("int32", dst.shape[k])
            low, high = tirx.max(valid[0], tirx.IntImm("int32", 0)), tirx.min(valid[1], extent)
            return _span(low, high, lambda i: put([*indices, i]) if last else axis(k + 1, [*indices, i]), "i")
        if last and inner is not None and const(dst.strides[-1]) == 1 and inner > 1:
            return vector_loop(inner, _lanes(dst.dtype), lambda j: put([*indices, j]))
        return _counted(dst.shape[k], lambda i: put([*indices, i]) if last else axis(k + 1, [*indices, i]))

    return seq([*first, axis(0, [])])


def each(cx: CpuLowering, dst: View, src: View | None, body: Callable[[Expr, Expr | None], Stmt]) -> Stmt:
    """``body(index in dst, index in src)`` for every element of dst that lies inside, one after another."""
    if src is not None:
        src, dst = _aligned(src, dst)
    else:
        dst = dst.squeeze()

    def axis(k: int, indices: list[Expr]) -> Stmt:
        if k == len(dst.shape):
            return body(dst.at(indices), src.at(indices) if src is not None else None)
        valid = dst.valid[k]
        if valid is not None:
            extent = dst.shape[k] if not isinstance(dst.shape[k], int) else tirx.IntImm("int32", dst.shape[k])
            low, high = tirx.max(valid[0], tirx.IntImm("int32", 0)), tirx.min(valid[1], extent)
            return _span(low, high, lambda i: axis(k + 1, [*indices, i]), "i")
        return _counted(dst.shape[k], lambda i: axis(k + 1, [*indices, i]))

    return axis(0, [])
