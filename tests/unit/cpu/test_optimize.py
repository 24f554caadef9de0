"""TILESCALE_CPU_OPTIMIZE=0: other code, kept apart from the optimised, with the same results."""

from __future__ import annotations

import numpy as np
import pytest

import tilescale
import tilescale.language as T


@T.prim_func
def halves(A: T.Tensor((64, 64), "float32"), B: T.Tensor((64, 64), "float32")):
    with T.Kernel(2, threads=128) as bx:
        a = T.alloc_shared((32, 64), "float32")
        T.copy(A[bx * 32, 0], a)
        for i, j in T.Parallel(32, 64):
            a[i, j] = T.if_then_else(j > bx, a[i, j] / 2, -1)
        T.copy(a, B[bx * 32, 0])


def test_it_is_other_code_with_the_same_results(monkeypatch: pytest.MonkeyPatch):
    given = np.random.default_rng(0).standard_normal((64, 64)).astype("float32")
    want = np.where(np.arange(64) > np.arange(64)[:, None] // 32, given / 2, -1)
    texts, paths = [], set()
    for optimize in ("1", "0"):
        monkeypatch.setenv("TILESCALE_CPU_OPTIMIZE", optimize)
        kernel, got = tilescale.compile(halves, target="cpu"), np.zeros_like(given)
        kernel(given, got)
        assert (got == want).all()
        assert tilescale.compile(halves, target="cpu").from_cache
        texts.append(kernel.get_kernel_source("asm"))
        paths.add(kernel.entry.path)
    assert len(paths) == 2 and texts[0] != texts[1]
