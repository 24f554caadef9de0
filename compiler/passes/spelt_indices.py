"""Indices of tiles in registers as what their names stand for.

In ``at = j // 8 * 16 + j % 8; y[i, j] = x[i, at]`` layouts follow ``at`` only where they see what it is: a
name that is bound inside of the loop is the same arithmetic of the loop's variables. A thread's slot of a
register is known when the kernel is compiled, so nothing is computed twice.
"""

from __future__ import annotations

from typing import Any

from tilescale.compiler.ir.multiples import bound_in, spelt_out
from tilescale.compiler.ir.nests import is_nest
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.tvm_compat import ir, structural_map, structural_walk, tirx


def spelt_indices(program: TileProgram) -> TileProgram:
    """The program with names in such indices replaced."""
    body = structural_map(program.func.body, (tirx.For, lambda s: _nest(s) if is_nest(s) else s))
    return program if body.same_as(program.func.body) else program.with_body(body)


def _nest(s: Any) -> Any:
    known = {v: e for v, e in bound_in(s.body).items() if "int" in str(v.ty) and _is_arithmetic(e)}
    if not known:
        return s
    own: set[Any] = set()
    structural_walk(s.body, (tirx.AllocBuffer, lambda a: own.add(a.buffer)))

    def spelt(buffer: Any, indices: Any) -> list[Any] | None:
        if not str(buffer.ty.storage_scope).startswith("local") or buffer in own:
            return None
        made = [spelt_out(e, known) for e in indices]
        return None if all(a is b for a, b in zip(made, indices, strict=True)) else made

    def load(e: Any) -> Any:
        made = spelt(e.source, e.indices)
        return e if made is None else tirx.BufferLoad(e.source, made)

    def store(x: Any) -> Any:
        made = spelt(x.buffer, x.indices)
        return x if made is None else tirx.BufferStore(x.buffer, x.value, made, x.span)

    return structural_map(structural_map(s, (ir.TensorLoad, load)), (tirx.BufferStore, store))


def _is_arithmetic(e: Any) -> bool:
    """Whether an expression is made of variables and constants alone: the same wherever it stands."""
    found: list[Any] = []
    structural_walk(e, ((ir.TensorLoad, ir.Call), found.append))
    return not found
