"""The class of ``kernel.params``' entries, where TileLang's programs take it from."""

from __future__ import annotations

from tilescale.parameter import KernelParam

__all__ = ["KernelParam"]
