"""How the operations of compiler/ops/puts.py are done on the GPU."""

from __future__ import annotations

from tilescale.compiler.cuda.bulk import await_puts
from tilescale.compiler.ir.lowerings import lowers

lowers("cuda", "await_puts")(await_puts)
