"""How kernels that walk over the rows of a matrix share them among blocks: what softmax and RMSNorm have in common."""

from __future__ import annotations

from dataclasses import dataclass

#: numbers of a row that one thread has in registers (32 bits each; of float64 half as many)
EACH = 32
#: threads of a block for a row that fits, at most
MOST = 1024


@dataclass(frozen=True)
class Rows:
    """``rows`` rows to a block of ``threads``, ``width`` columns of them at a time; ``turns`` times that are a whole row."""

    rows: int
    threads: int
    width: int
    turns: int


def cut(columns: int, dtype: str) -> Rows:
    """Short rows: several to a block of 128 threads, each in a part of a warp or in a whole one. Longer ones: a block each, of as many
    threads as hold it in registers. Rows that no block holds are walked over in several turns."""
    each = EACH // 2 if dtype == "float64" else EACH
    wanted = -(-columns // each)
    if wanted <= 32:
        lanes = 1 << (wanted - 1).bit_length()
        return Rows(128 // lanes, 128, columns, 1)
    threads = max(128, 1 << (wanted - 1).bit_length())
    if threads <= MOST:
        return Rows(1, threads, columns, 1)
    return Rows(1, 512, 512 * each // 2, -(-columns // (512 * each // 2)))
