"""Fragments against the maps that the PTX ISA prints, and their algebra against enumeration."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilescale.compiler.layout import Fragment, Piece, instructions
from tilescale.compiler.layout.fragment import row_major
from tilescale.errors import TileValueError


def table(fragment: Fragment, place) -> None:
    """``place(thread, slot)`` is where the ISA says that the element lies, and the fragment agrees both
    ways."""
    for thread in range(fragment.threads):
        for slot in range(fragment.slots):
            index = place(thread, slot)
            assert (fragment.thread(*index), fragment.slot(*index)) == (thread, slot)
            assert fragment.index(thread, slot) == index


def test_mma_accumulator_as_in_the_isa():
    table(instructions.mma_accumulator(), lambda t, i: (t // 4 + 8 * (i // 2), t % 4 * 2 + i % 2))


def test_mma_operands_of_16_bits_as_in_the_isa():
    table(instructions.mma_a(16), lambda t, i: (t // 4 + 8 * (i // 2 % 2), t % 4 * 2 + i % 2 + 8 * (i // 4)))
    table(instructions.mma_b(16), lambda t, i: (t % 4 * 2 + i % 2 + 8 * (i // 2), t // 4))


def test_mma_operands_of_8_bits_as_in_the_isa():
    table(instructions.mma_a(8), lambda t, i: (t // 4 + 8 * (i // 4 % 2), t % 4 * 4 + i % 4 + 16 * (i // 8)))
    table(instructions.mma_b(8), lambda t, i: (t % 4 * 4 + i % 4 + 16 * (i // 4), t // 4))


def test_mma_operands_of_tf32_as_in_the_isa():
    table(instructions.mma_a(32), lambda t, i: (t // 4 + 8 * (i % 2), t % 4 + 4 * (i // 2)))
    table(instructions.mma_b(32), lambda t, i: (t % 4 + 4 * i, t // 4))


@pytest.mark.parametrize("n", [8, 24, 96, 256])
def test_wgmma_accumulator_as_in_the_isa(n):
    made = instructions.wgmma_accumulator(n)
    table(
        made, lambda t, i: (16 * (t // 32) + t % 32 // 4 + 8 * (i // 2 % 2), t % 4 * 2 + i % 2 + 8 * (i // 4))
    )
    assert made.covers and made.slots == n // 2


def test_an_accumulator_is_an_operand_without_a_shuffle():
    """P of attention goes from S's accumulators into the A operand of the second product: 16 columns of one
    are 16 k of the other."""
    assert instructions.wgmma_accumulator(16) == instructions.wgmma_a(16)
    assert instructions.wgmma_accumulator(32) != instructions.wgmma_a(8)


@pytest.mark.parametrize(
    ("m", "n", "groups"), [(128, 256, (2, 1)), (64, 256, (1, 2)), (256, 128, (2, 1)), (128, 192, (2, 1))]
)
def test_accumulators_of_a_block(m, n, groups):
    made = instructions.accumulator(m, n, groups)
    assert made.covers and made.threads == 128 * groups[0] * groups[1]
    rows = made.index(np.arange(made.threads)[:, None], np.arange(made.slots)[None])[0]
    for group in range(groups[0]):  # each warpgroup owns a contiguous part of the rows
        mine = rows[128 * group : 128 * group + 128]
        assert mine.min() == group * m // groups[0] and mine.max() == (group + 1) * m // groups[0] - 1


def test_a_reduced_axis_leaves_copies_where_threads_shared_it():
    row = instructions.wgmma_accumulator(64).reduced(1)
    assert row.shape == (64,) and row.slots == 2 and row.copies == (0, 1, 2, 3)
    assert instructions.wgmma_accumulator(64).across(1) == (1, 2)
    column = instructions.wgmma_accumulator(64).reduced(0)
    assert column.copies == tuple(32 * w + 4 * g for w in range(4) for g in range(8)) and column.slots == 16


def test_what_holds_what():
    acc = instructions.wgmma_accumulator(64)
    row = acc.reduced(1)
    once = Fragment((64,), (Piece(0, 1, 64, "thread", 1),), 128)
    assert row.holds(row) and not once.holds(row)
    everyone = Fragment((64,), (Piece(0, 1, 64, "slot", 1), Piece(None, 0, 128, "thread", 1)), 128)
    assert everyone.holds(row) and everyone.holds(once) and not row.holds(everyone)


def test_errors_name_what_does_not_fit():
    with pytest.raises(TileValueError, match="cut into digits"):
        Fragment((8,), (Piece(0, 1, 4, "thread", 1),), 32)
    with pytest.raises(TileValueError, match="share a slot"):
        Fragment((8,), (Piece(0, 1, 4, "slot", 1), Piece(0, 4, 2, "slot", 3)), 32)
    with pytest.raises(TileValueError, match="at most 4"):
        Fragment((8,), (Piece(0, 1, 8, "thread", 1),), 4)
    with pytest.raises(TileValueError, match="multiple of 8"):
        instructions.wgmma_accumulator(12)
    with pytest.raises(TileValueError, match="over 32 threads"):
        row_major((3, 7), 32)


@st.composite
def fragments(draw) -> Fragment:
    """Axes cut at random, each digit to a thread or a slot, in random order, some copies."""
    digits = [
        (axis, e)
        for axis in range(draw(st.integers(1, 3)))
        for e in draw(st.lists(st.sampled_from([2, 2, 3, 4, 5]), min_size=1, max_size=3))
    ]
    units: dict[int, int] = {}
    cut = []
    for axis, e in digits:
        cut.append([axis, units.get(axis, 1), e])
        units[axis] = units.get(axis, 1) * e
    copies = draw(st.sampled_from([1, 2, 3]))
    if copies > 1:
        cut.append([None, 0, copies])
    steps, pieces = {"thread": 1, "slot": 1}, []
    for axis, unit, e in draw(st.permutations(cut)):
        to = "thread" if axis is None else draw(st.sampled_from(["thread", "slot"]))
        pieces.append(Piece(axis, unit, e, to, steps[to]))
        steps[to] *= e
    return Fragment(tuple(units[a] for a in sorted(units)), tuple(pieces), steps["thread"])


@settings(max_examples=150, deadline=None)
@given(fragments())
def test_the_inverse_is_one(fragment):
    assert fragment.covers
    held = fragment.holders()
    assert (held >= 0).all()
    index = fragment.index(np.arange(fragment.threads)[:, None], np.arange(fragment.slots)[None])
    index = [np.broadcast_to(i, held.shape) for i in index]
    assert (np.ravel_multi_index(index, fragment.shape) == held).all()


@settings(max_examples=100, deadline=None)
@given(fragments(), st.data())
def test_canonical_forms_are_equal_for_equal_maps_only(fragment, data):
    cut = []
    for p in fragment.pieces:  # the same map written with finer digits, in another order
        divisors = [d for d in range(2, p.extent) if p.extent % d == 0]
        cut += p.split(data.draw(st.sampled_from(divisors))) if divisors and data.draw(st.booleans()) else [p]
    again = Fragment(fragment.shape, tuple(data.draw(st.permutations(cut))), fragment.threads)
    assert again == fragment and (again.holders() == fragment.holders()).all()
    order = data.draw(st.permutations(range(len(fragment.shape))))
    turned = fragment.permuted(order)
    index = np.indices(turned.shape)
    back = [index[list(order).index(k)] for k in range(len(order))]
    assert (turned.thread(*index) == fragment.thread(*back)).all() and (
        turned.slot(*index) == fragment.slot(*back)
    ).all()
    if turned.shape == fragment.shape and turned != fragment:
        assert (turned.holders() != fragment.holders()).any()


@settings(max_examples=100, deadline=None)
@given(fragments(), st.data())
def test_a_reduced_fragment_keeps_an_element_where_its_row_was(fragment, data):
    axis = data.draw(st.integers(0, len(fragment.shape) - 1))
    if len(fragment.shape) == 1:
        return
    less = fragment.reduced(axis)
    where: dict[tuple, set] = {}
    for index in np.ndindex(*fragment.shape):
        rest = index[:axis] + index[axis + 1 :]
        where.setdefault(rest, set()).update(fragment.thread(*index) + c for c in fragment.copies)
    for rest, threads in where.items():
        assert {less.thread(*rest) + c for c in less.copies} == threads
    assert fragment.reduced(axis).expanded(axis, fragment.shape[axis]).shape == fragment.shape


@pytest.mark.parametrize(
    ("shape", "threads", "vector"),
    [((128, 64), 256, 8), ((64, 256), 128, 4), ((16,), 128, 1), ((8, 8), 128, 2)],
)
def test_rows_are_read_side_by_side(shape, threads, vector):
    made = row_major(shape, threads, vector)
    held = made.holders()
    assert made.vector(len(shape) - 1) >= vector
    assert (np.sort(np.unique(held)) == np.arange(np.prod(shape))).all()
    width = min(threads, shape[-1] // vector)
    assert (held[:width, 0] == np.arange(width) * vector).all()


def test_a_turned_fragment_begins_at_another_thread():
    plain = instructions.accumulator(128, 16, (2, 1))
    turned = replace(plain, first_thread=128)
    assert turned != plain and turned.covers
    assert turned.thread(0, 0) == 128 and turned.thread(64, 0) == 0
    assert turned.index(128, 0) == plain.index(0, 0) and turned.index(5, 3) == plain.index(133, 3)
    assert (turned.holders()[:128] == plain.holders()[128:]).all() and (
        turned.holders()[128:] == plain.holders()[:128]
    ).all()
    assert turned.reduced(1).first_thread == 128 and turned.permuted((1, 0)).first_thread == 128
    assert not plain.holds(turned) and turned.holds(turned)
