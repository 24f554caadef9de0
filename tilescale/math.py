"""Whole numbers, by TileLang's name for the module."""

from __future__ import annotations

from tilescale.compat import cdiv, next_power_of_2

__all__ = ["cdiv", "next_power_of_2"]
