"""How a hint orders blocks, by TileLang's names."""

from __future__ import annotations

__all__ = ["NoRasterization", "Rasterization2DColumn"]


class NoRasterization:
    """Blocks in the order of their numbers."""


class Rasterization2DColumn:
    """Blocks in panels: ``T.use_swizzle``."""
