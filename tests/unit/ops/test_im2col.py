"""T.im2col and views of a tensor's memory: a convolution on every target, against torch in float64."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

import tilescale.language as T
from tests.unit.ops.test_argmax import TARGETS, run
from tilescale.compiler import driver
from tilescale.errors import TileTypeError, TileValueError

RNG = np.random.default_rng(11)
#: images, channels, height, width, filters, window, stride, dilation, padding
SHAPES = (
    (2, 16, 5, 7, 24, 3, 1, 1, 1),
    (1, 12, 7, 6, 17, 3, 2, 1, 0),
    (1, 8, 6, 6, 16, 2, 1, 2, 2),
    (1, 16, 7, 6, 16, 3, 2, 1, 1),
    # rows of results are whole tiles of the matrix
    (2, 32, 5, 32, 16, 3, 1, 1, 1),
    (1, 16, 4, 66, 16, 3, 1, 1, 0),
    (1, 16, 6, 32, 16, 3, 1, 2, 2),
    # several rows of results are one tile, also of two images
    (2, 16, 3, 16, 16, 3, 1, 1, 1),
    (2, 16, 3, 10, 16, 3, 1, 1, 0),
)


def convolution(n: int, c: int, h: int, w: int, f: int, k: int, s: int, d: int, p: int) -> Any:
    oh, ow = ((e + 2 * p - d * (k - 1) - 1) // s + 1 for e in (h, w))

    @T.prim_func
    def main(
        A: T.Tensor((n, h, w, c), "float32"),
        B: T.Tensor((k, k, c, f), "float32"),
        C: T.Tensor((n, oh, ow, f), "float32"),
    ):
        with T.Kernel(T.ceildiv(f, 16), T.ceildiv(n * oh * ow, 32), threads=64) as (bx, by):
            a, b = T.alloc_shared((32, 16), "float32"), T.alloc_shared((16, 16), "float32")
            acc = T.alloc_fragment((32, 16), "float32")
            weights = T.Tensor((k * k * c, f), "float32", B.data)
            out = T.Tensor((n * oh * ow, f), "float32", C.data)
            T.clear(acc)
            for i in T.Pipelined(T.ceildiv(k * k * c, 16), num_stages=2):
                T.im2col(A, a, by, i, k, s, d, p)
                T.copy(weights[i * 16, bx * 16], b)
                T.gemm(a, b, acc)
            T.copy(acc, out[by * 32, bx * 16])

    return main


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_convolution(shape: tuple[int, ...], target: str):
    n, c, h, w, f, k, s, d, p = shape
    a, b = RNG.standard_normal((n, h, w, c)), RNG.standard_normal((k, k, c, f))
    want = torch.nn.functional.conv2d(
        torch.from_numpy(a).permute(0, 3, 1, 2),
        torch.from_numpy(b).permute(3, 2, 0, 1),
        stride=s,
        padding=p,
        dilation=d,
    )
    out = np.full(tuple(want.permute(0, 2, 3, 1).shape), np.nan, "float32")
    got = run(convolution(*shape), {"A": a.astype("float32"), "B": b.astype("float32"), "C": out}, target)
    np.testing.assert_allclose(got["C"], want.permute(0, 2, 3, 1).numpy(), rtol=1e-4, atol=1e-4)


def boxed(rows: int) -> Any:
    """So many rows of the matrix a tile."""

    @T.prim_func
    def kernel(
        A: T.Tensor((2, 4, 64, 64), "float16"),
        B: T.Tensor((3, 3, 64, 64), "float16"),
        C: T.Tensor((2, 4, 64, 64), "float16"),
    ):
        with T.Kernel(1, 512 // rows, threads=128) as (bx, by):
            a, b = T.alloc_shared((rows, 32), "float16"), T.alloc_shared((32, 64), "float16")
            acc = T.alloc_fragment((rows, 64), "float32")
            weights = T.Tensor((3 * 3 * 64, 64), "float16", B.data)
            out = T.Tensor((2 * 4 * 64, 64), "float16", C.data)
            T.clear(acc)
            for i in T.Pipelined(18, num_stages=2):
                T.im2col(A, a, by, i, 3, 1, 1, 1)
                T.copy(weights[i * 32, bx * 64], b)
                T.gemm(a, b, acc)
            T.copy(acc, out[by * rows, bx * 64])

    return kernel


@pytest.mark.parametrize("rows", [64, 128])
def test_boxes_of_the_image_go_through_a_ring_by_tma(rows: int):
    """Both operands, though one of them is a view of a tensor, and the result. A tile of 128 rows of the
    matrix is two rows of the image, a box each; of the result, which is one of such a view, it is none."""
    kernel = boxed(rows)
    code = driver.source_text(kernel.trace(), "cuda", "cuda:sm_90a")
    assert len(re.findall(r"ts::tma_load\(.*\bA_map\b", code)) == rows // 64, code
    for name in ("A", "B", "C") if rows == 64 else ("A", "B"):
        assert re.search(rf"ts::tma_(load|store)\(.*\b{name}_map\b", code), code
    a, b = (RNG.standard_normal(shape).astype("float16") for shape in ((2, 4, 64, 64), (3, 3, 64, 64)))
    want = torch.nn.functional.conv2d(
        torch.from_numpy(a.astype(float)).permute(0, 3, 1, 2),
        torch.from_numpy(b.astype(float)).permute(3, 2, 0, 1),
        padding=1,
    ).permute(0, 2, 3, 1)
    for target in ("sim", "sm_90a"):
        out = run(kernel, {"A": a, "B": b, "C": np.full((2, 4, 64, 64), np.nan, "float16")}, target)["C"]
        np.testing.assert_allclose(out.astype(float), want.numpy(), rtol=2e-2, atol=0.15)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("width", [32, 30], ids=["boxes", "elements"])
def test_every_tile_of_the_matrix_and_zeros_behind_it(width: int, target: str):
    @T.prim_func
    def kernel(A: T.Tensor((2, 3, width, 16), "float32"), B: T.Tensor((7, 20, 32, 8), "float32")):
        with T.Kernel(7, 20, threads=64) as (row, column):
            a = T.alloc_shared((32, 8), "float32")
            T.im2col(A, a, row, column, 3, 1, 1, 1)
            T.copy(a, B[row, column, 0, 0])

    image = RNG.standard_normal((2, 3, width, 16)).astype("float32")
    padded = np.pad(image, ((0, 1), (1, 1), (1, 1), (0, 0)))  # one image more: rows behind the last are zero
    windows = [padded[:, y : y + 3, x : x + width] for y in range(3) for x in range(3)]
    want = np.stack(windows, 3).reshape(-1, 9 * 16)
    want[2 * 3 * width :] = 0
    want = np.pad(want, ((0, 7 * 32), (0, 16)))[: 7 * 32].reshape(
        7, 32, -1
    )  # 18 tiles of columns, and 2 more
    out = run(kernel, {"A": image, "B": np.full((7, 20, 32, 8), np.nan, "float32")}, target)["B"]
    for column in range(20):
        assert (out[:, column] == want[:, :, column * 8 : column * 8 + 8]).all(), column


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("T.im2col(A, A, 0, 0, 3, 1, 1, 1)", TileTypeError, "into A"),
        ("T.im2col(t, t, 0, 0, 3, 1, 1, 1)", TileTypeError, "im2col of t"),
        ("T.im2col(A, t, 0, 0, 9, 1, 1, 1)", TileValueError, "a window of 9 does not fit"),
        ("T.im2col(A, t, 0, 0, 3, 0, 1, 1)", TileValueError, "stride=0"),
    ],
)
def test_refusals(how: str, kind: type[Exception], message: str):
    @T.prim_func
    def kernel(A: T.Tensor((1, 4, 4, 8), "float32")):
        with T.Kernel(1, threads=32):
            t = T.alloc_shared((8, 8), "float32")
            eval(how, {"T": T, "A": A, "t": t})

    with pytest.raises(kind, match=message):
        kernel.trace()


def test_a_view_has_as_many_bytes():
    @T.prim_func
    def kernel(A: T.Tensor((4, 4), "float32")):
        with T.Kernel(1, threads=32):
            flat = T.Tensor((15,), "float32", A.data)
            flat[0] = 1

    with pytest.raises(TileValueError, match="the same number of bytes|has 64 bytes"):
        kernel.trace()
