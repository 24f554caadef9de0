"""Copies that a block's threads start and do not wait for (scheduled level of a GPU only; PTX ISA,
"cp.async")."""

from __future__ import annotations

from typing import Any, ClassVar

from tilescale.compiler.ir.contexts import SimContext
from tilescale.compiler.ir.nests import is_nest, loops_of
from tilescale.compiler.ir.operations import Access, find, register
from tilescale.compiler.ops.copy import Filling
from tilescale.compiler.ops.thread_copies import ThreadCopyElement
from tilescale.compiler.tvm_compat import tirx


@register
class CpAsync(Filling):
    name = "cp_async"


@register
class CpAsyncElement(Filling):
    """``ts.cp_async_element(src, dst, condition)``, the only statement of a T.Parallel nest: an element of a
    tensor into a stage of a ring; with a third operand zero where that does not hold, and nothing is read
    there. Neighbours along the tile's last axis are neighbours in the tensor: ``attrs["bytes"]`` of them
    begin at a multiple of their size, are inside of the tensor or outside of it as a whole, and come under
    one condition."""

    name = "cp_async_element"
    spelling = "Parallel"
    attributes: ClassVar[tuple[str, ...]] = ("ring", "bytes")
    in_lanes = True

    def effects(self, call: Any) -> list[Access]:
        when = call.args[2] if len(call.args) > 2 else None
        return [
            Access(call.args[0], "read", asynchronous=True, when=when),
            Access(call.args[1], "write", asynchronous=True),
        ]

    def simulate(self, call: Any, cx: SimContext) -> Any:
        from tilescale.compiler.sim import nest, rings

        src, dst = cx.view(call.args[0], call), cx.view(call.args[1], call)
        when = cx.scalar(call.args[2]) if len(call.args) > 2 else None

        def begin(ex: Any) -> None:  # where it copies is settled when it is issued, as of any copy
            where = True if when is None else when(ex)
            rings.start(ex, int(call.attrs["ring"]), nest.moving(ex, src, dst, where))

        return begin


def element_of(s: Any) -> Any:
    """The copy of an element, into a ring or by the author's groups, that a nest's iterations are; None for
    any other statement."""
    body: Any = loops_of(s)[-1].body if is_nest(s) else None
    call = body.value if isinstance(body, tirx.Evaluate) else None
    return call if isinstance(find(call), (CpAsyncElement, ThreadCopyElement)) else None
