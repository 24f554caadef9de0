"""Copies that a product can do without: a tile that a loop fills whole from a tensor which the kernel never
writes, and that only products read, as their second operand. The micro-kernel walks B once, row by row,
packing it where it must, so it reads the tensor as well as it would read the tile; the first operand is read
again for every panel and is better off close by.
"""

from __future__ import annotations

from typing import Any

from tilescale.compiler.cpu.tile import const
from tilescale.compiler.cpu.view import View
from tilescale.compiler.ir.buffers import buffer_uses
from tilescale.compiler.ir.operations import find
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.tvm_compat import structural_walk, tirx

#: Rows this far apart (or a multiple) fall into few cache sets: those are gathered into a tile after all.
ALIASING_BYTES = 2048


def candidates(program: TileProgram, written: set[Any]) -> set[Any]:
    """Tiles whose only write is such a copy and whose only readers are products behind it in the same
    body."""
    found: set[Any] = set()
    bodies: list[Any] = []
    structural_walk(program.func.body, (tirx.SeqStmt, bodies.append))
    uses = buffer_uses(program.func.body)
    for body in bodies:
        stmts = list(body.seq)
        for k, stmt in enumerate(stmts):
            call = _call(stmt, "ts.copy")
            if call is None or str(call.attrs["executor"]) != "block":
                continue
            src, dst = call.args[:2]
            if (
                src.source.ty.storage_scope != "global"
                or src.source in written
                or not _whole(dst)
                or _dtype(src) != _dtype(dst)
            ):
                continue
            readers = [c for s in stmts[k + 1 :] if (c := _call(s, "ts.gemm")) is not None]
            reading = [c for c in readers if c.args[1].source.same_as(dst.source) and _whole(c.args[1])]
            others = [c for c in reading if any(c.args[i].source.same_as(dst.source) for i in (0, 2))]
            if reading and not others and uses[dst.source] == 1 + len(reading):
                found.add(dst.source)
    return found


def reads_well(v: View, itemsize: int) -> bool:
    """Whether a product may read a view of a tensor in place: all of it inside, rows contiguous and not
    aliasing in the cache."""
    if any(part is not None for part in v.valid):
        return False
    axes = [(const(e), const(s)) for e, s in zip(v.shape, v.strides, strict=True) if const(e) != 1]
    if len(axes) != 2 or any(e is None or s is None for e, s in axes):
        return False
    (_, row), (_, step) = axes
    return step == 1 and row is not None and row * itemsize % ALIASING_BYTES != 0


def _call(stmt: Any, name: str) -> Any:
    value: Any = stmt.value if isinstance(stmt, tirx.Evaluate) else None
    return value if find(value) is not None and value.op.name == name else None


def _dtype(region: Any) -> str:
    return str(region.source.ty.dtype)


def _whole(region: Any) -> bool:
    """Whether a region is all of a tile's rows and columns (of a ring of one stage: of that stage)."""
    if region.source.ty.storage_scope != "shared":
        return False
    sizes = [int(e) for e in region.source.ty.shape]
    kept = [e for e in sizes if e != 1]
    return len(kept) == 2 and all(
        const(r.min) == 0 and const(r.extent) == e for r, e in zip(region.region, sizes, strict=True)
    )
