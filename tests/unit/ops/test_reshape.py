"""Views of fragments with other axes, on every target."""

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
