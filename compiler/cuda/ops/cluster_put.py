"""How the operations of compiler/ops/cluster_put.py are done on the GPU."""

from __future__ import annotations

from tilescale.compiler.cuda import bulk
from tilescale.compiler.ir.lowerings import lowers

lowers("cuda", "cluster_put")(bulk.put)
lowers("cuda", "await_puts")(bulk.await_puts)
