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
from tilescale.compiler.ir.operations import VOID
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.walks import mentions
from tilescale.compiler.layout.chunks import SIZES, strides_of
from tilescale.compiler.layout.loops import bits_of
from tilescale.compiler.passes import prefetch
from tilescale.compiler.passes.copy_nests import CopyNest, box, copy_nest, first_of
from tilescale.compiler.passes.roles import calls
from tilescale.compiler.tvm_compat import ir, structural_walk, sym, tirx


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
        n, span = self.nest, self.nest.node.span
        regions = [_element(n.source, n.at), _element(n.tile, n.into)]
        condition = [] if n.condition is None else [n.condition]
        body: Any = tirx.Evaluate(
            ir.Call(
                "ts.cp_async_element",
                [*regions, *condition],
                attrs={"ring": ring, "bytes": self.bytes},
                ret_ty=VOID,
                span=span,
            ),
            span,
        )
        for depth, (v, extent) in enumerate(reversed(n.extents.items()), 1):
            zero, count = tirx.const(0, str(v.ty)), tirx.const(extent, str(v.ty))
            kind = {"ts.kind": "parallel"} if depth == len(n.extents) else {}
            notes = {**kind, "ts.depth": depth}
            body = tirx.For(v, zero, count, tirx.ForKind.PARALLEL, body, annotations=notes, span=span)
        return body


def gather(program: TileProgram, stmts: list[Any], s: Any, names: Mapping[Any, Any]) -> Gather | None:
    """The gather that a statement is, of a loop of ``stmts``; None where it is none, or must not run ahead.
    ``names``: what integers are bound to."""
    nest = copy_nest(s)
    if nest is None or nest.source.ty.storage_scope != "global":
        return None
    if all(not p.var.same_as(nest.source) for p in program.params) or not _whole(nest):
        return None
    if any(str(e.ty) not in ("int32", "int64") for e in nest.at):
        return None
    size = _chunk(nest, names)
    if not size or not _looks_up_memory(nest):
        return None
    found = Gather(nest, size)
    return found if prefetch.runs_ahead(program, stmts, found.asynchronous(-1), nest.source) else None


def _element(buffer: Any, at: tuple[Any, ...]) -> Any:
    return tirx.BufferRegion(buffer, [ir.Range.from_min_extent(i, tirx.const(1, str(i.ty))) for i in at])


def _whole(nest: CopyNest) -> bool:
    """Whether a nest fills its tile whole, each element once, by one of its variables along the last axis."""
    made = box(nest.into, nest.extents)
    shape = list(nest.tile.ty.shape)
    if made is None or not made[1] or not mentions(nest.into[-1], made[1][-1]):
        return False
    return all(
        isinstance(r.min, tirx.IntImm) and int(r.min.value) == 0 and int(r.extent.value) == int(e)
        for r, e in zip(made[0], shape, strict=True)
    )


def _chunk(nest: CopyNest, names: Mapping[Any, Any]) -> int:
    """How many bytes one instruction may move: the most that are always aligned on both sides, inside the
    tensor or outside it as a whole, and under one condition; 0 where not even four are."""
    analyzer, size = sym.Analyzer(), bits_of(nest.tile) // 8
    inner = next(v for v in nest.extents if mentions(nest.into[-1], v))
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
