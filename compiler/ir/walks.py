"""The statements of a program one by one, each with its executor."""

from __future__ import annotations

import functools
from typing import Any

from tilescale.compiler.ir.nests import Element, nest_of, reads
from tilescale.compiler.ir.scales import SCALES, Executor
from tilescale.compiler.tvm_compat import ir, structural_walk, tirx


@functools.lru_cache(maxsize=4096)
def walk(s: Any, ex: Executor) -> tuple[tuple[Any, Executor], ...]:
    """The statements that run as one (nests, operations, bindings, single stores, conditions as their If or
    loop), each with its executor, in the order of the text. Kept: statements never change, and most passes
    change few."""
    if isinstance(s, tirx.SeqStmt):
        return tuple(found for inner in s.seq for found in walk(inner, ex))
    if isinstance(s, tirx.AttrStmt):
        return walk(s.body, ex.within(SCALES[int(s.value.value)]) if s.attr_key == "ts.scale" else ex)
    if isinstance(s, (tirx.For, tirx.While)) and nest_of(s) is None:
        return ((s, ex), *walk(s.body, ex))
    if isinstance(s, tirx.IfThenElse):
        other = () if s.else_case is None else walk(s.else_case, ex)
        return ((s, ex), *walk(s.then_case, ex), *other)
    return ((s, ex),)


@functools.lru_cache(maxsize=4096)
def scalar_reads(s: Any) -> tuple[Element, ...]:
    """What a scalar statement reads of its own: of a loop or an If only extent and condition. Kept, as
    `operations` are."""
    if isinstance(s, tirx.For):
        return tuple(reads(s.extent))
    if isinstance(s, (tirx.IfThenElse, tirx.While)):
        return tuple(reads(s.condition))
    if isinstance(s, tirx.Bind):
        return tuple(reads(s.value))
    if isinstance(s, tirx.Evaluate):  # the scalars that an operation takes beside its tiles
        found: list[Element] = []
        structural_walk(
            s.value,
            (ir.TensorLoad, lambda x: found.append(Element(x.source, tuple(x.indices), "read", False, x))),
        )
        return tuple(found)
    return ()


def mentions(e: Any, var: Any) -> bool:
    """Whether an expression or a statement names a variable."""
    found: list[Any] = []
    structural_walk(e, (ir.Var, lambda v: found.append(v) if v.same_as(var) else None))
    return bool(found)
