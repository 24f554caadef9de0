"""Tensors to which a kernel only adds: where a call allocates one, it begins with zeros."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.ir.buffers import bases
from tilescale.compiler.ir.operations import effects_of, find
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.tvm_compat import ir, structural_walk, tirx


def only_added(program: TileProgram) -> list[int]:
    """The parameters of which the traced kernel touches no element but by T.atomic_add."""
    modes: dict[Any, set[str]] = {}

    def call(c: Any) -> None:
        adds = c.attrs is not None and "add" in (str(c.attrs.get("kind", "")), str(c.attrs.get("op", "")))
        for a in effects_of(c) if find(c) is not None else ():
            mode = "add" if adds and a.mode == "update" else a.mode
            modes.setdefault(a.region.source, set()).add(mode)

    body = program.func.body
    structural_walk(body, (ir.Call, call))
    structural_walk(body, (ir.TensorLoad, lambda e: modes.setdefault(e.source, set()).add("read")))
    structural_walk(body, (tirx.BufferStore, lambda s: modes.setdefault(s.buffer, set()).add("write")))
    for view, base in bases(body).items():
        modes.setdefault(base, set()).update(modes.get(view, set()))
    return [k for k, p in enumerate(program.params) if modes.get(p.var) == {"add"}]


def mark_added(program: TileProgram, meta: dict[str, Any]) -> None:
    """Says so of the parameters in a kernel's metadata."""
    for k in only_added(program):
        meta["params"][k]["added"] = True
