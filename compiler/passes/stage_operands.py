"""Operands where a GPU's operations can reach them: tiles in registers for what reductions fold, tiles in
shared memory for what products and scans read. What lies elsewhere is copied first, and results are copied
back. Each operation says so itself (``TileOp.stage``).

An atomic update whose old value a block wants is done by one thread, which passes the value on through shared
memory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tilescale.compiler.ir.lowerings import lowering
from tilescale.compiler.ir.operations import VOID, find
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.rewrite import rebuild
from tilescale.compiler.ir.scales import Executor
from tilescale.compiler.tvm_compat import ir, structural_walk, tirx

ZERO = tirx.IntImm("int32", 0)


class Staging:
    """What `TileOp.stage` works with."""

    def __init__(self, program: TileProgram):
        self.program = program
        self.executor = Executor("block", program.launch.threads)
        self.made: list[Any] = []
        #: tiles that products sum into
        self.accumulators: set[Any] = set()
        structural_walk(program.func.body, (ir.Call, self._look))

    def _look(self, call: Any) -> None:
        if (op := find(call)) is not None and op.multiplies:
            self.accumulators.add(call.args[2].source)

    def tile(self, name: str, shape: Any, dtype: str, scope: str, span: Any = None) -> Any:
        """A new tile, all of it as a region; its allocation stands in front of the statements that are
        returned."""
        extents = tuple(int(e) for e in shape) or (1,)
        var = tirx.decl_buffer(extents, dtype, name, scope=scope, data_alignment=64, layout=None)
        self.made.append(tirx.AllocBuffer(var, {}, span))
        return whole(var)

    def copy(self, src: Any, dst: Any, like: Any) -> Any:
        """``T.copy(src, dst)`` at the place of the operation ``like``."""
        return copy_statement(src, dst, like)

    def again(self, call: Any, args: list[Any], attrs: dict[str, Any] | None = None) -> Any:
        """The operation with other operands."""
        return again(call, args, attrs)


def whole(var: Any) -> Any:
    """All of a tile as a region."""
    return tirx.BufferRegion(
        var, [ir.Range.from_min_extent(tirx.IntImm("int32", 0), e) for e in var.ty.shape]
    )


def is_whole(region: Any) -> bool:
    """Whether a region is all of its tile."""
    return all(
        isinstance(r.min, tirx.IntImm)
        and int(r.min.value) == 0
        and isinstance(r.extent, tirx.IntImm)
        and int(r.extent.value) == int(e)
        for r, e in zip(region.region, region.source.ty.shape, strict=True)
    )


def copy_statement(src: Any, dst: Any, like: Any) -> Any:
    where = {"executor": "block", "reach": "block"}
    if isinstance(like, ir.Call) and like.attrs and "executor" in like.attrs:
        where = {k: str(like.attrs[k]) for k in ("executor", "reach")}
    return tirx.Evaluate(ir.Call("ts.copy", [src, dst], attrs=where, ret_ty=VOID, span=like.span), like.span)


def again(call: Any, args: list[Any], attrs: dict[str, Any] | None = None) -> Any:
    made = ir.Call(call.op, args, attrs={**dict(call.attrs), **(attrs or {})}, ret_ty=call.ty, span=call.span)
    return tirx.Evaluate(made, call.span)


def stage_operands(program: TileProgram) -> TileProgram:
    """The program with every operand where its operation can reach it."""
    program = replace(program, notes=list(program.notes))
    staging = Staging(program)

    def leaf(s: Any, ex: Executor) -> list[Any] | None:
        staging.executor, staging.made = ex, []
        if isinstance(s, tirx.Bind):
            return _shared_result(s, staging)
        if not isinstance(s, tirx.Evaluate):
            return None
        done = lowering(s.value, program.target).stage(s.value, staging)
        return None if done is None else [*staging.made, *done]

    return program.with_body(rebuild(program.func.body, staging.executor, leaf, _named))


def _named(e: Any, node: Any, ex: Executor) -> tuple[list[Any], Any]:
    """A condition that reads a tile in registers, or an extent that reads anything, as a name bound in front:
    C evaluates an extent anew in every round, and the loop may change what it reads."""
    found: list[Any] = []
    loop = isinstance(node, tirx.For)
    held = ("local", "local.fragment")
    if not isinstance(e, int):
        structural_walk(
            e,
            (ir.TensorLoad, lambda x: found.append(x) if loop or x.source.ty.storage_scope in held else None),
        )
    if not found:
        return [], e
    var = tirx.Var("value", e.ty)
    return [tirx.Bind(var, e, node.span)], var


def _shared_result(s: Any, staging: Staging) -> list[Any] | None:
    """``prev = T.atomic_add(…)``: one thread adds, all threads read what was there."""
    op = find(s.value)
    if op is None or staging.executor.threads == 1:
        return None
    prev = staging.tile(s.var.name, (1,), str(s.value.ty), "shared", s.span)
    store = tirx.BufferStore(prev.source, s.value, [ZERO], s.span)
    return [*staging.made, store, tirx.Bind(s.var, tirx.BufferLoad(prev.source, [ZERO]), s.span)]
