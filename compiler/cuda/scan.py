"""Running sums and maxima on a GPU: each line by one thread, in order. Lines lie in shared memory."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.cuda.reduce import accumulator, fold, identity
from tilescale.compiler.ir.nests import Nest, indexed
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.layout.loops import element_dtype, in_registers
from tilescale.compiler.tvm_compat import tirx

ZERO = tirx.IntImm("int32", 0)


def stage(call: Any, cx: Any) -> list[Any] | None:
    """Tiles in registers go through shared memory."""
    src, dst = call.args
    if not in_registers(src.source) and not in_registers(dst.source):
        return None
    shape = [int(r.extent) for r in src.region]
    before, after = [], []
    frm = to = None
    if in_registers(src.source):
        frm = cx.tile(f"{src.source.name}_shared", shape, element_dtype(src.source), "shared", call.span)
        before.append(cx.copy(src, frm, call))
    if in_registers(dst.source):
        same = frm is not None and element_dtype(dst.source) == element_dtype(src.source)
        to = frm if same else cx.tile(f"{dst.source.name}_shared", shape, element_dtype(dst.source), "shared", call.span)
        after.append(cx.copy(to, dst, call))
    return [*before, cx.again(call, [frm or src, to or dst]), *after]


def lines(call: Any) -> Nest:
    """One iteration a line: a loop along the axis that carries the total."""
    src, dst = call.args
    if in_registers(src.source) or in_registers(dst.source):
        return None  # type: ignore[return-value]  # not staged yet
    op, reverse = str(call.attrs["op"]), bool(call.attrs["reverse"])
    rank = len(src.region)
    axis = int(call.attrs["axis"]) % rank
    extents = [int(r.extent) for r in src.region]
    others = [k for k in range(rank) if k != axis and extents[k] != 1]
    names = tuple(tirx.Var("ijkl"[k % 4], "int32") for k in range(len(others)))
    along = tirx.Var("s", "int32")
    at = tirx.IntImm("int32", extents[axis] - 1) - along if reverse else along
    source = dict(zip(others, names, strict=True)) | {axis: at}
    kept = sorted(source)
    to_axes = _same_axes(src, dst, kept)
    acc = accumulator(element_dtype(src.source), element_dtype(dst.source))
    total = tirx.decl_buffer((1,), acc, "total", scope="local", layout=None)
    now = tirx.BufferLoad(total, [ZERO])
    element = tirx.BufferLoad(src.source, indexed(src, [source[k] for k in kept], kept))
    cast = lambda v, dt: v if str(v.ty) == dt else tirx.Cast(dt, v)  # noqa: E731
    put = tirx.BufferStore(dst.source, cast(now, element_dtype(dst.source)), indexed(dst, [source[k] for k in kept], to_axes), call.span)
    step = sequence([tirx.BufferStore(total, fold(op, now, cast(element, acc)), [ZERO], call.span), put])
    body = sequence(
        [
            tirx.AllocBuffer(total, {}, call.span),
            tirx.BufferStore(total, identity(op, acc), [ZERO], call.span),
            tirx.For(along, ZERO, tirx.IntImm("int32", extents[axis]), tirx.ForKind.SERIAL, step, span=call.span),
        ]
    )
    return Nest(names, tuple(extents[k] for k in others), body, call, f"T.cum{op}", alone=True)


def _same_axes(src: Any, dst: Any, kept: list[int]) -> list[int]:
    """The axes of ``dst`` that the axes ``kept`` of ``src`` are, both without axes of extent one; a scanned axis of extent one is any."""
    long = [k for k, r in enumerate(dst.region) if int(r.extent) != 1]
    if len(long) == len(kept):
        return long
    spare = [k for k in range(len(dst.region)) if k not in long]
    return sorted([*long, *spare[: len(kept) - len(long)]])
