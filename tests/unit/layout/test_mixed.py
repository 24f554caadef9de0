"""Fragments that follow a loop through indices of mixed digits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.unit.cuda.emulated import agree, data, empty
from tilescale.compiler import driver
from tilescale.compiler.layout.fragment import Fragment, row_major
from tilescale.compiler.layout.instructions import mma_a
from tilescale.compiler.layout.match import Loop, match
from tilescale.compiler.layout.mixed import from_mixed, to_mixed
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


@pytest.mark.parametrize("index, extents, width", [
    (P // 8 * 16 + P % 8, (32, 64), 128),
    (P // 8 * 16 + P % 8 + 8, (32, 64), 128),
    (P * 2 + 1, (32, 64), 128),
    (P % 4 * 4 + P // 16, (32, 64), 16),
])  # fmt: skip
def test_a_loop_runs_where_the_elements_lie(index: Any, extents: tuple[int, int], width: int):
    held = mma_a(16).repeated(1, width // 16).repeated(0, 2)
    pieces = to_mixed((I, P), extents, [I, index], held)
    assert pieces is not None
    row, at = np.indices(extents)
    thread = sum(
        (row, at)[p.axis] // p.unit % p.extent * p.stride  # type: ignore[index]
        for p in pieces
        if p.to == "thread"
    )
    column = eval(str(index), {"p": at})
    assert (thread == held.thread(row, column)).all()


@pytest.mark.parametrize("indices, held, why", [
    ([I, P * 2 + 1], row_major((32, 128), 32, 1), "each thread has every other element alone"),
    ([I, P + P // 32], row_major((32, 128), 32, 2), "digits that overlap"),
    ([I, P // 8 * 16 + P % 8 + 1], row_major((32, 128), 32, 4), "a digit that begins behind its first value"),
    ([I, 63 - P], row_major((32, 64), 32, 4), "digits that run backwards"),
])  # fmt: skip
def test_other_indices_are_no_loop(indices: list[Any], held: Fragment, why: str):
    assert to_mixed((I, P), (32, 64), indices, held) is None, why


@T.prim_func
def by_turns(
    A: T.Tensor((64, 64), "float16"), B: T.Tensor((64, 128), "float16"), C: T.Tensor((64, 64), "float32")
):
    """Columns of a product come in turn, eight by eight: each scales that of the run behind it."""
    with T.Kernel(1, threads=128):
        a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 128), "float16")
        acc, y = T.alloc_fragment((64, 128), "float32"), T.alloc_fragment((64, 64), "float32")
        T.copy(A, a)
        T.copy(B, b)
        T.clear(acc)
        T.gemm(a, b, acc)
        for i, j in T.Parallel(64, 64):
            at = j // 8 * 16 + j % 8  # an index by a name is the same index
            y[i, j] = acc[i, at] * acc[i, at + 8]
        T.copy(y, C)


@T.prim_func
def in_pairs(
    A: T.Tensor((64, 64), "float16"), B: T.Tensor((64, 128), "float16"), C: T.Tensor((64, 128), "float32")
):
    """Neighbours of a product turn each other, as those of rotary positions do, in place."""
    with T.Kernel(1, threads=128):
        a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 128), "float16")
        acc, y = T.alloc_fragment((64, 128), "float32"), T.alloc_fragment((64, 128), "float32")
        T.copy(A, a)
        T.copy(B, b)
        T.clear(acc)
        T.gemm(a, b, acc)
        for i, j in T.Parallel(64, 64):
            y[i, 2 * j] = acc[i, 2 * j] - acc[i, 2 * j + 1]
            y[i, 2 * j + 1] = acc[i, 2 * j] + acc[i, 2 * j + 1]
        T.copy(y, C)


@T.prim_func
def by_three(X: T.Tensor((32, 96), "float32"), Y: T.Tensor((32, 32), "float32")):
    """Digits of three values: the sum of a row's thirds, element by element, and of neighbours."""
    with T.Kernel(1, threads=128):
        x, y = T.alloc_fragment((32, 96), "float32"), T.alloc_fragment((32, 32), "float32")
        T.copy(X, x)
        T.clear(y)
        for i, q, c in T.Parallel(32, 8, 4):
            y[i, q * 4 + c] = x[i, (q * 4 + c) * 3] + x[i, (q * 4 + c) * 3 + 2]
        T.copy(y, Y)


@pytest.mark.parametrize("kernel", [by_turns, in_pairs, by_three], ids=lambda k: k.name)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_results_are_those_of_the_simulator(kernel: Any, arch: str):
    shapes = {p.name: (tuple(map(int, p.spec.shape)), p.spec.dtype) for p in kernel.trace().params}
    *inputs, last = shapes
    args = {n: data(*shapes[n], k) for k, n in enumerate(inputs)}
    agree(kernel, args | {last: empty(*shapes[last])}, arch=arch)


@pytest.mark.parametrize("kernel", [by_turns, in_pairs], ids=lambda k: k.name)
def test_registers_of_a_product_stay_where_they_are(kernel: Any):
    code = driver.source_text(kernel.trace(), "cuda", "cuda:sm_90a")
    assert "acc_shared" not in code and "y_shared" not in code, code
