"""Products by hand (tilescale.intrinsics): every order of operands and of warps, on every target, against
float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.unit.cuda.emulated import data, lowered
from tests.unit.ops.test_argmax import TARGETS, run
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.errors import TileTypeError, TileValueError
from tilescale.intrinsics import (
    INT4TensorCoreIntrinEmitter,
    TensorCoreIntrinEmitter,
    TensorCoreIntrinEmitterWithLadderTransform,
    make_mma_swizzle_layout,
)

RNG = np.random.default_rng(5)


def product(
    emitter: Any, m: int, n: int, k: int, a: Any, b: Any, swizzled: bool = True, grid: bool = False
) -> Any:
    """C = A · B by one block whose tiles of A and B, of shapes ``a`` and ``b``, hold all of them. ``grid``: C
    goes through a tile of tiles."""
    dtype, sums = str(emitter.a_dtype), str(emitter.accum_dtype)
    rows, columns = emitter.warp_rows, emitter.warp_cols
    wide = emitter.micro_size_y
    held = (m // 16, n // wide, 16, wide) if grid else (m, n)

    @T.prim_func
    def kernel(A: T.Tensor(a, dtype), B: T.Tensor(b, dtype), C: T.Tensor((m, n), sums)):
        with T.Kernel(1, threads=emitter.threads):
            x, y, z = T.alloc_shared(a, dtype), T.alloc_shared(b, dtype), T.alloc_shared(held, sums)
            left = T.alloc_local((rows * emitter.local_size_a,), dtype)
            right = T.alloc_local((columns * emitter.local_size_b,), dtype)
            total = T.alloc_local((rows * columns * emitter.local_size_out,), sums)
            if swizzled:
                T.annotate_layout({x: make_mma_swizzle_layout(x), y: make_mma_swizzle_layout(y)})
            T.copy(A, x)
            T.copy(B, y)
            T.clear(total)
            for step in T.serial(k // emitter.micro_size_k):
                emitter.ldmatrix_a(left, x, step)
                emitter.ldmatrix_b(right, y, step)
                emitter.mma(left, right, total)
            emitter.stmatrix(total, z)
            for i, j in T.Parallel(m, n):
                C[i, j] = z[i // 16, j // wide, i % 16, j % wide] if grid else z[i, j]

    return kernel


def check(
    emitter: Any, target: str, x: Any, y: Any, placed: tuple[Any, Any] | None = None, **how: Any
) -> None:
    """``x`` · ``y``, as float64 has it; ``placed``: how they lie."""
    a, b = placed or (x, y)
    m, k, n = *x.shape, y.shape[1]
    c = np.zeros((m, n), str(emitter.accum_dtype))
    kernel = product(emitter, m, n, k, a.shape, b.shape, **how)
    got = run(kernel, {"A": a, "B": b, "C": c}, target)["C"]
    wanted = x.astype(float) @ y.astype(float)
    if c.dtype == np.int32:
        assert (got == wanted).all()
    else:
        tolerance = 0.05 if c.dtype == np.float16 else 1e-4
        np.testing.assert_allclose(got.astype(float), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "dtype, sums, a_turned, b_turned",
    [
        ("float16", "float32", False, True),
        ("bfloat16", "float32", True, False),
        ("float16", "float16", False, False),
        ("int8", "int32", False, True),
        ("int8", "int32", True, False),
    ],
)
def test_operands_of_every_order(dtype: str, sums: str, a_turned: bool, b_turned: bool, target: str):
    k = 64 if dtype == "int8" else 32
    emitter = TensorCoreIntrinEmitter(
        a_dtype=dtype,
        b_dtype=dtype,
        accum_dtype=sums,
        a_transposed=a_turned,
        b_transposed=b_turned,
        block_row_warps=2,
        block_col_warps=1,
        warp_row_tiles=16,
        warp_col_tiles=32,
        chunk=k,
    )
    assert (emitter.warp_rows, emitter.warp_cols, emitter.threads) == (1, 2, 64)
    x, y = data((32, k), dtype, 1), data((k, 32), dtype, 2)
    placed = x.T.copy() if a_turned else x, y.T.copy() if b_turned else y
    check(emitter, target, x, y, placed)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("m_first", [False, True])
@pytest.mark.parametrize("wide", [8, 16])
def test_places_of_warps(m_first: bool, wide: int, target: str):
    emitter = TensorCoreIntrinEmitter(
        accum_dtype="float32",
        b_transposed=True,
        block_row_warps=2,
        block_col_warps=3,
        warp_row_tiles=32,
        warp_col_tiles=wide,
        chunk=16,
        is_m_first=m_first,
    )
    assert (emitter.n_dim, emitter.local_size_b, emitter.local_size_out) == (wide, wide // 2, wide // 2)
    x, y = data((64, 16), "float16", 1), data((16, 3 * wide), "float16", 2)
    check(emitter, target, x, y, (x, y.T.copy()), swizzled=False, grid=True)


def in_tiles(rows: Any, each: int, kind: int, is_a: bool) -> Any:
    """Rows along k as a grid of tiles, by the words of PTX ISA: "ldmatrix" (lane l names row l % 8 of matrix
    l / 8, of which lane l gets element l % 4 of row l / 4), "Matrix Fragments for mma.m16n8k16"."""
    deep = 8 * each
    grid = rows.reshape(rows.shape[0] // 16, 16, rows.shape[1] // deep, deep).transpose(0, 2, 1, 3)
    if kind == 1:
        return grid.copy()
    out = np.zeros(grid.shape, rows.dtype)
    flat = out.reshape(*grid.shape[:2], -1)
    for matrix in range(4):
        # Of A the matrices run over the halves of the rows first, of B over those of k.
        down, along = (matrix % 2, matrix // 2) if is_a else (matrix // 2, matrix % 2)
        part = grid[:, :, 8 * down : 8 * down + 8, 4 * each * along : 4 * each * (along + 1)]
        if kind == 2:
            flat[:, :, 32 * each * matrix : 32 * each * (matrix + 1)] = part.reshape(*part.shape[:2], -1)
        else:
            for lane in range(32):
                first = lane * 4 * each + matrix * each
                flat[:, :, first : first + each] = part[
                    :, :, lane // 4, lane % 4 * each : (lane % 4 + 1) * each
                ]
    return out


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype, sums", [("float16", "float32"), ("int8", "int32")])
@pytest.mark.parametrize("kinds", [(1, 0), (2, 1), (3, 2), (0, 3)])
def test_operands_as_instructions_take_them(kinds: tuple[int, int], dtype: str, sums: str, target: str):
    each = 4 if dtype == "int8" else 2
    k = 16 * each
    emitter = TensorCoreIntrinEmitterWithLadderTransform(
        a_dtype=dtype,
        b_dtype=dtype,
        accum_dtype=sums,
        b_transposed=True,
        block_row_warps=1,
        block_col_warps=2,
        warp_row_tiles=32,
        warp_col_tiles=16,
        chunk=k,
        transform_kind_a=kinds[0],
        transform_kind_b=kinds[1],
    )
    x, y = data((32, k), dtype, 1), data((k, 32), dtype, 2)
    placed = [
        in_tiles(rows, each, kind, is_a) if kind else rows.copy()
        for rows, kind, is_a in ((x, kinds[0], True), (y.T, kinds[1], False))
    ]
    check(emitter, target, x, y, (placed[0], placed[1]), swizzled=False)


@pytest.mark.parametrize("target", TARGETS)
def test_numbers_of_4_bits(target: str):
    emitter = INT4TensorCoreIntrinEmitter(
        "int8", "int8", "int32", b_transposed=True, block_row_warps=1, block_col_warps=1, warp_row_tiles=16,
        warp_col_tiles=16, chunk=64,
    )  # fmt: skip
    x, y = (RNG.integers(-8, 8, (16, 128)).astype("int8") for _ in range(2))
    packed = [(v[:, 0::2] & 15 | v[:, 1::2] << 4).astype("int8") for v in (x, y)]
    kernel = product(emitter, 16, 16, 64, (16, 64), (16, 64))
    got = run(kernel, {"A": packed[0], "B": packed[1], "C": np.zeros((16, 16), "int32")}, target)["C"]
    assert (got == x.astype(int) @ y.T.astype(int)).all()


@pytest.mark.parametrize("target", ["cpu", "sm_90a"])
def test_a_loop_of_tiles(target: str):
    """A ring of stages, groups of warps that share the depth, a tile that begins at an element, and sums that
    go to a tensor."""
    emitter = TensorCoreIntrinEmitter(
        accum_dtype="float32", b_transposed=True, block_row_warps=2, block_col_warps=1, warp_row_tiles=16,
        warp_col_tiles=16, chunk=16,
    )  # fmt: skip

    @T.prim_func
    def kernel(
        A: T.Tensor((64, 96), "float16"), B: T.Tensor((32, 96), "float16"), C: T.Tensor((64, 32), "float32")
    ):
        with T.Kernel(2, 2, threads=64) as (bx, by):
            x, y = T.alloc_shared((2, 32, 32), "float16"), T.alloc_shared((16, 32), "float16")
            left, right = T.alloc_local((8,), "float16"), T.alloc_local((8,), "float16")
            total = T.alloc_local((8,), "float32")
            T.clear(total)
            for step in T.Pipelined(3, num_stages=2):
                T.copy(A[by * 32, step * 32], x[1, :, :])
                T.copy(B[bx * 16, step * 32], y)
                for half in T.serial(2):
                    emitter.ldmatrix_a(left, x[1, 0, 0], 0, half)
                    emitter.ldmatrix_b(right, y, 0, half)
                    emitter.mma_atom(left, right, total, 0, 0)
            emitter.stmatrix(total, C, by, bx)

    a, b = data((64, 96), "float16", 1), data((32, 96), "float16", 2)
    got = run(kernel, {"A": a, "B": b, "C": np.zeros((64, 32), "float32")}, target)["C"]
    np.testing.assert_allclose(got, a.astype(float) @ b.astype(float).T, rtol=1e-4, atol=1e-4)


def test_the_code_of_a_product():
    """ldmatrix loads what lies in whole chunks, and no barrier stands between the elements of a result."""
    emitter = TensorCoreIntrinEmitter(
        accum_dtype="float32", b_transposed=True, block_row_warps=1, block_col_warps=1, warp_row_tiles=16,
        warp_col_tiles=16, chunk=32,
    )  # fmt: skip
    text = print_kernel(lowered(product(emitter, 16, 16, 32, (16, 32), (16, 32)), "sm_80").kernel).text
    assert text.count("ts::ldmatrix_x4(") == text.count("ts::mma_m16n8k16_f16(") == 2, text
    assert text.count("__syncthreads();") == 2, text  # in front of the loads, and behind the stores
    odd = print_kernel(
        lowered(product(emitter, 16, 16, 32, (16, 36), (16, 32), swizzled=False), "sm_80").kernel
    ).text
    assert odd.count("ts::ldmatrix_x4(") == 1, odd


def test_what_emitters_refuse():
    with pytest.raises(TileTypeError, match=r"TensorCoreIntrinEmitter of float64 by float64 into float64"):
        TensorCoreIntrinEmitter("float64", "float64", "float64")
    with pytest.raises(TileValueError, match="24 × 16 for each warp"):
        TensorCoreIntrinEmitter(warp_row_tiles=24, warp_col_tiles=16)
    with pytest.raises(TileValueError, match="a chunk of 24 float16"):
        TensorCoreIntrinEmitter(chunk=24)
    ladder = TensorCoreIntrinEmitterWithLadderTransform
    with pytest.raises(TileValueError, match=r"transform kinds \(4, 0\)"):
        ladder(transform_kind_a=4)
    with pytest.raises(TileValueError, match="a grid of tiles of B whose rows do not run along k"):
        ladder(transform_kind_b=1)
    with pytest.raises(TileValueError, match="2 numbers a byte as NonTransform"):
        ladder(num_elems_per_byte=2)

    with pytest.raises(TileTypeError, match="INT4TensorCoreIntrinEmitter of uint8 by int8"):
        INT4TensorCoreIntrinEmitter("uint8", "int8", "int32", chunk=32)
    with pytest.raises(TileTypeError, match="mma_atom of INT4TensorCoreIntrinEmitter"):
        INT4TensorCoreIntrinEmitter("int8", "int8", "int32", chunk=32).mma_atom(None, None, None, 0, 0)

    emitter = TensorCoreIntrinEmitter(accum_dtype="float32", warp_col_tiles=16)

    @T.prim_func
    def kernel(C: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=128):
            total = T.alloc_local((8,), "float32")
            T.clear(total)
            emitter.stmatrix(total, C)

    with pytest.raises(TileValueError, match="stmatrix into 1 axes"):
        kernel.trace()
