"""How the operations of compiler/ops/fence.py are done on GPUs."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.ir.lowerings import lowers


@lowers("gpu", "sync")
def lower_sync(call: Any, cx: Any) -> Any:
    return cx.sync(str(call.attrs["scope"]), str(call.attrs["why"]), bool(int(call.attrs["proxy"])))
