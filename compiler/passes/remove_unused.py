"""Drops bindings that nobody reads, and the loads in them, which may lie outside their tensor."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.ir.operations import find
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.tvm_compat import ir, structural_map, structural_walk, tirx


def remove_unused(program: TileProgram) -> TileProgram:
    """Removes pure bindings without a use, until none is left."""
    body = program.func.body
    while True:
        binds: list[Any] = []
        structural_walk(body, (tirx.Bind, binds.append))
        uses: dict[Any, int] = {}
        structural_walk(body, (ir.Var, lambda v, uses=uses: uses.__setitem__(v, uses.get(v, 0) + 1)))
        # the definition itself may or may not count as an appearance of the variable: see what a lone
        # definition gives
        dead = {s.var for s in binds if uses.get(s.var, 0) <= _DEFINITION_COUNTS and _pure(s.value)}
        if not dead:
            return program if body.same_as(program.func.body) else program.with_body(body)
        nothing = tirx.Evaluate(tirx.IntImm("int32", 0))
        body = structural_map(
            body, (tirx.Bind, lambda s, dead=dead, nothing=nothing: nothing if s.var in dead else s)
        )


def _definition_count() -> int:
    var = tirx.Var("probe", "int32")
    seen: list[Any] = []
    structural_walk(tirx.Bind(var, tirx.IntImm("int32", 0)), (ir.Var, seen.append))
    return len(seen)


def _pure(value: Any) -> bool:
    impure: list[Any] = []
    structural_walk(value, (ir.Call, lambda c: impure.append(c) if find(c) is not None else None))
    return not impure


_DEFINITION_COUNTS = _definition_count()
