"""What TileLang's programs write instructions of tensor cores with, by its names: layouts of shared tiles,
and the classes that write products by hand, over T.mma_sync."""

from __future__ import annotations

from tilescale.cuda.intrinsics.layout.mma_layout import get_swizzle_layout, make_mma_swizzle_layout
from tilescale.cuda.intrinsics.layout.utils import get_mma_micro_size
from tilescale.cuda.intrinsics.macro.mma_macro_generator import (
    INT4TensorCoreIntrinEmitter,
    TensorCoreIntrinEmitter,
    TensorCoreIntrinEmitterWithLadderTransform,
)

__all__ = [
    "INT4TensorCoreIntrinEmitter",
    "TensorCoreIntrinEmitter",
    "TensorCoreIntrinEmitterWithLadderTransform",
    "get_mma_micro_size",
    "get_swizzle_layout",
    "make_mma_swizzle_layout",
]
