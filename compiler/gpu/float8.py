"""Conversions of several float8_e4m3fn at once. The processor converts two in one instruction, or one in the
same time. Besides, a byte of a register costs one more to take out, and another to put back.

So where a loop of registers converts neighbours one by one,

    for u in 0 … 16: x[i + u] = float8(float(x[i + u]) * scale)

the values are converted in front of it, and the results behind it. What is converted is the same, to the bit.
"""

from __future__ import annotations

from typing import Any

from tilescale.compiler.gpu.build import at, call
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.ir.walks import mentions
from tilescale.compiler.tvm_compat import ir, structural_map, structural_walk, sym, tirx

DTYPE = "float8_e4m3fn"
FOUR = 4


def in_fours(body: Any) -> Any:
    """Thread IR with such loops' conversions taken together."""
    views: set[Any] = set()
    structural_walk(body, (tirx.DeclBuffer, lambda s: views.add(s.buffer)))
    return structural_map(body, (tirx.For, lambda loop: _loop(loop, views)))


def _loop(loop: Any, views: set[Any]) -> Any:
    count = constant(loop.extent)
    stmts = list(loop.body.seq) if isinstance(loop.body, tirx.SeqStmt) else [loop.body]
    *binds, store = stmts
    if (
        loop.kind != tirx.ForKind.UNROLLED
        or count is None
        or count % FOUR
        or constant(loop.min) != 0
        or not isinstance(store, tirx.BufferStore)
        or not all(isinstance(s, tirx.Bind) for s in binds)
    ):
        return loop
    here = {loop.loop_var, *(s.var for s in binds)}
    first = _first(store.buffer, store.indices, loop.loop_var, here)
    reads = _reads(stmts, loop.loop_var, here)
    if any(b.same_as(store.buffer) and (first is None or not _same(e, first)) for b, e in reads):
        return loop  # a round reads what another one writes
    if reads and store.buffer in views:
        return loop  # under another name, perhaps
    before: list[Any] = []
    after: list[Any] = []
    wide: list[tuple[Any, Any, Any]] = []

    def fours(name: str, pointers: Any) -> Any:
        v = tirx.Var("v", "int32")
        step = call(name, *pointers(v * FOUR), span=loop.span)
        extent = tirx.IntImm("int32", count // FOUR)
        return tirx.For(v, tirx.IntImm("int32", 0), extent, tirx.ForKind.UNROLLED, step, span=loop.span)

    for buffer, start in reads:
        held = tirx.decl_buffer((count,), "float32", f"{buffer.name}_wide", scope="local", layout=None)
        wide.append((buffer, start, held))
        before += [
            tirx.AllocBuffer(held),
            fours("widen4_e4m3", lambda k, b=buffer, e=start, h=held: (at(h, k), at(b, e + k))),
        ]

    def widened(e: Any) -> Any:
        if not _converts(e):
            return e
        start = _first(e.value.source, e.value.indices, loop.loop_var, here)
        for buffer, s, held in wide:
            if buffer.same_as(e.value.source) and start is not None and _same(s, start):
                return tirx.BufferLoad(held, [loop.loop_var])
        return e

    done = [structural_map(s, (tirx.Cast, widened)) for s in stmts]
    value = done[-1].value
    if first is not None and isinstance(value, tirx.Cast) and str(value.value.ty) == "float32":
        made = tirx.decl_buffer(
            (count,), "float32", f"{store.buffer.name}_wide_out", scope="local", layout=None
        )
        before.append(tirx.AllocBuffer(made))
        done[-1] = tirx.BufferStore(made, value.value, [loop.loop_var], store.span)
        zero = tirx.IntImm("int32", 0)
        after.append(call(f"narrow_e4m3<{count}>", at(store.buffer, first), at(made, zero), span=loop.span))
    if not before:
        return loop
    again = tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, sequence(done), span=loop.span)
    return sequence([*before, again, *after])


def _converts(e: Any) -> bool:
    """Whether a cast makes a float32 of an element."""
    return str(e.ty) == "float32" and isinstance(e.value, ir.TensorLoad) and str(e.value.ty) == DTYPE


def _reads(stmts: list[Any], u: Any, here: set[Any]) -> list[tuple[Any, Any]]:
    """The registers that rounds convert to float32, a neighbour each: buffers and the first one's index."""
    found: list[tuple[Any, Any]] = []

    def look(e: Any) -> None:
        if not _converts(e):
            return
        buffer = e.value.source
        start = _first(buffer, e.value.indices, u, here)
        if start is not None and not any(b.same_as(buffer) and _same(s, start) for b, s in found):
            found.append((buffer, start))

    for s in stmts:
        structural_walk(s, (tirx.Cast, look))
    return found


def _first(buffer: Any, indices: Any, u: Any, here: set[Any]) -> Any:
    """Where in a thread's registers the first of the neighbours lies that rounds ``u`` access; None where
    they are no neighbours, or lie elsewhere."""
    if str(buffer.ty.dtype) != DTYPE or not str(buffer.ty.storage_scope).startswith("local"):
        return None
    if len(indices) != 1 or constant(buffer.ty.shape[0]) == 1:
        return None
    start = sym.Analyzer().simplify(indices[0] - u)
    return None if any(mentions(start, v) for v in here) else start


def _same(a: Any, b: Any) -> bool:
    return constant(sym.Analyzer().simplify(a - b)) == 0
