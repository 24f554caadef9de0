"""Eager kernels whose launch is in a macro, their outputs, and declarations in the place of tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.kernels import refused
from tilescale.errors import TileTypeError, TileValueError


@T.macro
def copied(A: Any) -> Any:
    M, N = A.shape
    B = T.empty(M, N, dtype=A.dtype)
    with T.Kernel(T.ceildiv(M, 32), threads=64) as b:
        for i, j in T.Parallel(32, N):
            if b * 32 + i < M:
                B[b * 32 + i, j] = A[b * 32 + i, j]
    return B


@tilescale.jit
def fixed(A):
    M, N = T.const("M, N")
    A: T.Tensor[[M, N], T.float32]
    return copied(A)


@tilescale.jit
def rows(A):
    M, N = T.dynamic("M"), T.const("N")
    A: T.Tensor[[M, N], T.float32]
    return copied(A)


@tilescale.jit
def strided(A):
    M, N, s, t = T.const("M, N, s, t")
    A: T.StridedTensor[[M, N], [s, t], T.float32]
    return copied(A)


@pytest.mark.parametrize("kernel", [fixed, rows, strided], ids=lambda k: k.name)
def test_launches_in_a_macro(kernel: Any):
    for m in (40, 64):
        a = torch.randn(m, 2, 8, 2)
        a = a[:, 0, :, 0] if kernel is strided else a[:, 0, :, 0].contiguous()
        assert torch.equal(kernel(a), a)


def test_macros_of_an_enclosing_function():
    """By its own call; a factory only hands one on to the kernel inside of it."""

    @T.macro
    def twice(A: Any, B: Any) -> None:
        with T.Kernel(1, threads=32):
            for i in T.Parallel(8):
                B[i] = A[i] * 2

    @T.macro
    def through(A: Any, B: Any) -> None:
        twice(A, B)

    @tilescale.jit
    def eager(A: T.Tensor((8,), "float32"), B: T.Tensor((8,), "float32")):
        through(A, B)

    @tilescale.jit
    def factory(n: int):
        @T.prim_func
        def main(A: T.Tensor((n,), "float32"), B: T.Tensor((n,), "float32")):
            twice(A, B)

        return main

    for call in (eager, factory(8)):
        a, b = torch.arange(8.0), torch.zeros(8)
        call(a, b)
        assert torch.equal(b, 2 * a)


def test_outputs_by_extents():
    def made(*shape: Any, **words: Any) -> torch.Tensor:
        @tilescale.jit
        def eager(A):
            n = T.dynamic("n")
            A: T.Tensor((n, 4), T.float32)
            C = T.empty(*(A.shape[0] + 1 if s == "n" else s for s in shape), **words)
            with T.Kernel(1, threads=32):
                for i, j in T.Parallel(n + 1, 4):
                    C[i, j] = i
            return C

        return eager(torch.zeros(2, 4))

    for shape, words, dtype in (
        (("n", 4), {"dtype": "float16"}, torch.float16),
        (("n", 4), {}, torch.float32),
        ((3, 4, T.int32), {}, torch.int32),
        (([3, 4], torch.int32), {}, torch.int32),
    ):
        assert torch.equal(made(*shape, **words), torch.arange(3, dtype=dtype)[:, None].expand(3, 4))
    with refused(TileTypeError, "unknown dtype (3, 4)"):
        made((3, 4), (3, 4))
    with refused(TileTypeError, "T.empty of 3, (4,)", expected="T.empty(m, n, dtype"):
        made(3, (4,), dtype="float16")
    with refused(TileTypeError, "T.empty of ", expected="T.empty(m, n, dtype"):
        made()


def test_what_get_tir_gives_is_compiled():
    a, program = torch.randn(40, 8), rows.get_tir(T.Tensor((40, 8), "float32"))
    assert "def rows" in program.script()
    for target in ("cpu", "sim"):
        assert torch.equal(tilescale.compile(program, target=target)(a), rows(a))
    with refused(TileValueError, "out_idx 7 of rows"):
        tilescale.compile(program, out_idx=7, target="cpu")


def test_declarations_in_place_of_tensors():
    given = T.Tensor((40, 8), "float32")
    a = torch.randn(40, 8)
    assert rows.get_tir(given).name == "rows" and rows.par_compile([(given,), {"A": a}])[0] is rows.compile(a)
    assert torch.equal(fixed.compile(A=given)(a), a) and fixed.compile(given) is fixed.compile(a)
    with refused(TileTypeError, "A is of float16", expected="float32"):
        fixed.compile(T.Tensor((40, 8), "float16"))
    made = fixed.par_compile([{"A": T.Tensor((40, 8, 2))}, (given,)], ignore_error=True)
    assert made[0] is None and made[1] is fixed.compile(a)
    with refused(TileValueError, "A has 3 axes"):
        fixed.par_compile([{"A": T.Tensor((40, 8, 2))}])
