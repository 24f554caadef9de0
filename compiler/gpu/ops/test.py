"""How the operations of compiler/ops/test.py are done on GPUs."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.ir.lowerings import lowers
from tilescale.compiler.ops.sync import is_global


@lowers("gpu", "test")
def lower_test(call: Any, cx: Any) -> Any:
    return cx.test(call) if is_global(call.args[0]) else cx.shared_test(call)
