"""Swizzles of shared tiles, by TileLang's names."""

from __future__ import annotations

from typing import Any

from tilescale.errors import TileValueError
from tilescale.language.dtypes import canonical

#: bytes of a row → how many low bits of the row's number move its chunks of 16 bytes, and after how many rows
_ROWS = {128: (8, 1), 64: (4, 2), 32: (2, 4)}


def make_mma_swizzle_layout(shared_buf: Any, is_smooth: bool = False) -> Any:
    """The layout that ldmatrix reads without bank conflicts: `tilescale.layout.make_swizzled_layout`; with
    ``is_smooth`` row-major."""
    from tilescale.compiler.layout.made import make_linear_layout, make_swizzled_layout

    return make_linear_layout(shared_buf) if is_smooth else make_swizzled_layout(shared_buf)


def get_swizzle_layout(row_idx: Any, col_idx: Any, row_size: int, dtype: Any) -> tuple[Any, Any]:
    """Where an element lies in rows of 32, 64 or 128 bytes whose chunks of 16 bytes are exchanged by the
    row's
    number: its row, and its column there.

    Raises:
        TileValueError: rows of another length.
    """
    bits = canonical(dtype).bits
    found = _ROWS.get(row_size * bits // 8)
    if found is None:
        raise TileValueError(f"rows of {row_size} elements of {bits} bits", expected="32, 64 or 128 bytes")
    chunks, rows = found
    each = 128 // bits
    return row_idx, ((col_idx // each) ^ (row_idx // rows % chunks)) * each + col_idx % each
