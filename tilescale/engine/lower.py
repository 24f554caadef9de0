"""`tilescale.lower` where TileLang's programs take it from."""

from __future__ import annotations

from tilescale.lowered import lower

__all__ = ["lower"]
