"""Views with other axes, on every target."""

from __future__ import annotations

import numpy as np
import pytest

import tilescale.language as T
from tests.unit.ops.test_argmax import TARGETS, run


@T.prim_func
def heads(
    A: T.Tensor((64, 32), "float16"),
    B: T.Tensor((128, 32), "float16"),
    w: T.Tensor((2, 64), "float32"),
    C: T.Tensor((64, 2), "float32"),
):
    with T.Kernel(1, threads=128):
        a, b = T.alloc_shared((64, 32), "float16"), T.alloc_shared((128, 32), "float16")
        s, sums = T.alloc_fragment((64, 128), "float32"), T.alloc_fragment((64, 2), "float32")
        split, weights = T.reshape(s, (64, 2, 64)), T.alloc_fragment((2, 64), "float32")
        T.copy(A, a)
        T.copy(B, b)
        T.copy(w, weights)
        T.gemm(a, b, s, transpose_B=True, clear_accum=True)
        for i, q, h in T.Parallel(64, 2, 64):
            split[i, q, h] = T.max(split[i, q, h], 0) * weights[q, h]
        T.reduce_sum(split, sums, dim=-1)
        T.copy(sums, C)


@pytest.mark.parametrize("target", TARGETS)
def test_an_accumulator_by_heads(target: str):
    rng = np.random.default_rng(5)
    a, b = (rng.standard_normal((n, 32)).astype("float16") for n in (64, 128))
    w = rng.standard_normal((2, 64)).astype("float32")
    out = run(heads, {"A": a, "B": b, "w": w, "C": np.full((64, 2), np.nan, "float32")}, target)
    product = np.maximum(a.astype(float) @ b.astype(float).T, 0).reshape(64, 2, 64)
    np.testing.assert_allclose(out["C"], (product * w).sum(-1), rtol=1e-4, atol=1e-3)


@T.prim_func
def flat(
    A: T.Tensor((T.dynamic("n"), 6), "int32"),
    B: T.Tensor((T.dynamic("m"),), "int32"),
    C: T.Tensor((T.dynamic("n"), 2), "int32"),
):
    with T.Kernel(2, threads=32) as bx:
        n = T.dynamic("n")
        a, c = T.view(A, (n * 6,)), T.reshape(C, (2, n))
        pairs, tile = T.reshape(A, (n * 3, 2)), T.alloc_shared((8,), "int32")
        for i in T.Parallel(64):
            if bx * 64 + i < n * 6:
                B[bx * 64 + i] = a[bx * 64 + i] * 2
        T.copy(a[bx * 8 : bx * 8 + 8], tile)
        for i in T.Parallel(8):
            T.atomic_add(c[bx, i], tile[i])
        c[bx, n - 1] = pairs[n * 3 - 1, bx]


@pytest.mark.parametrize("target", TARGETS)
def test_a_tensor_under_extents_that_calls_say(target: str):
    a = np.arange(15 * 6, dtype="int32").reshape(15, 6)
    out = run(flat, {"A": a, "B": np.zeros(128, "int32"), "C": np.ones((15, 2), "int32")}, target)
    np.testing.assert_array_equal(out["B"], np.pad(a.flatten() * 2, (0, 128 - 90)))
    want = np.ones((2, 15), "int32")
    want[:, :8] += a.flatten()[:16].reshape(2, 8)
    want[:, 14] = [88, 89]
    np.testing.assert_array_equal(out["C"].reshape(2, 15), want)
