"""How the operations of compiler/ops/team.py are done on GPUs: what must hold of a team fails a launch as an
assertion does."""

from __future__ import annotations

from tilescale.compiler.gpu.ops.assertion import lower_assert
from tilescale.compiler.ir.lowerings import lowers

lowers("gpu", "team")(lower_assert)
