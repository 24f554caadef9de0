"""Tiles in registers that hold a part of a tensor: who has no share in them looks the tensor up instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilescale.compiler.ir.buffers import buffer_uses
from tilescale.compiler.ir.operations import effects_of, name_of, operations
from tilescale.compiler.layout.loops import element_dtype
from tilescale.compiler.tvm_compat import ir, structural_map, structural_walk, tirx

ZERO = tirx.IntImm("int32", 0)


def held_of_tensors(body: Any, written: set[Any]) -> dict[Any, Any]:
    """Tile in registers → the region of a tensor that it holds wherever it is read.

    One copy writes the tile, all of it, out of a tensor of this rank alone that the kernel does not write.
    Every other use of the tile stands behind that copy in the sequence of statements in which it stands
    itself, or within these: so the copy was made in the same round of each loop around both, with the same
    values of all names. The region is said by names, which do not change, and by no memory.
    """
    uses, stores, found = buffer_uses(body), list[Any](), dict[Any, Any]()
    structural_walk(body, (tirx.BufferStore, lambda s: stores.append(s.buffer)))
    structural_walk(
        body, (tirx.DeclBuffer, lambda s: stores.append(s.data.args[0]))
    )  # who has a view may write
    for call, _ in operations(body):
        stores += [a.region.source for a in effects_of(call) if a.mode != "read"]

    def look(s: Any) -> None:
        stmts = list(s.seq)
        for k, x in enumerate(stmts):
            tile = _filled(x, written)
            if tile is not None and sum(tile.same_as(b) for b in stores) == 1:
                if sum(buffer_uses(t).get(tile, 0) for t in stmts[k:]) == uses[tile]:
                    found[tile] = x.value.args[0]

    structural_walk(body, (tirx.SeqStmt, look))
    return found


def looked_up(s: Any, held: Mapping[Any, Any]) -> Any:
    """A statement with the elements of such tiles read where the tensors have them."""

    def load(e: Any) -> Any:
        if e.source not in held:
            return e
        region, own = held[e.source], _wide(list(zip(e.indices, e.source.ty.shape, strict=True)))
        inner = iter([i for i, _ in own])
        at = [r.min if int(r.extent) == 1 else r.min + next(inner) for r in region.region]
        return tirx.BufferLoad(region.source, at, span=e.span)

    return s if s is None or not held else structural_map(s, (ir.TensorLoad, load))


def _wide(axes: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """The axes of more than one element, each with its extent."""
    return [(x, n) for x, n in axes if int(n) != 1]


def _filled(s: Any, written: set[Any]) -> Any:
    """The tile in registers that a statement fills whole from memory that does not change; None for any
    other."""
    if name_of(s) != "copy":
        return None
    src, dst = s.value.args[:2]
    ranges, loads = [*src.region, *dst.region], list[Any]()
    structural_walk(s.value, (ir.TensorLoad, loads.append))
    if (
        len(s.value.args) > 2
        or loads
        or not dst.source.ty.storage_scope.startswith("local")
        or src.source.ty.storage_scope != "global"
        or src.source in written
        or element_dtype(src.source) != element_dtype(dst.source)
        or not all(isinstance(r.extent, tirx.IntImm) for r in ranges)
    ):
        return None
    whole = [(0, int(e)) for e in dst.source.ty.shape]
    same = [n for _, n in _wide([(r, r.extent) for r in src.region])]
    if [int(n) for n in same] != [n for _, n in whole if n != 1] or any(
        not isinstance(r.min, tirx.IntImm) or (int(r.min), int(r.extent)) != w
        for r, w in zip(dst.region, whole, strict=True)
    ):
        return None
    return dst.source
