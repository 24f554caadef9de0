"""Products by hand and their layouts, by the name that TileLang's earlier programs import them by
(tilescale/cuda/intrinsics)."""

from __future__ import annotations

from tilescale.cuda.intrinsics import (
    INT4TensorCoreIntrinEmitter,
    TensorCoreIntrinEmitter,
    TensorCoreIntrinEmitterWithLadderTransform,
    get_mma_micro_size,
    get_swizzle_layout,
    make_mma_swizzle_layout,
)

__all__ = [
    "INT4TensorCoreIntrinEmitter",
    "TensorCoreIntrinEmitter",
    "TensorCoreIntrinEmitterWithLadderTransform",
    "get_mma_micro_size",
    "get_swizzle_layout",
    "make_mma_swizzle_layout",
]
