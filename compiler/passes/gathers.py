"""Rows of a tensor that a loop of T.Parallel gathers into a shared tile, as copies by cp.async that run
ahead: where each row lies is computed or looked up, and a condition may leave rows zero.

What has to be so: cp.async moves 4, 8 or 16 bytes that lie side by side on both sides, begin at a multiple of
their size, and are inside the tensor as a whole (PTX ISA 9.0, "cp.async"); where they are to be zero, nothing
is read (a source size of zero). And whatever says where a row lies, or whether it is there, must be the same
when the copy is issued, rounds ahead of its place: tensors that the kernel only reads, and tiles and
variables that the loop does not write.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilescale.compiler.ir.multiples import multiple, spelt_out
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.operations import VOID
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.walks import mentions
from tilescale.compiler.layout.chunks import SIZES, integer_names, strides_of
from tilescale.compiler.layout.loops import bits_of
from tilescale.compiler.passes import prefetch
from tilescale.compiler.passes.copy_nests import CopyNest, copy_nest, first_of
from tilescale.compiler.passes.roles import calls
from tilescale.compiler.tvm_compat import ir, structural_map, structural_walk, sym, tirx


@dataclass(frozen=True)
class Gather:
    """A nest that fills ``tile``, ``bytes`` at a time."""

    nest: CopyNest
    bytes: int

    @property
    def tile(self) -> Any:
        return self.nest.tile

    def asynchronous(self, ring: int) -> Any:
        """The nest whose iterations fill ``ring`` (ops/cp_async.py)."""
        return self.copying("cp_async_element", ring=ring)

    def copying(self, name: str, **attrs: int) -> Any:
        """The nest whose iterations are this operation."""
        n, span = self.nest, self.nest.node.span
        args = [_element(n.source, n.at), _element(n.tile, n.into)]
        args += [] if n.condition is None else [n.condition]
        call = ir.Call(f"ts.{name}", args, attrs={**attrs, "bytes": self.bytes}, ret_ty=VOID, span=span)
        body: Any = tirx.Evaluate(call, span)
        for depth, (v, extent) in enumerate(reversed(n.extents.items()), 1):
            zero, count = tirx.const(0, str(v.ty)), tirx.const(extent, str(v.ty))
            kind = {"ts.kind": "parallel"} if depth == len(n.extents) else {}
            notes = {**kind, "ts.depth": depth}
            body = tirx.For(v, zero, count, tirx.ForKind.PARALLEL, body, annotations=notes, span=span)
        return body


def gather(program: TileProgram, stmts: list[Any], s: Any, names: Mapping[Any, Any]) -> Gather | None:
    """The gather that a statement is, of a loop of ``stmts``; None where it is none, or must not run ahead.
    ``names``: what integers are bound to."""
    found = _copy(program, s, names)
    if found is None or not _whole(found.nest):
        return None
    return found if prefetch.runs_ahead(program, stmts, found.asynchronous(-1), found.nest.source) else None


def begun_copies(program: TileProgram) -> TileProgram:
    """The program in which nests are copies by cp.async whose author awaits their groups; those that cp.async
    cannot make are complete where they stand, and the author's groups are empty."""
    if not program.target.async_copies or all(
        c.op.name != "ts.thread_copies" for c in calls(program.func.body)
    ):
        return program
    names = integer_names(program.func.body)

    def visit(s: Any) -> Any:
        if "ts.begun" not in (s.annotations or {}):
            return s
        found = _copy(program, s, names)
        return s if found is None else found.copying("thread_copy_element")

    body = structural_map(program.func.body, (tirx.For, visit))
    return program if body.same_as(program.func.body) else program.with_body(body)


def _copy(program: TileProgram, s: Any, names: Mapping[Any, Any]) -> Gather | None:
    """The copy that a statement is, if cp.async can make it."""
    nest = copy_nest(s)
    if nest is None or nest.source.ty.storage_scope != "global" or not _by_rows(nest):
        return None
    if all(not p.var.same_as(nest.source) for p in program.params):
        return None
    if any(str(e.ty) not in ("int32", "int64") for e in nest.at):
        return None
    size = _chunk(nest, names)
    return Gather(nest, size) if size and _looks_up_memory(nest) else None


def _element(buffer: Any, at: tuple[Any, ...]) -> Any:
    return tirx.BufferRegion(buffer, [ir.Range.from_min_extent(i, tirx.const(1, str(i.ty))) for i in at])


def _by_rows(nest: CopyNest) -> bool:
    """Whether each variable of a nest is an index of its tile, one of them that along rows."""
    along = [e for e in nest.into if isinstance(e, ir.Var) and e in nest.extents]
    others = [e for e in nest.into if not any(e is x for x in along)]
    return (
        len(along) == len(nest.extents)
        and len(set(map(hash, along))) == len(along)
        and bool(along)
        and nest.into[-1] is along[-1]
        and not any(mentions(e, v) for e in others for v in nest.extents)
    )


def _whole(nest: CopyNest) -> bool:
    """Whether a nest fills its tile whole."""
    return all(
        nest.extents.get(e, 1) == int(size) and (e in nest.extents or constant(e) == 0)
        for e, size in zip(nest.into, nest.tile.ty.shape, strict=True)
    )


def _chunk(nest: CopyNest, names: Mapping[Any, Any]) -> int:
    """How many bytes one instruction may move: the most that are always aligned on both sides, inside the
    tensor or outside it as a whole, and under one condition; 0 where not even four are."""
    analyzer, size = sym.Analyzer(), bits_of(nest.tile) // 8
    inner = nest.into[-1]
    *rest, last = _looks(nest)
    start = first_of(last, inner, analyzer)
    if start is None or any(mentions(e, inner) for e in rest):
        return 0
    strides = strides_of(nest.source)
    if not multiple(analyzer, strides[-1] - 1, 1 << 20):
        return 0
    whole = [*strides[:-1], nest.source.ty.shape[-1], nest.extents[inner], spelt_out(start, names)]
    most = size * nest.width if nest.width else SIZES[0]
    return next(
        (
            n
            for n in SIZES
            if n <= most and n % size == 0 and all(multiple(analyzer, e, n // size) for e in whole)
        ),
        0,
    )


def _looks(nest: CopyNest) -> list[Any]:
    """What says where an element is read, and whether: the index along rows last."""
    return [*([] if nest.condition is None else [nest.condition]), *nest.at]


def _looks_up_memory(nest: CopyNest) -> bool:
    """Whether what a nest looks up lies in memory: fragments are spread over threads as a loop of its own
    would have it."""
    scopes: list[str] = []
    for e in _looks(nest):
        structural_walk(e, (ir.TensorLoad, lambda x: scopes.append(x.source.ty.storage_scope)))
    return all(s in ("global", "shared", "local.var") for s in scopes) and not any(map(calls, _looks(nest)))
