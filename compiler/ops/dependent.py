"""Expert: what a kernel says of the launches in front of it and behind it on its stream (PTX ISA,
"griddepcontrol"). Launches have the order of the stream whatever it says, so results never depend on it, and
targets without such launches do nothing."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.builder import state as bld
from tilescale.compiler.ir import source
from tilescale.compiler.ir.contexts import SimContext
from tilescale.compiler.ir.operations import Access, TileOp, register
from tilescale.compiler.ops.base import emit
from tilescale.errors import TileSyntaxError


def pdl_sync() -> None:
    """The launches in front are complete behind this. The kernel is one of ``T.Kernel(…, pdl=True)``: it may
    begin before they have ended, and each of its threads awaits their end before it touches a tensor, at the
    beginning of the kernel.

    Raises:
        TileSyntaxError: outside T.Kernel, or in T.Parallel.
    """
    _launch("T.pdl_sync").pdl = True


def pdl_trigger() -> None:
    """The launch behind may begin, if it is one of ``pdl=True``; it awaits the end of this one before it
    touches a tensor.

    Raises:
        TileSyntaxError: outside T.Kernel, or in T.Parallel.
    """
    _launch("T.pdl_trigger")
    emit("pdl_trigger", [])


def _launch(what: str) -> Any:
    from tilescale.compiler.ops.sync import not_in_parallel

    launch = bld.current().launch
    if launch is None:
        raise TileSyntaxError(f"{what} stands outside T.Kernel", loc=source.current())
    not_in_parallel(what)
    return launch


@register
class PdlTrigger(TileOp):
    name = "pdl_trigger"

    def effects(self, call: Any) -> list[Access]:
        return []

    def simulate(self, call: Any, cx: SimContext) -> Any:
        return lambda ex: None  # launches are one after another
