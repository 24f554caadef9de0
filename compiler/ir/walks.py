"""The statements of a program one by one, each with its executor."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from tilescale.compiler.ir.nests import Element, nest_of, reads
from tilescale.compiler.ir.scales import SCALES, Executor
from tilescale.compiler.tvm_compat import ir, structural_walk, tirx


def walk(s: Any, ex: Executor) -> Iterator[tuple[Any, Executor]]:
    """The statements that run as one (nests, operations, bindings, single stores, conditions as their If or
    loop), each with its executor, in the order of the text."""
    if isinstance(s, tirx.SeqStmt):
        for inner in s.seq:
            yield from walk(inner, ex)
    elif isinstance(s, tirx.AttrStmt):
        yield from walk(s.body, ex.within(SCALES[int(s.value.value)]) if s.attr_key == "ts.scale" else ex)
    elif nest_of(s) is not None:
        yield s, ex
    elif isinstance(s, tirx.For):
        yield s, ex
        yield from walk(s.body, ex)
    elif isinstance(s, tirx.While):
        yield s, ex
        yield from walk(s.body, ex)
    elif isinstance(s, tirx.IfThenElse):
        yield s, ex
        yield from walk(s.then_case, ex)
        if s.else_case is not None:
            yield from walk(s.else_case, ex)
    else:
        yield s, ex


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
