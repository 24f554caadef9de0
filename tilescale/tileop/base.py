"""``GemmWarpPolicy``, by TileLang's name for its module."""

from __future__ import annotations

from tilescale.language import GemmWarpPolicy

__all__ = ["GemmWarpPolicy"]
