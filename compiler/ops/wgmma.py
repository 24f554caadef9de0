"""Products that warpgroups start and await (scheduled level of a GPU only; PTX ISA, "Asynchronous Warpgroup
Level Matrix Multiply"), the wait for them, and turns at the tensor cores."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.ir.contexts import SimContext
from tilescale.compiler.ir.operations import REGISTRY, VOID, Access, TileOp, register
from tilescale.compiler.ops.gemm import Gemm
from tilescale.compiler.ops.gemm_sp import GemmSp
from tilescale.compiler.tvm_compat import ir, tirx

#: ``attrs["pending"]`` of a product that no wait of its own follows
FREE = -1
#: what is done about turns: see `PingPongBarrier`
TURNS = ("first", "take", "pass", "last")


def await_products(
    tiles: list[Any],
    span: Any,
    operands: Any = (),
    pending: int = 0,
    behind: Any = (),
    straight: bool = False,
) -> Any:
    """``ts.await_products(tiles, operands, behind)``: all products but those of the last ``pending`` calls
    are complete. ``tiles``, their accumulators, may be read behind it, and ``operands`` written. ``behind``:
    fragments that are computed while the products run. ``straight``: what follows reads ``tiles`` in no
    branch."""
    attrs = {
        "executor": "block",
        "pending": pending,
        "tiles": len(tiles),
        "behind": len(behind),
        "straight": int(straight),
    }
    return tirx.Evaluate(
        ir.Call("ts.await_products", [*tiles, *operands, *behind], attrs=attrs, ret_ty=VOID, span=span), span
    )


def wgmma(call: Any, pending: int, **more: Any) -> Any:
    """A T.gemm, T.gemm_sp, or such a product already, as one that runs on, behind which all but the last
    ``pending`` are awaited."""
    name = "ts.wgmma" if REGISTRY[call.op.name].spelling == "gemm" else "ts.wgmma_sp"
    attrs = {k: v for k, v in dict(call.attrs).items() if k != "wg_wait"}
    return ir.Call(
        name, list(call.args), attrs={**attrs, "pending": pending, **more}, ret_ty=call.ty, span=call.span
    )


def ping_pong_barrier(what: str, span: Any) -> Any:
    """``ts.ping_pong_barrier()``, one of `TURNS`."""
    return tirx.Evaluate(
        ir.Call(
            "ts.ping_pong_barrier", [], attrs={"executor": "block", "what": what}, ret_ty=VOID, span=span
        ),
        span,
    )


class _RunsOn(TileOp):
    """Of both kinds of products. ``pending``: how many may be under way behind it, `FREE` where nothing is
    awaited there. ``first_thread``: the first thread of the one warpgroup that has the accumulator."""

    levels = ("scheduled",)
    plain = False

    def queue(self, call: Any) -> str:
        return "product"

    def pending(self, call: Any) -> int:
        return int(call.attrs["pending"])


@register
class Wgmma(_RunsOn, Gemm):
    name = "wgmma"
    attributes = ("trans_a", "trans_b", "policy", "precision?", "pending", "first_thread?")


@register
class WgmmaSp(_RunsOn, GemmSp):
    """Its places lie in registers, which it reads as long as it runs."""

    name = "wgmma_sp"
    attributes = ("trans_a", "trans_b", "policy", "pending", "first_thread?")


@register
class AwaitProducts(TileOp):
    name = "await_products"
    levels = ("scheduled",)
    attributes = ("pending", "tiles", "behind", "straight")
    completes = True

    def effects(self, call: Any) -> list[Access]:
        count = int(call.attrs["tiles"])
        made = [Access(tile, mode) for tile in call.args[:count] for mode in ("read", "write")]
        # Until here they must stay as they are.
        return [
            *made,
            *(Access(o, "read") for o in call.args[count:]),
        ]

    def simulate(self, call: Any, cx: SimContext) -> Any:
        from tilescale.compiler.sim import flights

        pending = int(call.attrs["pending"])
        return lambda ex: flights.wait(ex, flights.PRODUCT, pending)


@register
class PingPongBarrier(TileOp):
    """The warpgroups of a block issue their products one after the other, in a circle: the softmax of one
    runs while the tensor cores work for another. "first": the turn is warpgroup 0's. "take": waits for the
    own turn. "pass": gives it on. "last": takes it back, so that there is none. Nothing depends on turns but
    time."""

    name = "ping_pong_barrier"
    levels = ("scheduled",)
    attributes = ("what",)

    def effects(self, call: Any) -> list[Access]:
        return []

    def simulate(self, call: Any, cx: SimContext) -> Any:
        return lambda ex: None
