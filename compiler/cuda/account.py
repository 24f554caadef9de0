"""How a kernel's copies go and which stages its loops have, as plain data for `Kernel.report`."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.gpu.kernel import ThreadKernel
from tilescale.compiler.ir.operations import REGISTRY
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.source import loc_of
from tilescale.compiler.layout.chunks import chunk, integer_names
from tilescale.compiler.passes import roles
from tilescale.compiler.passes.schedule import AHEAD, ROLES


def copies(program: TileProgram, kernel: ThreadKernel) -> list[dict[str, Any]]:
    """Every T.copy and T.tma_copy between a tensor and a tile, once a line: ``line``, ``of`` ("A → a"),
    ``how``."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for call in roles.calls(program.func.body):
        if not REGISTRY[call.op.name].moves and call.op.name not in ("ts.tma_copy", "ts.peer_rows"):
            continue
        src, dst = (r.source for r in call.args[:2])
        if not any(b.ty.storage_scope.startswith("global") for b in (src, dst)):
            continue
        loc = loc_of(call.span)
        row = {
            "line": loc.line if loc else 0,
            "of": f"{src.name} → {dst.name}",
            "how": _how(program, kernel, call),
        }
        found.setdefault(tuple(row.values()), row)
    return list(found.values())


def _how(program: TileProgram, kernel: ThreadKernel, call: Any) -> str:
    if call.op.name in ("ts.tma_copy", "ts.tma_load", "ts.tma_store"):
        return "by TMA"
    if call.op.name == "ts.peer_rows":
        return "by TMA, to another rank"
    if call.op.name == "ts.remote_copy":
        return "by threads, to or from another rank or block"
    if call.op.name == "ts.cp_async_element":
        return f"by cp.async, {int(call.attrs['bytes'])} bytes at a time"
    if call.op.name == "ts.cp_async":
        return f"by cp.async, {chunk(call, integer_names(program.func.body))} bytes at a time"
    width = kernel.widths.get(call, 0)
    return f"by threads, {width} bytes at a time" if width else "by threads, element by element"


def loops(program: TileProgram) -> list[dict[str, Any]]:
    """Every pipelined loop: ``line``, the stages that were ``asked`` for, those that it has by the names of
    its tiles, and whether its copies run ``ahead`` of the computation at all."""
    found: dict[int, dict[str, Any]] = {}
    for ring in program.schedule.rings:
        if ring.single or ring.loc is None:
            continue
        row = found.setdefault(
            ring.loc.line, {"line": ring.loc.line, "asked": ring.asked, "stages": {}, "ahead": False}
        )
        row["stages"][", ".join(ring.buffers)] = ring.depth
        row["ahead"] = row["ahead"] or ring.form in (ROLES, AHEAD)
    return list(found.values())
