"""How the operations of compiler/ops/puts.py are done on the GPU."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.cuda.bulk import await_puts
from tilescale.compiler.ir.lowerings import lowers


@lowers("cuda", "await_puts")
def lower_await_puts(call: Any, cx: Any) -> Any:
    return await_puts(cx, call)
