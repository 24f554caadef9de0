"""How the operations of compiler/ops/remote_atomic.py are done on GPUs."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.ir.lowerings import lowers


@lowers("gpu", "remote_atomic")
def lower_remote_atomic(call: Any, cx: Any) -> Any:
    return cx.remote_atomic(call)
