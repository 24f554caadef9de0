"""Python that people bring into kernels: it means what it says, or is refused with what to write instead."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.kernels import refused, run
from tilescale.errors import TileError, TileSyntaxError, TileTypeError
from tilescale.language.elsewhere import INSTEAD


def traced(statement: Any) -> None:
    @T.prim_func
    def kernel(A: T.Tensor((4, 4), "int32"), n: T.int32):
        with T.Kernel(1, threads=32):
            t = T.alloc_shared((4, 4), "int32")
            v = T.alloc_var("int32")
            statement(A, t, v, n)

    kernel.trace()


def two(a: Any, b: Any) -> Any:
    return a + b


@pytest.mark.parametrize(
    "take",
    [lambda x: two(*x), lambda x: (*x,), lambda x: [y + 1 for y in x], lambda x: sum(x), lambda x: list(x), lambda x: dict(zip(x, x))],
)  # fmt: skip
def test_values_and_tiles_are_no_sequences(take: Any):
    for of in (
        lambda A, t, v, n: n,
        lambda A, t, v, n: n + 1,
        lambda A, t, v, n: A[0, 0],
        lambda A, t, v, n: v,
    ):
        with refused(TileTypeError, "is one value of int32, and no sequence", write="for i in T.serial(n)"):
            traced(lambda *given, of=of: take(of(*given)))
    for of in (lambda A, t, v, n: A, lambda A, t, v, n: t, lambda A, t, v, n: t[0]):
        with refused(TileTypeError, "is a tile, and is not taken apart by Python", expected="by index"):
            traced(lambda *given, of=of: take(of(*given)))


@T.macro
def countdown(A, n):
    if n > 0:
        countdown(A, n - 1)
    A[n, 0] = n + 10


def endless(A, n):
    return endless(A, n + 1)


def test_recursion_ends_by_python_values_or_is_refused():
    @T.prim_func
    def kernel(A: T.Tensor((4, 4), "int32")):
        with T.Kernel(1):
            countdown(A, 3)

    a = np.zeros((4, 4), np.int32)
    run(kernel)(a)
    assert a[:, 0].tolist() == [10, 11, 12, 13]
    for call in (lambda A, t, v, n: countdown(A, n), lambda A, t, v, n: endless(A, n)):
        with refused(
            TileSyntaxError,
            "call themselves without end",
            expected="both branches are traced",
            write="T.serial",
        ):
            traced(call)


def test_divmod_of_device_values():
    @T.prim_func
    def kernel(A: T.Tensor((4, 4), "int32"), n: T.int32):
        with T.Kernel(1):
            q, r = divmod(n, 3)
            A[0, 0], A[0, 1] = q, r
            A[1, 0], A[1, 1] = divmod(7, 4)
            A[2, 0], A[2, 1] = divmod(-n, 4)

    a = np.zeros((4, 4), np.int32)
    run(kernel)(a, 11)
    assert a[:3, :2].tolist() == [[3, 2], [1, 3], [*divmod(-11, 4)]]


@pytest.mark.parametrize("kind", ["shared", "fragment"])
def test_tiles_that_swap_their_names_under_a_device_loop(kind: str):
    """Which of two tiles a name stands for would depend on the round: that has to be an index."""

    @T.prim_func
    def swapped(A: T.Tensor((8,), "int32"), n: T.int32):
        with T.Kernel(1, threads=32):
            alloc = T.alloc_shared if kind == "shared" else T.alloc_fragment
            a, b = alloc((8,), "int32"), alloc((8,), "int32")
            T.clear(a)
            for _ in T.serial(n):
                T.copy(a, b)
                a, b = b, a

    with refused(
        TileSyntaxError,
        "'a' is rebound under the device for",
        at="T.copy(a, b)",
        write=f'T.alloc_{kind}((2, 8), "int32")',
    ):
        swapped.trace()

    @T.prim_func
    def indexed(A: T.Tensor((8,), "int32"), n: T.int32):
        with T.Kernel(1, threads=32):
            tiles = T.alloc_shared((2, 8), "int32")
            T.clear(tiles)
            for k in T.serial(n):
                for i in T.Parallel(8):
                    tiles[(k + 1) % 2, i] = tiles[k % 2, i] + k + i
            T.copy(tiles[n % 2, :], A)

    a = np.zeros(8, np.int32)
    run(indexed)(a, 5)
    assert a.tolist() == [10 + 5 * i for i in range(8)]

    @T.prim_func
    def unrolled(A: T.Tensor((8,), "int32")):
        with T.Kernel(1, threads=32):
            a, b = T.alloc_shared((8,), "int32"), T.alloc_shared((8,), "int32")
            T.clear(a)
            for k in range(3):  # Python's: every round is traced
                for i in T.Parallel(8):
                    b[i] = a[i] + k
                a, b = b, a
            T.copy(a, A)

    run(unrolled)(a)
    assert a.tolist() == [3] * 8


def test_words_of_other_languages_say_what_to_write():
    for word, instead in INSTEAD.items():
        assert word not in T.__all__, f"the language has T.{word}"
        missing = [w for w in re.findall(r"\bT\.(\w+)", instead) if w not in T.__all__]
        assert not missing, f"{word}: {missing}"
    with refused(
        TileError,
        "the language has no T.program_id",
        at="T.program_id",
        write="with T.Kernel(gx, gy) as (bx, by):",
    ):
        traced(lambda A, t, v, n: T.program_id(0))
    with refused(TileError, "the language has no T.syncthreads", write="T.barrier()"):
        traced(lambda A, t, v, n: T.syncthreads())
