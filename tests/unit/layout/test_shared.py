"""Shared tiles: swizzles against the pictures of the PTX ISA, what they are for, and that nothing is lost by
them."""

from __future__ import annotations

import numpy as np
import pytest

from tilescale.compiler.gpu.places import InShared
from tilescale.compiler.ir.walks import mentions
from tilescale.compiler.layout import Piece, Shared, instructions
from tilescale.compiler.layout.shared import bank_conflicts, boxed, strided, widest_swizzle
from tilescale.compiler.tvm_compat import structural_walk, sym, tirx
from tilescale.errors import TileValueError


@pytest.mark.parametrize(("swizzle", "period"), [(128, 8), (64, 4), (32, 2)])
def test_chunks_move_as_tma_writes_them(swizzle, period):
    """Row r of a box: its 16-byte chunks are XORed with the number of its 128-byte line."""
    tile = boxed((16, swizzle // 2), 16, swizzle)
    for r in range(16):
        for chunk in range(swizzle // 16):
            line = r * swizzle // 128
            assert (
                tile.byte(r, chunk * 8) == r * swizzle + (chunk ^ line % period) * 16
                if swizzle == 128
                else True
            )
            place = r * swizzle + chunk * 16
            assert tile.byte(r, chunk * 8) == place ^ ((place >> 7) % period << 4)


@pytest.mark.parametrize("swizzle", [32, 64, 128])
@pytest.mark.parametrize("bits", [8, 16, 32])
def test_a_swizzle_loses_nothing(swizzle, bits):
    tile = boxed((24, 2 * swizzle * 8 // bits), bits, swizzle)
    places = tile.byte(*np.indices(tile.shape)).ravel()
    assert (
        len(np.unique(places)) == places.size
        and places.max() < tile.bytes
        and (places % (bits // 8) == 0).all()
    )
    stages = tile.staged(3)
    assert (stages.byte(2, *np.indices(tile.shape)).ravel() - places == 2 * tile.bytes).all()


def test_boxes_of_a_wide_tile_lie_behind_one_another():
    tile = boxed((64, 256), 16, 128)
    assert tile.offset(0, 64) == 64 * 64 and tile.offset(1, 0) == 64 and tile.alignment == 1024
    turned = boxed((256, 64), 16, 128, contiguous=0)
    assert all(turned.byte(c, r) == tile.byte(r, c) for r, c in [(0, 0), (3, 77), (63, 255), (17, 130)])


def test_a_column_of_chunks_is_free_of_conflicts_under_the_swizzle_alone():
    """ldmatrix reads eight rows' chunks at one column: eight-way conflicts in plain rows of 128 bytes, none
    under the swizzle."""
    rows = np.arange(8)
    for tile, ways in ((strided((64, 64), 16), 7), (boxed((64, 64), 16, 128), 0)):
        for column in range(0, 64, 8):
            addresses = np.repeat(tile.byte(rows, column), 4) + np.tile(np.arange(4) * 4, 8)
            assert bank_conflicts(addresses, 4) == ways


def test_conflicts_by_width():
    lanes = np.arange(32)
    assert [bank_conflicts(lanes * w, w) for w in (1, 2, 4, 8, 16)] == [0] * 5
    assert (
        bank_conflicts(lanes * 8, 4) == 1
        and bank_conflicts(lanes * 128, 4) == 31
        and bank_conflicts(lanes * 0, 4) == 0
    )


def test_an_epilogue_through_stmatrix_has_no_conflicts():
    """Eight 8 × 8 matrices of an accumulator of bf16, each row a 16-byte chunk."""
    acc, tile = instructions.wgmma_accumulator(64), boxed((64, 64), 16, 128)
    for slot in range(0, acc.slots, 4):
        rows, columns = acc.index(np.arange(32), slot)
        assert bank_conflicts(tile.byte(rows, columns), 4) == 0


def test_the_widest_swizzle():
    assert [widest_swizzle(n, 16) for n in (256, 64, 32, 96, 16, 8)] == [128, 128, 64, 64, 32, 0]


def test_errors_name_what_does_not_fit():
    with pytest.raises(TileValueError, match="128 bytes"):
        boxed((64, 48), 16, 128)
    with pytest.raises(TileValueError, match="0, 32, 64 or 128"):
        Shared((8,), (Piece(0, 1, 8, "offset", 1),), 16, 48)
    with pytest.raises(TileValueError, match="share a place"):
        strided((4, 4), 16, (1, 3))


@pytest.mark.parametrize(("swizzle", "bits"), [(128, 16), (64, 16), (32, 16), (128, 8), (64, 32)])
def test_thread_ir_names_an_elements_place_with_whole_rows_outside_the_xor(swizzle, bits):
    """A loop over rows moves one address by constants, so each of ldmatrix's has no register of its own."""
    tile = boxed((32, 2 * swizzle * 8 // bits), bits, swizzle)
    place = InShared(None, tile.staged(2), (2, *tile.shape), None, "tile")
    for at in np.ndindex(place.shape):
        there = place.flat([tirx.IntImm("int32", i) for i in at])
        assert int(there.value) * bits // 8 == tile.staged(2).byte(*at)
    stage, row, column = (tirx.Var(name, "int32") for name in ("stage", "row", "column"))
    flat = sym.Analyzer().simplify(place.flat([stage, row * 8, column]))
    found: list[object] = []
    structural_walk(flat, (tirx.BitwiseXor, found.append))
    assert found and not any(mentions(x, v) for x in found for v in (stage, row))
