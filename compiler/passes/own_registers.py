"""Tiles with a row for each thread (frontend/own.py), of which each thread touches the own row alone, become
registers: memory of a thread's own on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.tvm_compat import ir, structural_map, tirx


def own_registers(program: TileProgram) -> TileProgram:
    rows: dict[Any, Any] = program.hints.get("rows", {})
    if not rows:
        return program

    def load(e: Any) -> Any:
        return tirx.BufferLoad(rows[e.source], list(e.indices)[1:]) if e.source in rows else e

    def region(r: Any) -> Any:
        return tirx.BufferRegion(rows[r.source], list(r.region)[1:]) if r.source in rows else r

    def store(s: Any) -> Any:
        return (
            tirx.BufferStore(rows[s.buffer], s.value, list(s.indices)[1:], s.span) if s.buffer in rows else s
        )

    body = structural_map(program.func.body, (ir.TensorLoad, load))
    body = structural_map(body, (ir.TensorRegion, region))
    body = structural_map(body, (tirx.BufferStore, store))
    body = structural_map(
        body,
        (tirx.AllocBuffer, lambda s: tirx.AllocBuffer(rows[s.buffer], {}, s.span) if s.buffer in rows else s),
    )
    hints = {k: v for k, v in program.hints.items() if k != "rows"} | {"own": frozenset(rows.values())}
    return replace(program, hints=hints).with_body(body)
