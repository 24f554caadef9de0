"""Views of tiles in shared memory that products read, on the emulated GPU."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.unit.cuda.emulated import agree, data, empty, lowered
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.compiler.layout.shared import boxed, strided
from tilescale.compiler.layout.viewed import reshaped


@pytest.mark.parametrize(
    ("shape", "bits", "swizzle", "view", "wide"),
    [
        ((32, 512), 16, 128, (16, 512), 32),
        ((32, 512), 16, 128, (32, 256), 32),
        ((32, 128), 16, 128, (16, 2, 64), 32),
        ((64, 64), 32, 128, (64, 128), 16),
        ((64, 64), 16, 128, (4096,), 16),
        ((64, 32), 16, 64, (64, 8), 64),
        ((16, 64), 8, 64, (8, 2, 32), 16),
        ((32, 48), 16, 32, (32, 24), 32),
        ((32, 48), 16, 0, (16, 48), 32),
    ],
)
def test_a_view_leads_to_the_same_bytes(
    shape: tuple[int, ...], bits: int, swizzle: int, view: tuple[int, ...], wide: int
) -> None:
    held = boxed(shape, bits, swizzle) if swizzle else strided(shape, bits)
    made = reshaped(held, view, wide)
    assert made is not None and made.swizzle == swizzle
    low = min(bits, wide) // 8

    def places(layout: Any, width: int, axes: tuple[int, ...]) -> Any:
        first = layout.byte(*np.indices(axes)).reshape(-1, 1)
        return (first + np.arange(0, width // 8, low)).reshape(-1)

    assert prod(shape) * bits == prod(view) * wide
    assert (places(held, bits, shape) == places(made, wide, view)).all()


@pytest.mark.parametrize(("shape", "view", "bits"), [((24, 64), (40, 32), 16), ((32, 64), (32, 64), 32)])
def test_views_of_another_size_have_no_layout(
    shape: tuple[int, ...], view: tuple[int, ...], bits: int
) -> None:
    assert reshaped(strided(shape, 16), view, bits) is None


def reused(other_rows: bool) -> Any:
    """A right operand of a product that is overwritten through a view of float32."""
    rows, columns = (16, 64) if other_rows else (32, 32)

    @T.prim_func
    def kernel(
        A: T.Tensor((64, 128), "bfloat16"),
        B: T.Tensor((128, 64), "bfloat16"),
        C: T.Tensor((64, 32), "float32"),
        D: T.Tensor((4, rows, columns), "float32"),
    ):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((64, 64), "bfloat16"), T.alloc_shared((32, 64), "bfloat16")
            c = T.alloc_fragment((64, 32), "float32")
            sums = T.view(b, shape=(rows, columns), dtype="float32")
            T.clear(c)
            for k in range(2):
                T.copy(A[0, k * 64], a)
                for i, j in T.Parallel(32, 64):
                    b[i, j] = B[k * 32 + i, j]
                T.gemm(a, b, c, transpose_B=True)
                for i, j in T.Parallel(rows, columns):
                    sums[i, j] = T.cast(i * columns + j + k, "float32")
                for i, j in T.Parallel(rows, columns):
                    D[k, i, j] = sums[rows - 1 - i, j]
            T.copy(c, C)

    return kernel


@pytest.mark.parametrize("other_rows", [True, False])
def test_a_product_reads_a_tile_that_has_a_view(other_rows: bool) -> None:
    """wgmma asks for a swizzle, which the view has, too: without it the descriptor named plain rows."""
    kernel = reused(other_rows)
    assert "ts::descriptor_here<128>" in print_kernel(lowered(kernel).kernel).text
    shape = (4, 16, 64) if other_rows else (4, 32, 32)
    given = {"A": data((64, 128), "bfloat16", 1), "B": data((128, 64), "bfloat16", 2)}
    agree(kernel, {**given, "C": empty((64, 32), "float32"), "D": empty(shape, "float32")})


def test_a_product_of_a_view() -> None:
    """A view has the layout of its tile, whatever the product would like: mma.sync reads it."""

    @T.prim_func
    def kernel(
        A: T.Tensor((64, 64), "bfloat16"), B: T.Tensor((64, 32), "uint32"), C: T.Tensor((64, 64), "float32")
    ):
        with T.Kernel(1, threads=128):
            a, words = T.alloc_shared((64, 64), "bfloat16"), T.alloc_shared((64, 32), "uint32")
            b = T.view(words, shape=(64, 64), dtype="bfloat16")
            c = T.alloc_fragment((64, 64), "float32")
            T.copy(A, a)
            T.copy(B, words)
            T.clear(c)
            T.gemm(a, b, c, transpose_B=True)
            T.copy(c, C)

    b = data((64, 64), "bfloat16", 2)
    given = {"A": data((64, 64), "bfloat16", 1), "B": b.view(np.uint32)}
    got = agree(kernel, {**given, "C": empty((64, 64), "float32")})["C"]
    want = given["A"].astype(np.float32) @ b.astype(np.float32).T
    assert np.abs(got - want).max() < 1e-3 * np.abs(want).max()
    assert "wgmma" not in print_kernel(lowered(kernel).kernel).text
