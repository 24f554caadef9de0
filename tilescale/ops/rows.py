"""How kernels that walk over the rows of a matrix share them among blocks, and what they are tested on: what softmax and RMSNorm have in
common."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

#: numbers of a row that one thread has in registers (32 bits each; of float64 half as many)
EACH = 32
#: threads of a block for a row that fits, at most
MOST = 1024
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "float8_e4m3fn": 1, "float8_e5m2": 1}
DTYPES = tuple(BYTES)


class Cut(NamedTuple):
    """``rows`` rows to a block of ``threads``, ``width`` columns of them at a time; ``turns`` times that are a whole row."""

    rows: int
    threads: int
    width: int
    turns: int


def cut(columns: int, dtype: str) -> Cut:
    """Short rows: several to a block of 128 threads, each in a part of a warp or in a whole one, with half as many numbers a thread where a
    warp has room, so that there are blocks enough to load while others store. Longer ones: a block each, of as many threads as hold it in
    registers. Rows that no block holds are walked over in several turns."""
    each = EACH // 2 if dtype == "float64" else EACH
    wanted = -(-columns // each)
    if wanted <= 32:
        lanes = min(32, 1 << (-(-2 * columns // each) - 1).bit_length())
        return Cut(128 // lanes, 128, columns, 1)
    threads = max(128, 1 << (wanted - 1).bit_length())
    if threads <= MOST:
        return Cut(1, threads, columns, 1)
    width = 512 * each // 2
    return Cut(1, 512, width, -(-columns // width))


def error(dtype: torch.dtype) -> float:
    """A rounding of what rows of a dtype are computed in; where that is float64 the reference has such roundings too."""
    return 2.0**-52 if dtype == torch.float64 else 2.0**-24


def shapes(small: bool) -> Iterator[dict[str, Any]]:
    """What is tested: every dtype, every way to cut rows, extents that are no multiples of anything, and of vectors."""
    if small:
        for dtype in DTYPES:
            yield {"m": 5, "n": 77, "dtype": dtype}
        yield from ({"m": m, "n": n} for m, n in ((1, 1), (33, 16), (3, 1100), (2, 4096)))
        yield {"m": 2, "n": 33000}
        yield {"m": 1, "n": 16640, "dtype": "float64"}
        return
    for dtype in DTYPES:
        for m, n in ((333, 1000), (77, 1001), (3, 40000)):
            yield {"m": m, "n": n, "dtype": dtype}
    for dtype in ("bfloat16", "float32"):
        for m, n in ((1000, 64), (5, 8192), (3, 32768), (2, 100001)):
            yield {"m": m, "n": n, "dtype": dtype}
