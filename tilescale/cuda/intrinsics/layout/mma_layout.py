"""How the operands of mma.sync and ldmatrix lie among the 32 threads of a warp, and swizzles of shared tiles,
by TileLang's names.

A register has 4, 2 or 1 numbers, of 8, 16 or 32 bits (PTX ISA, "Matrix Fragments for mma.m16n8k16" and its
neighbours). ``shared_ROWSxCOLUMNS_to_mma_32xSLOTS_layout_…(i, j)`` gives the thread and the slot of an
element; ``sr``: its second index runs along k, ``rs``: its first. ``mma_load_…`` and ``mma_store_…(thread,
slot)`` give the element, ``ldmatrix_…`` that from which a thread's row of 16 bytes begins, plus a slot. All
take numbers, arrays and device values. Operands b and results are of two instructions side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilescale.errors import TileValueError
from tilescale.language.dtypes import canonical

_Map = Callable[[Any, Any], tuple[Any, Any]]


def _a(each: int) -> _Map:
    """Operand a of 16 rows: slots count a register's numbers, the row eight below, then k's other half."""

    def place(i: Any, j: Any) -> tuple[Any, Any]:
        half = 4 * each
        return i % 8 * 4 + j % half // each, j % each + i // 8 * each + j // half * (2 * each)

    return place


def _b(each: int) -> _Map:
    """Operand b, whose 16 rows are the result's columns: first k's other half, then the other instruction."""

    def place(i: Any, j: Any) -> tuple[Any, Any]:
        half = 4 * each
        return i % 8 * 4 + j % half // each, j % each + j // half * each + i // 8 * (2 * each)

    return place


def _element_a(each: int) -> _Map:
    def element(thread: Any, slot: Any) -> tuple[Any, Any]:
        column = thread % 4 * each + slot % each + slot // (2 * each) * (4 * each)
        return thread // 4 + slot // each % 2 * 8, column

    return element


def _element_b(each: int) -> _Map:
    def element(thread: Any, slot: Any) -> tuple[Any, Any]:
        column = thread % 4 * each + slot % each + slot // each % 2 * (4 * each)
        return thread // 4 + slot // (2 * each) * 8, column

    return element


def _turned(of: _Map) -> _Map:
    """The same of a tile whose axes are exchanged."""

    def place(i: Any, j: Any) -> tuple[Any, Any]:
        return of(j, i)

    return place


def _row_a(each: int) -> _Map:
    """ldmatrix.x4 of four matrices, those below one another first: as operand a, or transposed as b."""

    def element(thread: Any, slot: Any) -> tuple[Any, Any]:
        return thread % 16, thread // 16 * (4 * each) + slot

    return element


def _row_b(each: int) -> _Map:
    """The same with those beside one another first: as operand b, whose rows are columns of the result."""

    def element(thread: Any, slot: Any) -> tuple[Any, Any]:
        return thread // 16 * 8 + thread % 8, thread % 16 // 8 * (4 * each) + slot

    return element


shared_16x8_to_mma_32x4_layout_sr_a = shared_16x8_to_mma_a_32x4_layout = _a(1)
shared_16x8_to_mma_32x4_layout_sr_b = shared_16x8_to_mma_b_32x4_layout = _b(1)
shared_16x8_to_mma_32x4_layout_rs_a = shared_16x8_to_mma_a_32x4_layout_trans = _turned(_a(1))
shared_16x8_to_mma_32x4_layout_rs_b = shared_16x8_to_mma_b_32x4_layout_trans = _turned(_b(1))
shared_16x16_to_mma_32x8_layout_sr_a = shared_16x16_to_mma_a_32x8_layout = _a(2)
shared_16x16_to_mma_32x8_layout_sr_b = shared_16x16_to_mma_b_32x8_layout = _b(2)
shared_16x16_to_mma_32x8_layout_rs_a = shared_16x16_to_mma_a_32x8_layout_trans = _turned(_a(2))
shared_16x16_to_mma_32x8_layout_rs_b = shared_16x16_to_mma_b_32x8_layout_trans = _turned(_b(2))
shared_16x32_to_mma_32x16_layout_sr_a = shared_16x32_to_mma_a_32x16_layout = _a(4)
shared_16x32_to_mma_32x16_layout_sr_b = shared_16x32_to_mma_b_32x16_layout = _b(4)
shared_16x32_to_mma_32x16_layout_rs_a = shared_32x16_to_mma_a_32x16_layout_trans = _turned(_a(4))
shared_16x32_to_mma_32x16_layout_rs_b = shared_32x16_to_mma_b_32x16_layout_trans = _turned(_b(4))
mma_load_a_32x4_to_shared_16x8_layout = _element_a(1)
mma_load_b_32x4_to_shared_16x8_layout = _element_b(1)
mma_load_a_32x8_to_shared_16x16_layout = _element_a(2)
mma_load_b_32x8_to_shared_16x16_layout = _element_b(2)
mma_load_a_32x16_to_shared_16x32_layout = _element_a(4)
mma_load_b_32x16_to_shared_16x32_layout = _element_b(4)
#: results of two instructions side by side lie as operand a of 16 bits does
mma_store_32x8_to_shared_16x16_layout = mma_32x8_to_shared_16x16_layout = _element_a(2)
ldmatrix_32x4_to_shared_16x8_layout_a = _row_a(1)
ldmatrix_32x4_to_shared_16x8_layout_b = _row_b(1)
ldmatrix_32x8_to_shared_16x16_layout = _row_a(2)
ldmatrix_trans_32x8_to_shared_16x16_layout = _row_b(2)
ldmatrix_32x16_to_shared_16x32_layout_a = _row_a(4)
ldmatrix_32x16_to_shared_16x32_layout_b = _row_b(4)

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
