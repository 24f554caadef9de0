"""`determine_target` where TileLang's programs take it from."""

from __future__ import annotations

from tilescale.backend.target import determine_target

__all__ = ["determine_target"]
