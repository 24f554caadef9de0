"""How the operation of compiler/ops/cp_async.py is done on the GPU."""

from __future__ import annotations

from tilescale.compiler.cuda import cp_async
from tilescale.compiler.ir.lowerings import lowers

lowers("cuda", "cp_async")(cp_async.load)
