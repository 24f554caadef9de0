"""Fragments that follow a loop through indices of mixed digits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tilescale.compiler.layout.fragment import row_major
from tilescale.compiler.layout.instructions import mma_a
from tilescale.compiler.layout.match import Loop, match
from tilescale.compiler.layout.mixed import from_mixed
from tilescale.compiler.layout.viewed import viewed
from tilescale.compiler.tvm_compat import tirx

I, P = tirx.Var("i", "int32"), tirx.Var("p", "int32")
PAIRS = viewed(mma_a(16).repeated(1, 8).repeated(0, 2), 16, 32)
LOOP = Loop((I, P), (32, 64), PAIRS, (0, 0))


def test_words_lie_with_the_pairs_that_are_made_of_them():
    indices = [I, P % 4 * 4 + P // 16]
    words = from_mixed(LOOP, indices, (32, 16), False)
    assert words is not None and words.slots == 16
    row, word = np.indices((32, 16))
    assert (words.thread(row, word) == row % 8 * 4 + word // 4).all()
    assert (
        words.slot(row, word) == row // 8 * 4 + word % 4
    ).all()  # four neighbours of memory in four neighbouring slots
    assert not isinstance(match(LOOP, indices, words, False), str)


@pytest.mark.parametrize("part", range(4))
def test_what_a_read_leaves_out_lies_in_the_same_threads(part: int):
    """A quarter of the words makes a quarter of the pairs."""
    loop = Loop((I, P), (32, 16), viewed(mma_a(16).repeated(1, 2).repeated(0, 2), 16, 32), (0, 0))
    words = from_mixed(loop, [I, P % 4 * 4 + part], (32, 16), False)
    assert words == from_mixed(LOOP, [I, P % 4 * 4 + P // 16], (32, 16), False)
    behind = from_mixed(loop, [I, P], (32, 32), False)
    assert behind is not None and behind.slots == 2 * loop.fragment.slots


@pytest.mark.parametrize("indices, shape, writes, why", [
    ([I, P * 2], (32, 128), True, "a write that leaves something out"),
    ([I, P % 3], (32, 3), False, "no sum of digits"),
    ([I, P + 1], (32, 65), False, "digits that begin nowhere"),
    ([I, P % 4 * 4 + 5], (32, 16), False, "begins behind the first of a digit"),
    ([I, P + P // 32], (32, 65), False, "digits that overlap"),
    ([I, P // 4 * 4 // 8], (32, 8), True, "a write by several iterations"),
    ([I % 4 + P % 4, P // 4], (8, 16), False, "the sum of two digits is no digit"),
    ([I, tirx.Var("k", "int32") + P], (32, 64), False, "unknown before the kernel runs"),
])  # fmt: skip
def test_other_indices_say_nothing(indices: list[Any], shape: tuple[int, ...], writes: bool, why: str):
    assert from_mixed(LOOP, indices, shape, writes) is None, why


def test_what_no_index_names_are_copies_and_values_read_again():
    loop = Loop((I, P), (8, 64), row_major((8, 64), 32, 4), (0, 0))
    made = from_mixed(loop, [P // 4 % 2, I], (2, 8), False)
    assert made is not None and len(made.copies) == 8
    assert not isinstance(match(loop, [P // 4 % 2, I], made, False), str)
