"""How the operations of compiler/ops/mbarrier.py are done on the CPU."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.cpu.lower import Lowering as CpuLowering
from tilescale.compiler.ir import source
from tilescale.compiler.ir.lowerings import lowers
from tilescale.errors import TileSyntaxError


@lowers(
    "cpu",
    "mbarrier_arrive",
    "mbarrier_expect_tx",
    "mbarrier_wait_parity",
    "tma_copy",
    "tma_store_arrive",
    "tma_store_wait",
)
def lower_mbarrier(call: Any, cx: CpuLowering) -> Any:
    raise TileSyntaxError(
        f"T.{call.op.name.removeprefix('ts.')} is not there on the cpu target: it is an instruction of GPUs",
        loc=source.loc_of(call.span),
        hint="T.Pipelined, T.copy and T.signal say the same for all targets",
    )
