"""TileLang's emitters of mma by hand. They are refused by name: which instruction multiplies, and how
operands
lie among threads, the compiler decides."""

from __future__ import annotations

from typing import Any

from tilescale.errors import TileTypeError


class TensorCoreIntrinEmitter:
    """Refused.

    Raises:
        TileTypeError: always.
    """

    def __init__(self, *args: Any, **words: Any):
        raise TileTypeError(
            f"{type(self).__name__} emits mma by hand, which is not there",
            hint="T.gemm of tiles in shared memory or fragments",
        )


class TensorCoreIntrinEmitterWithLadderTransform(TensorCoreIntrinEmitter):
    """Refused, too."""


class INT4TensorCoreIntrinEmitter(TensorCoreIntrinEmitter):
    """Refused, too."""
