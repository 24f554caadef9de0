"""How the operation of compiler/ops/cp_async.py is done on the GPU."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.cuda import cp_async
from tilescale.compiler.ir.lowerings import lowers


@lowers("cuda", "cp_async")
def lower_cp_async(call: Any, cx: Any) -> Any:
    return cp_async.load(cx, call)
