"""A put with its signal (``T.copy(…, dst=rank, signal=s[i])``) as the two statements that it stands for, so
that the passes behind treat the copy like any other and put between the two what orders them."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.ir.operations import VOID
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.rewrite import rebuild
from tilescale.compiler.ir.scales import Executor
from tilescale.compiler.tvm_compat import ir, tirx


def split_puts(program: TileProgram) -> TileProgram:
    """The program with every put cut in two."""

    def leaf(s: Any, ex: Executor) -> list[Any] | None:
        call = s.value if isinstance(s, tirx.Evaluate) else None
        if not isinstance(call, ir.Call) or call.op.name != "ts.remote_copy" or len(call.args) < 5:
            return None
        src, dst, peer, counter, value = call.args
        attrs = dict(call.attrs)
        signalled = {"executor": attrs["executor"], "reach": attrs["reach"], "op": attrs["signal_op"]}
        plain = {k: v for k, v in attrs.items() if k != "signal_op"}
        copied = ir.Call(call.op, [src, dst, peer], attrs=plain, ret_ty=call.ty, span=call.span)
        signal = ir.Call("ts.signal", [counter, value, peer], attrs=signalled, ret_ty=VOID, span=call.span)
        return [tirx.Evaluate(copied, s.span), tirx.Evaluate(signal, s.span)]

    return program.with_body(rebuild(program.func.body, Executor("block", program.launch.threads), leaf))
