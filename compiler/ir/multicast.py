"""Copies by TMA that the author shares among blocks of a cluster: who of them copies for whom."""

from __future__ import annotations

from typing import Any


def mask_of(call: Any) -> int:
    """The blocks that a copy is shared by, a bit for each; 0 where each copies for itself."""
    return int(call.attrs["cluster_mask"]) if "cluster_mask" in call.attrs else 0


def leading(mask: int) -> int:
    """The rank of the block that copies for all of a mask."""
    return (mask & -mask).bit_length() - 1


def others(mask: int, rank: int) -> tuple[int, ...] | None:
    """The other blocks that a block's copy goes to; None where it makes none."""
    if not mask >> rank & 1:
        return ()
    if rank != leading(mask):
        return None
    return tuple(k for k in range(mask.bit_length()) if mask >> k & 1 and k != rank)
