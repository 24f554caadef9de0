"""Views of fragments: every bit of the tile stays where it is."""

from __future__ import annotations

import numpy as np
import pytest

from tilescale.compiler.layout import Fragment, Piece
from tilescale.compiler.layout.fragment import row_major
from tilescale.compiler.layout.instructions import accumulator, mma_a, wgmma_operand
from tilescale.compiler.layout.viewed import viewed

FRAGMENTS = [
    row_major((16, 32), 32, 4),
    mma_a(16).repeated(1, 4),
    accumulator(64, 64, (1, 1)),
    wgmma_operand(128, 64, (2, 1)),
]


def places(f: Fragment, bits: int) -> dict[tuple[int, int, int], tuple[int, ...]]:
    """(thread, 16 bits of its registers) → which 16 bits of the row-major tile they are."""
    each, held = bits // 16, f.holders()
    return {
        (t, s * each + k, 0): (held[t, s] * each + k,)
        for t in range(f.threads)
        for s in range(f.slots)
        for k in range(each)
    }


@pytest.mark.parametrize("held", FRAGMENTS, ids=lambda f: f"{f.shape}")
def test_bits_stay(held: Fragment):
    wider = viewed(held, 16, 32)
    assert wider is not None and wider.shape == (*held.shape[:-1], held.shape[-1] // 2)
    assert places(wider, 32) == places(held, 16)
    back = viewed(wider, 32, 16)
    assert back is not None and np.array_equal(back.holders(), held.holders())
    assert viewed(held, 16, 16) == held


def test_neighbours_in_two_threads_are_no_wider_element():
    scattered = Fragment((8, 4), (Piece(0, 1, 8, "slot", 1), Piece(1, 1, 4, "thread", 1)), 4)
    assert viewed(scattered, 16, 32) is None
    assert viewed(row_major((8, 32), 32, 1), 16, 32) is None
    assert viewed(mma_a(16), 16, 64) is None  # two neighbours, not four


@pytest.mark.parametrize(
    "held, shape",
    [
        (row_major((16, 32), 32, 4), (16, 2, 16)),
        (row_major((16, 32), 32, 4), (512,)),
        (row_major((16, 32), 32, 4), (4, 4, 8, 4)),
        (accumulator(64, 64, (1, 1)), (64, 1, 64)),
        (accumulator(64, 64, (1, 1)), (8, 8, 4, 16)),
        (accumulator(64, 64, (1, 1)), (64, 2, 2, 16)),
        (mma_a(16).repeated(1, 4), (2, 8, 64)),
    ],
    ids=lambda x: str(getattr(x, "shape", x)),
)
def test_other_axes(held: Fragment, shape: tuple[int, ...]):
    made = viewed(held, 32, 32, held.shape, shape)
    assert made is not None and made.shape == shape and np.array_equal(made.holders(), held.holders())


def test_axes_that_cut_a_digit_in_no_whole_parts():
    held = Fragment((4, 6), (Piece(0, 1, 4, "slot", 6), Piece(1, 1, 6, "thread", 1)), 6)
    assert viewed(held, 32, 32, (4, 6), (4, 2, 3)) is not None
    assert viewed(held, 32, 32, (4, 6), (3, 8)) is None


def test_padding_behind_the_first_axis():
    held = accumulator(128, 64, (1, 1))  # of a tile of (64, 64)
    made = viewed(held, 32, 32, (64, 64), (64, 2, 32))
    assert made is not None and made.shape == (128, 2, 32) and np.array_equal(made.holders(), held.holders())
    assert (
        viewed(held, 32, 32, (128, 32), (128, 2, 16)) is None
    )  # of the second axis' elements half are padding
