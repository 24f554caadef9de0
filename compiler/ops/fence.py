"""The fences that a GPU's threads need and no author writes: put by passes/insert_barriers.py between
statements at the scheduled level."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.ir.contexts import SimContext
from tilescale.compiler.ir.operations import VOID, Access, TileOp, register
from tilescale.compiler.tvm_compat import ir, tirx


def fence(scope: str, why: str, span: Any, proxy: bool = False) -> Any:
    """``ts.sync()``: the threads of an executor synchronize, and see what each wrote to shared and global
    memory before.

    scope: "warp", "warpgroup" or "block". why: the pair of accesses that it orders, for people. proxy: what
    they wrote to shared memory is visible to the asynchronous proxy too (TMA, wgmma).
    """
    attrs = {"scope": scope, "why": why, "proxy": int(proxy)}
    return tirx.Evaluate(ir.Call("ts.sync", [], attrs=attrs, ret_ty=VOID, span=span), span)


def proxy_fence(why: str, span: Any) -> Any:
    """``ts.proxy_fence()``: between what threads do to tensors, or know that others did, and what TMA does
    there behind it (PTX ISA, "fence.proxy.async", of global memory).

    why: what it orders, for people.
    """
    attrs = {"executor": "block", "why": why}
    return tirx.Evaluate(ir.Call("ts.proxy_fence", [], attrs=attrs, ret_ty=VOID, span=span), span)


@register
class ProxyFence(TileOp):
    name = "proxy_fence"
    levels = ("scheduled",)
    attributes = ("why",)

    def effects(self, call: Any) -> list[Access]:
        return []

    def simulate(self, call: Any, cx: Any) -> Any:
        return lambda ex: None  # one statement of an executor follows the other there


@register
class Sync(TileOp):
    name = "sync"
    levels = ("scheduled",)
    attributes = ("scope", "why", "proxy")

    def effects(self, call: Any) -> list[Access]:
        return []

    def simulate(self, call: Any, cx: SimContext) -> Any:
        return lambda ex: None  # one statement of an executor follows the other there
