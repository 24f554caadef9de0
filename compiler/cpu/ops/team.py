"""How the operations of compiler/ops/team.py are done on the CPU: what must hold of a team fails a launch as
an assertion does."""

from __future__ import annotations

from tilescale.compiler.cpu.ops.assertion import lower_assert
from tilescale.compiler.ir.lowerings import lowers

lowers("cpu", "team")(lower_assert)
