"""The author's CUDA text, which the CPU does not run."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.cpu.lower import Lowering as CpuLowering
from tilescale.compiler.ir.lowerings import lowers
from tilescale.compiler.ops.extern import refused


@lowers("cpu", "call_extern")
def call_extern(call: Any, cx: CpuLowering) -> Any:
    raise refused(call, "cpu")
