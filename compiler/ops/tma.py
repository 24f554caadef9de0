"""Copies by TMA (scheduled level of a GPU only; PTX ISA, "cp.async.bulk.tensor"): into rings, and out of
tiles, with the wait in front of the next use of the memory that stores read, or of what they wrote."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.ir.contexts import SimContext
from tilescale.compiler.ir.operations import VOID, Access, TileOp, register
from tilescale.compiler.ops.atomic import Atomic
from tilescale.compiler.ops.copy import Copy, Filling
from tilescale.compiler.tvm_compat import ir, tirx


def tma_store(call: Any, tile: Any, to: Any) -> Any:
    """``ts.tma_store(tile, to)`` in place of a part of a T.copy."""
    return _instead(call, "ts.tma_store", [tile, to])


def tma_reduce(call: Any, to: Any, tile: Any) -> Any:
    """``ts.tma_reduce(to, tile)`` in place of a part of an atomic update by a tile."""
    return _instead(call, "ts.tma_reduce", [to, tile], {"kind": call.attrs["kind"]})


def _instead(call: Any, name: str, args: list[Any], more: dict[str, Any] | None = None) -> Any:
    where = {k: call.attrs[k] for k in ("executor", "reach")}
    return tirx.Evaluate(
        ir.Call(name, args, attrs={**where, **(more or {})}, ret_ty=VOID, span=call.span), call.span
    )


def await_stores(tile: Any, span: Any, complete: bool = False) -> Any:
    """``ts.await_stores(tile)``: every ``T.copy`` by TMA out of ``tile`` that was issued before has read it;
    the tile may be written. ``complete``: those of all tiles have written what they store too, and what
    follows comes behind that."""
    attrs = {"executor": "block", "complete": int(complete)}
    return tirx.Evaluate(ir.Call("ts.await_stores", [tile], attrs=attrs, ret_ty=VOID, span=span), span)


@register
class TmaLoad(Filling):
    """Made by one thread. ``multicast``: the cluster's axes along which blocks share the tile, each copying
    its part into all of them."""

    name = "tma_load"
    attributes = (*Filling.attributes, "multicast?")
    guarded = True


@register
class TmaStore(Copy):
    """A tile into a tensor, from where it was issued until it is awaited. ``groups``: of how many warpgroups
    each stores its own rows."""

    name = "tma_store"
    levels = ("scheduled",)
    attributes = ("groups?",)
    plain = False

    def queue(self, call: Any) -> str:
        return "store"

    def effects(self, call: Any) -> list[Access]:
        tile, to = call.args
        return [
            Access(tile, "read", asynchronous=True, proxy="async"),
            Access(to, "write", asynchronous=True, proxy="async"),
        ]

    def nest(self, call: Any) -> Any:
        return None

    def simulate(self, call: Any, cx: SimContext) -> Any:
        from tilescale.compiler.sim import flights, tiles

        site, src, dst = cx.site_of(call), cx.view(call.args[0], call), cx.view(call.args[1], call)

        def begin(ex: Any, engine: Any) -> None:
            source, target = src.placed(ex, None), dst.placed(ex, None)
            move = lambda: target.write(tiles.converted(source.read(), src.dtype, dst.dtype))  # noqa: E731
            flights.start(ex, flights.STORE, engine, site, (source,), None, move)

        return begin


@register
class TmaReduce(Atomic):
    """``ts.tma_reduce(tensor, tile)``: an atomic update of each element of a part of a tensor by a tile, as a
    store of it."""

    name = "tma_reduce"
    levels = ("scheduled",)
    attributes = ("kind",)
    in_lanes = in_iterations = False

    def queue(self, call: Any) -> str:
        return "store"

    def effects(self, call: Any) -> list[Access]:
        return [
            Access(call.args[1], "read", asynchronous=True, proxy="async"),
            Access(call.args[0], "update", asynchronous=True),
        ]

    def nest(self, call: Any) -> Any:
        return None

    def simulate(self, call: Any, cx: SimContext) -> Any:
        from tilescale.compiler.sim import flights, numerics, tiles

        target, kind = cx.view(call.args[0], call), str(call.attrs["kind"])
        site, source = cx.site_of(call), cx.view(call.args[1], call)

        def begin(ex: Any, engine: Any) -> None:
            frm, to = source.placed(ex, None), target.placed(ex, None)

            def move() -> None:
                old, new = (numerics.decode(x.read(), target.dtype) for x in (to, frm))
                to.write(
                    tiles.ATOMIC[kind](old, new.reshape(old.shape)).astype(numerics.storage(target.dtype))
                )

            flights.start(ex, flights.STORE, engine, site, (frm,), None, move)

        return begin


@register
class AwaitStores(TileOp):
    name = "await_stores"
    levels = ("scheduled",)
    attributes = ("complete", "groups?")
    completes = True

    def effects(self, call: Any) -> list[Access]:
        # The thread that issued the stores waits for them. To everyone else they are its reads: who writes
        # the tile behind this conflicts with it.
        return [Access(call.args[0], "read")]

    def simulate(self, call: Any, cx: SimContext) -> Any:
        from tilescale.compiler.sim import flights

        complete = bool(int(call.attrs["complete"]))
        return lambda ex: flights.wait(ex, flights.STORE, complete=complete)
