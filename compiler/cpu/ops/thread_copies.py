"""How the operations of compiler/ops/thread_copies.py are done on the CPU: what nothing is under way for
needs no wait; copies of single threads are an instruction of GPUs."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.builder.values import as_expr
from tilescale.compiler.cpu.lower import Lowering as CpuLowering
from tilescale.compiler.ir import source
from tilescale.compiler.ir.lowerings import lowers
from tilescale.compiler.ir.operations import written
from tilescale.compiler.tvm_compat import tirx
from tilescale.errors import TileSyntaxError


@lowers("cpu", "thread_copies")
def thread_copies(call: Any, cx: CpuLowering) -> Any:
    return tirx.Evaluate(as_expr(0))


@lowers("cpu", "thread_copy", "thread_copies_arrive")
def refused(call: Any, cx: CpuLowering) -> Any:
    raise TileSyntaxError(
        f"{written(call)} is not there on the cpu target: it is an instruction of GPUs",
        loc=source.loc_of(call.span),
        hint="T.Pipelined and T.copy say the same for all targets",
    )
