"""Extents of matrix instructions and where their elements lie, by TileLang's names."""

from __future__ import annotations

from typing import Any

from tilescale.cuda.intrinsics.layout.mma_layout import (
    mma_store_32x8_to_shared_16x16_layout,
    shared_16x16_to_mma_a_32x8_layout,
    shared_16x32_to_mma_a_32x16_layout,
    shared_32x16_to_mma_a_32x16_layout_trans,
)
from tilescale.language.dtypes import canonical


def get_mma_micro_size(dtype: Any) -> tuple[int, int, int]:
    """Rows, columns and depth of the tile that a warp's mma of this dtype works on: 16 × 16 × 32 bytes."""
    return 16, 16, 256 // canonical(dtype).bits


shared_16x16_to_mma_32x8_layout = shared_16x16_to_mma_a_32x8_layout
shared_16x32_to_mma_32x16_layout = shared_16x32_to_mma_a_32x16_layout
shared_32x16_to_mma_32x16_layout = shared_32x16_to_mma_a_32x16_layout_trans
mma_store_index_map = mma_store_32x8_to_shared_16x16_layout
