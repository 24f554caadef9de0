"""Tokens of rings on GPUs whose copies go in turn: nothing, since the barriers around each copy guard its
stage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilescale.compiler.ir.lowerings import lowers
from tilescale.compiler.ir.statements import sequence

if TYPE_CHECKING:
    from tilescale.compiler.gpu.lower import Lowering as GpuLowering


@lowers("gpu", "ring_acquire", "ring_commit", "ring_wait", "ring_release")
def lower_ring(call: Any, cx: GpuLowering) -> Any:
    return sequence([])
