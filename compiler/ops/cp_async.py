"""Copies that a block's threads start and do not wait for (scheduled level of a GPU only; PTX ISA,
"cp.async")."""

from __future__ import annotations

from tilescale.compiler.ir.operations import register
from tilescale.compiler.ops.copy import Filling


@register
class CpAsync(Filling):
    name = "cp_async"
