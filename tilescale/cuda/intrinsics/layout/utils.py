"""Extents of matrix instructions, by TileLang's name."""

from __future__ import annotations

from typing import Any

from tilescale.language.dtypes import canonical


def get_mma_micro_size(dtype: Any) -> tuple[int, int, int]:
    """Rows, columns and depth of the tile that a warp's mma of this dtype works on: 16 × 16 × 32 bytes."""
    return 16, 16, 256 // canonical(dtype).bits
