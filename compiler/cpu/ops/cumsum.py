"""How the operations of compiler/ops/cumsum.py are done on the CPU."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.cpu.lower import Lowering as CpuLowering
from tilescale.compiler.cpu.reduce import emit_cumsum
from tilescale.compiler.cpu.view import like
from tilescale.compiler.ir.lowerings import lowers


@lowers("cpu", "cumsum")
def lower_cumsum(call: Any, cx: CpuLowering) -> Any:
    src, dst = cx.tile(call.args[0]), cx.tile(call.args[1])
    axis = int(call.attrs["axis"]) + len(src.shape)
    return emit_cumsum(
        cx, src, like(dst, src.shape), axis, bool(call.attrs["reverse"]), str(call.attrs["op"])
    )
