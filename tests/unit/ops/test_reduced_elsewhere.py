"""A reduction whose result other statements want in other threads than its source's, on every target."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.unit.ops.test_argmax import TARGETS, run


def combine(dim: int, clear: bool) -> Any:
    @T.prim_func
    def kernel(
        G: T.Tensor((4, 256), "float16"),
        P: T.Tensor((4, 256, dim), "float16"),
        O: T.Tensor((256, dim), "float32"),
    ):
        with T.Kernel(2, threads=128) as bx:
            part, out = T.alloc_fragment((128, dim), "float16"), T.alloc_fragment((128, dim), "float32")
            weights, one = T.alloc_fragment((4, 128), "float16"), T.alloc_fragment((128,), "float32")
            most = T.alloc_fragment((128,), "float32")
            T.clear(out)
            T.fill(most, -1)
            T.copy(G[:, bx * 128 : (bx + 1) * 128], weights)
            T.reduce_max(weights, most, dim=0, clear=clear)
            for q in T.Pipelined(4, num_stages=2):
                T.copy(P[q, bx * 128 : (bx + 1) * 128, :], part)
                for i in T.Parallel(128):
                    one[i] = weights[q, i] - most[i]
                for i, j in T.Parallel(128, dim):
                    out[i, j] += part[i, j] * one[i]
            T.copy(out, O[bx * 128, 0])

    return kernel


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("clear", [True, False])
def test_weights_of_rows(clear: bool, target: str):
    rng = np.random.default_rng(9)
    g, p = (
        rng.standard_normal((4, 256)).astype("float16"),
        rng.standard_normal((4, 256, 64)).astype("float16"),
    )
    out = run(combine(64, clear), {"G": g, "P": p, "O": np.full((256, 64), np.nan, "float32")}, target)
    most = g.astype(float).max(0) if clear else np.maximum(g.astype(float).max(0), -1)
    want = ((g.astype(float) - most)[:, :, None] * p).sum(0)
    np.testing.assert_allclose(out["O"], want, rtol=1e-5, atol=1e-5)
