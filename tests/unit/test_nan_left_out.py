"""Reductions leave NaN out unless ``nan_propagate=True``, and launches of one block without extents."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import tilescale.language as T
from tests.unit.cuda.emulated import agree, empty
from tilescale.jit import compile

NONE = {"max": -math.inf, "min": math.inf, "absmax": 0.0}


def kernel(op: str, dtype: str, clear: bool, shared: bool) -> Any:
    reduce = getattr(T, f"reduce_{op}")

    @T.prim_func
    def rows(A: T.Tensor((16, 40), dtype), B: T.Tensor((16,), dtype)):
        with T.Kernel(threads=64):
            a = T.alloc_shared((16, 40), dtype) if shared else T.alloc_fragment((16, 40), dtype)
            b = T.alloc_fragment((16,), dtype)
            T.copy(A, a)
            T.copy(B, b)
            reduce(a, b, dim=1, clear=clear)
            T.copy(b, B)

    return rows


def drawn(dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(5)
    a, b = torch.randn(16, 40, generator=g) * 9, torch.randn(16, generator=g) * 9
    if dtype != "int32":
        a[torch.rand(16, 40, generator=g) < 0.3] = math.nan
        a[3], b[3], b[5] = math.nan, math.nan, math.nan
    return a.to(getattr(torch, dtype)), b.to(getattr(torch, dtype))


@pytest.mark.parametrize("target", ["cpu", "sim"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("clear", [False, True])
@pytest.mark.parametrize(
    "op, dtype", [("max", "float32"), ("min", "float16"), ("absmax", "float32"), ("max", "int32")]
)
def test_values(op: str, dtype: str, clear: bool, shared: bool, target: str):
    a, b = drawn(dtype)
    parts = [a.double().abs() if op == "absmax" else a.double(), *([] if clear else [b.double()[:, None]])]
    every = torch.cat(parts, 1)
    every = every.where(~every.isnan(), NONE[op])
    compile(kernel(op, dtype, clear, shared), target=target)(a, b)
    assert torch.equal(b.double(), every.amin(1) if op == "min" else every.amax(1))


@T.prim_func
def both(A: T.Tensor((8, 512), "float32"), B: T.Tensor((2, 3, 8), "float32")):
    with T.Kernel(threads=128):
        a, b = T.alloc_fragment((8, 512), "float32"), T.alloc_fragment((8,), "float32")
        T.copy(A, a)
        T.reduce(a, b, "max")
        T.copy(b, B[0, 0, :])
        T.reduce_min(a, b)
        T.copy(b, B[0, 1, :])
        T.reduce_absmax(a, b)
        T.copy(b, B[0, 2, :])
        T.reduce(a, b, "max", nan_propagate=True)
        T.copy(b, B[1, 0, :])
        T.reduce_min(a, b, nan_propagate=True)
        T.copy(b, B[1, 1, :])
        T.reduce_absmax(a, b, nan_propagate=True)
        T.copy(b, B[1, 2, :])


def odd_rows() -> np.ndarray:
    """Of several threads and warps each; one of NaNs alone, one with a single NaN, one of infinities and
    NaNs."""
    a = np.random.default_rng(3).standard_normal((8, 512)).astype("float32")
    a[1], a[2, 77], a[3, ::2], a[4, 1::2] = np.nan, np.nan, np.nan, -np.inf
    a[4, ::2] = np.nan
    return a


def test_the_default_and_nan_that_wins_on_every_target():
    a = odd_rows()
    got = agree(both, {"A": a, "B": empty((2, 3, 8), "float32")}, exact=True)["B"]
    cpu = torch.empty(2, 3, 8)
    compile(both, target="cpu")(torch.from_numpy(a), cpu)
    assert np.array_equal(got, cpu.numpy(), equal_nan=True)
    left_out = [
        np.fmax.reduce(a, 1, initial=-np.inf),
        np.fmin.reduce(a, 1, initial=np.inf),
        np.fmax.reduce(np.abs(a), 1, initial=0),
    ]
    assert np.array_equal(got[0], np.stack(left_out))
    assert np.array_equal(got[1], np.stack([a.max(1), a.min(1), np.abs(a).max(1)]), equal_nan=True)


def test_on_the_emulated_gpu():
    a, b = drawn("float32")
    agree(kernel("max", "float32", True, False), {"A": a.numpy(), "B": empty((16,), "float32")})
    agree(kernel("min", "float32", False, True), {"A": a.numpy(), "B": b.numpy()})
