"""``T.alloc_var`` and ``T.alloc_local`` memory in front of a T.Parallel nest that each iteration sets before
it reads it: each iteration has its own. Nothing of it is read outside of such nests, so no iteration knows of
another's.

What an iteration would read of another one stays as it is, and is refused as a race.
"""

from __future__ import annotations

from typing import Any

from tilescale.compiler.builder import state as bld
from tilescale.compiler.ir.buffers import stored
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.operations import effects_of, find
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.tvm_compat import ir, structural_map, structural_walk, tirx

_HELD = ("local", "local.var")


def own_scratch(body: Any, builder: bld.Builder) -> Any:
    """A kernel's body with such memory allocated in its nests."""
    found = _Uses()
    found.visit(body)
    fit = {b: nests for b, nests in found.written.items() if b in found.allocated and b not in found.read}
    fit = {b: nests for b, nests in fit.items() if all(_set_first(n.body, b, False)[0] for n in nests)}
    for b, nests in fit.items():
        for nest in nests:
            body = structural_map(
                body, (tirx.For, lambda s, b=b, nest=nest: _within(s, b, builder) if _same(s, nest) else s)
            )
    return body


def _same(s: Any, nest: Any) -> bool:
    return bool(s.loop_var.same_as(nest.loop_var))


class _Uses:
    """Where memory of threads is allocated, written and read: in which outermost nests, or outside."""

    def __init__(self) -> None:
        self.allocated: set[Any] = set()  # outside of nests
        self.written: dict[Any, list[Any]] = {}  # by the nests that write it
        self.read: set[Any] = set()  # outside of a nest that writes it, or under another name

    def visit(self, s: Any) -> None:
        if isinstance(s, tirx.For) and s.kind == tirx.ForKind.PARALLEL:
            self.nest(s)
            return
        if isinstance(s, tirx.AllocBuffer) and s.buffer.ty.storage_scope in _HELD:
            self.allocated.add(s.buffer)
        for part in _parts(s):
            self.visit(part)
        self.read |= _reads(s, deep=False)

    def nest(self, s: Any) -> None:
        writes = stored(s)
        self.read |= _reads(s, deep=True) - writes
        for b in writes:
            self.written.setdefault(b, []).append(s)


def _parts(s: Any) -> list[Any]:
    """The statements in a statement."""
    if isinstance(s, tirx.SeqStmt):
        return list(s.seq)
    if isinstance(s, tirx.IfThenElse):
        return [s.then_case, *([] if s.else_case is None else [s.else_case])]
    return [s.body] if isinstance(s, (tirx.For, tirx.While, tirx.AttrStmt)) else []


def _own(s: Any) -> list[Any]:
    """What a statement evaluates by itself."""
    if isinstance(s, tirx.For):
        return [s.min, s.extent]
    if isinstance(s, (tirx.IfThenElse, tirx.While)):
        return [s.condition]
    return [] if isinstance(s, (tirx.SeqStmt, tirx.AttrStmt)) else [s]


def _reads(s: Any, *, deep: bool) -> set[Any]:
    """The buffers that a statement may read, with a view's base."""
    found: set[Any] = set()

    def call(c: Any) -> None:
        if find(c) is not None:
            found.update(a.region.source for a in effects_of(c) if a.mode != "write")

    for part in [s] if deep else _own(s):
        structural_walk(part, (ir.TensorLoad, lambda e: found.add(e.source)))
        structural_walk(part, (tirx.DeclBuffer, lambda d: found.add(d.data.args[0])))
        structural_walk(part, (ir.Call, call))
    return found


def _set_first(s: Any, b: Any, known: bool) -> tuple[bool, bool]:
    """Whether a statement reads ``b`` only where this iteration has set it, given whether it has before; and
    whether it has behind it."""
    if isinstance(s, tirx.SeqStmt):
        for x in s.seq:
            fits, known = _set_first(x, b, known)
            if not fits:
                return False, known
        return True, known
    if not known and b in _reads(s, deep=False):
        return False, known
    if isinstance(s, tirx.IfThenElse):
        sides = [_set_first(x, b, known) for x in _parts(s)]
        return all(fits for fits, _ in sides), len(sides) == 2 and all(k for _, k in sides) or known
    if isinstance(s, (tirx.For, tirx.While)):
        fits, behind = _set_first(s.body, b, known)
        runs = isinstance(s, tirx.For) and (constant(s.extent) or 0) > 0
        return fits, known or (behind and runs)
    if isinstance(s, tirx.AttrStmt):
        return _set_first(s.body, b, known)
    return True, known or b in stored(s)


def _within(s: Any, b: Any, builder: bld.Builder) -> Any:
    """A nest with memory of its iterations in the place of ``b``."""
    ty = b.ty
    made = tirx.decl_buffer(
        tuple(ty.shape), str(ty.dtype), b.name, scope=ty.storage_scope, data_alignment=64, layout=None
    )

    if b in builder.renames:
        builder.renames[made] = builder.renames[b]

    def load(e: Any) -> Any:
        return tirx.BufferLoad(made, list(e.indices)) if e.source.same_as(b) else e

    def region(r: Any) -> Any:
        return tirx.BufferRegion(made, list(r.region)) if r.source.same_as(b) else r

    def store(x: Any) -> Any:
        return tirx.BufferStore(made, x.value, list(x.indices), x.span) if x.buffer.same_as(b) else x

    def inside(f: Any) -> Any:
        if isinstance(f.body, tirx.For) and f.body.kind == tirx.ForKind.PARALLEL:
            body = inside(f.body)
        else:
            body = structural_map(f.body, (ir.TensorLoad, load))
            body = structural_map(body, (ir.TensorRegion, region))
            body = structural_map(body, (tirx.BufferStore, store))
            body = sequence([tirx.AllocBuffer(made, {}, f.span), body])
        notes = dict(f.annotations) if f.annotations else {}
        return tirx.For(f.loop_var, f.min, f.extent, f.kind, body, annotations=notes, span=f.span)

    return inside(s)
