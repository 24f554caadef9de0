"""Atomic updates of one element of a rank's symmetric memory, by any rank: ``T.atomic_add(count[0], 1,
dst=peer, return_prev=True)``.

Order: an update acquires what earlier updates of the element by this operation released, and releases what
its executor did before, at the scope of the system. Which memory it is, the own one too, does not matter;
``T.atomic_add`` without a rank is atomic among the blocks of its own rank alone.
"""

from __future__ import annotations

from typing import Any

from tilescale.compiler.builder import state as bld
from tilescale.compiler.builder.values import Buffer, Region, convert
from tilescale.compiler.ir import source
from tilescale.compiler.ir.contexts import SimContext
from tilescale.compiler.ir.operations import VOID, Access, TileOp, register
from tilescale.compiler.ops.atomic import DTYPES, check_order
from tilescale.compiler.ops.base import element, emit, is_tile, of_iterations, require_inside
from tilescale.compiler.tvm_compat import ir, tirx
from tilescale.errors import TileSyntaxError, TileTypeError
from tilescale.language.booleans import require_bools


def remote(
    kind: str,
    peer: Any,
    operand: Any,
    value: Any = 0,
    memory_order: str | None = None,
    return_prev: bool = False,
    use_tma: bool = False,
) -> Any:
    """``T.atomic_<kind>`` of an element of rank ``peer``'s; the value before, where it is asked for.

    Raises:
        TileTypeError: a tile, memory that is not symmetric, a dtype without atomic updates. TileSyntaxError:
            no T.Scale("device"), or an iteration of T.Parallel.
    """
    from tilescale.compiler.ops.copy import check_peer

    check_order(memory_order, kind)
    require_bools(return_prev=return_prev, use_tma=use_tma)
    what, loc = f"T.atomic_{kind}", source.current()
    if loop := of_iterations():
        raise TileSyntaxError(
            f"{what} of a peer's memory in {loop}", loc=loc, hint='T.serial, or T.Scale("thread") around it'
        )
    if bld.current().reach == "cta_cluster":
        raise TileSyntaxError(
            f"{what} of another block's memory", loc=loc, hint="T.signal(s[i], dst=block) on a T.alloc_signal"
        )
    if isinstance(value, (Buffer, Region)) or not is_tile(operand):
        raise TileTypeError(
            f"{what} of a peer's memory is of one element", loc=loc, expected=f"{what}(A[i], …)"
        )
    to = element(operand, f"the target of {what}")
    if to.dtype not in DTYPES:
        raise TileTypeError(f"{what} of {to.dtype}", loc=loc, expected="one of " + ", ".join(DTYPES))
    if to.buffer.kind == "signal":
        raise TileTypeError(
            f"{what} of the signal {to.name}", loc=loc, hint="T.signal(s[i], value, dst=rank)"
        )
    require_inside(to)
    b = bld.current()
    args = [to.ir(), convert(value, to.dtype), check_peer(peer, to, "src" if kind == "load" else "dst")]
    if kind != "load" and not return_prev:
        emit("remote_atomic", args, {"kind": kind})
        return None
    dt = ir.PrimType(str(to.dtype))
    prev = tirx.Var(b.unique("prev"), dt)
    attrs = {"kind": kind, "executor": b.executor, "reach": b.reach}
    b.emit(
        tirx.Bind(prev, ir.Call("ts.remote_atomic", args, attrs=attrs, ret_ty=dt, span=b.span()), b.span())
    )
    return prev


@register
class RemoteAtomic(TileOp):
    name = "remote_atomic"
    attributes = ("kind",)
    observed = True

    def acquires(self, call: Any) -> bool:
        return True

    def written(self, call: Any) -> str:
        return f"T.atomic_{call.attrs['kind']}"

    def effects(self, call: Any) -> list[Access]:
        kind = str(call.attrs["kind"])
        return [Access(call.args[0], "update", call.args[2], half=kind if kind in ("load", "store") else "")]

    def order(self, call: Any) -> tuple[bool, bool]:
        kind = str(call.attrs["kind"])
        return kind != "load", kind != "store"

    def simulate(self, call: Any, cx: SimContext) -> Any:
        from tilescale.compiler.sim import atomics

        target, kind = cx.view(call.args[0], call), str(call.attrs["kind"])
        value, peer = cx.scalar(call.args[1]), cx.scalar(call.args[2])
        asked = str(call.ty) != str(VOID)
        return lambda ex: atomics.elements(ex, target, kind, value(ex), peer(ex), asked)
