"""Tensors as rows of numbers: how collectives cut them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tilescale.errors import TileTypeError

#: dtypes that sums are taken of
SUMMED = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Cut:
    """Numbers of a piece, blocks, threads of a block."""

    P: int
    blocks: int
    threads: int


def cut(size: int, itemsize: int, units: int, piece: int = 16 << 10) -> Cut:
    """For ``size`` bytes on a GPU of ``units`` multiprocessors: a vector of 16 bytes a thread for small
    messages, whose time is the trip's; pieces of ``piece`` bytes for large ones."""
    if size <= 256 << 10:
        return Cut((2 << 10) // itemsize, max(1, min(units, -(-size // (2 << 10)))), 128)
    return Cut(piece // itemsize, min(units, -(-size // piece)), 256)


def words(*sizes: int) -> tuple[torch.dtype, int]:
    """The widest integers that rows of so many bytes are made of, and how many of them make a vector. All
    ranks have to choose alike: ``sizes`` are what they agree on."""
    step = math.gcd(16, *sizes)
    kind = {16: torch.int64, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[step]
    return kind, step // kind.itemsize


def row(tensor: torch.Tensor, kind: torch.dtype | None = None) -> torch.Tensor:
    """A contiguous tensor as a row of numbers, of ``kind`` where that is given. One that does not begin at
    16 bytes is copied: kernels are made for rows that do."""
    flat = tensor.reshape(-1)
    flat = flat if flat.data_ptr() % 16 == 0 else flat.clone()
    return flat if kind is None else flat.view(kind)


def vector(*extents: int, itemsize: int) -> int:
    """Numbers that a vector of at most 16 bytes may have where rows have these lengths."""
    return math.gcd(16 // itemsize, *extents)


def summed(x: torch.Tensor, what: str) -> None:
    """Refuses what no sum is taken of.

    Raises:
        TileTypeError: a dtype that is none of `SUMMED`.
    """
    if x.dtype not in SUMMED:
        raise TileTypeError(
            f"{what} of {str(x.dtype).removeprefix('torch.')}",
            expected="one of " + ", ".join(str(d).removeprefix("torch.") for d in SUMMED),
        )
