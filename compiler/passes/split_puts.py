"""A put with its signal (``T.copy(…, dst=rank, signal=s[i])``) as the two statements that it stands for, so
that the passes behind treat the copy like any other and put between the two what orders them. Non-blocking
ones stay whole until it is known who makes them (remote_puts.py)."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.ir.operations import REGISTRY, VOID, name_of
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.rewrite import rebuild
from tilescale.compiler.ir.scales import Executor
from tilescale.compiler.tvm_compat import ir, tirx


def split_puts(program: TileProgram) -> TileProgram:
    """The program with every put that its executor makes cut in two."""

    def leaf(s: Any, ex: Executor) -> list[Any] | None:
        if name_of(s) != "remote_copy" or len(s.value.args) < 5 or REGISTRY[s.value.op.name].queue(s.value):
            return None
        return in_two(s)

    return program.with_body(rebuild(program.func.body, Executor("block", program.launch.threads), leaf))


def in_two(s: Any) -> list[Any]:
    """A put, or a pull, as a copy and a signal by the same executor: of a pull's own rank."""
    call = s.value
    src, dst, peer, counter, value = call.args
    attrs = dict(call.attrs)
    signalled = {"executor": attrs["executor"], "reach": attrs["reach"], "op": attrs["signal_op"]}
    plain = {k: v for k, v in attrs.items() if k not in ("signal_op", "nonblocking")}
    copied = ir.Call(call.op, [src, dst, peer], attrs=plain, ret_ty=call.ty, span=call.span)
    told = [peer] if str(attrs["side"]) == "dst" else []
    signal = ir.Call("ts.signal", [counter, value, *told], attrs=signalled, ret_ty=VOID, span=call.span)
    return [tirx.Evaluate(copied, s.span), tirx.Evaluate(signal, s.span)]
