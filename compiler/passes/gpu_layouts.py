"""Layouts of a block's tiles on a GPU, beside the IR: ``program.layouts``. Registers by inference (layout/infer.py); shared memory by
what reads it: a swizzle where ldmatrix does, row-major rows elsewhere."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.layout import Fragment, Shared
from tilescale.compiler.layout.infer import Demand, Executor, gather, infer
from tilescale.compiler.layout.loops import bits_of, in_registers
from tilescale.compiler.layout.shared import strided
from tilescale.compiler.ops import base
from tilescale.errors import TileTypeError


def gpu_layouts(program: Any) -> Any:
    """The program with a layout for each allocated tile.

    Raises:
        TileValueError: two statements demand different layouts of one tile.
    """
    annotated = _annotated(program)
    chosen: dict[Any, Any] = infer(program, {b: d for b, d in annotated.items() if isinstance(d.layout, Fragment)})
    shared = {b: d.layout for b, d in annotated.items() if isinstance(d.layout, Shared)}
    uses = gather(program)
    for use in uses.items:
        op = base.find(use.call) if use.call is not None else None
        for b, layout in (op.shared_layouts(use.call) if op is not None else {}).items():
            shared.setdefault(b, layout)
    for b in uses.owners:
        if not in_registers(b):
            chosen[b] = shared.get(b) or strided(tuple(int(e) for e in b.ty.shape), bits_of(b))
    program.layouts = chosen
    return program


def _annotated(program: Any) -> dict[Any, Demand]:
    """What T.annotate_layout fixes."""
    found: dict[Any, Demand] = {}
    for buffer, layout in (program.launch.hints.get("layouts") or {}).items():
        if not isinstance(layout, (Fragment, Shared)):
            raise TileTypeError(
                f"T.annotate_layout gives {buffer.name} {layout!r}", loc=program.launch.loc, expected="a Fragment or a Shared layout"
            )
        found[buffer.var] = Demand(buffer.var, layout, "T.annotate_layout", program.launch.loc)
    return found


__all__ = ["Executor", "gpu_layouts"]
