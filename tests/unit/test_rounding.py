"""T.round by both modes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import tilescale.language as T
from tests.kernels import refused
from tests.unit.cuda.emulated import agree, empty
from tilescale.errors import TileValueError
from tilescale.jit import compile

EDGES = [
    0.5,
    1.5,
    2.5,
    -0.5,
    -1.5,
    -2.5,
    0.0,
    -0.0,
    math.inf,
    -math.inf,
    math.nan,
    1e30,
    0.49999997,
    8388609.0,
]


def kernel(dtype: str, mode: str = "ties-away-from-zero") -> Any:
    @T.prim_func
    def rounded(A: T.Tensor((64,), dtype), B: T.Tensor((64,), dtype)):
        with T.Kernel(threads=64):
            for i in T.Parallel(64):
                B[i] = T.round(A[i], mode)

    return rounded


def drawn(dtype: str) -> torch.Tensor:
    a = torch.randn(64, generator=torch.Generator().manual_seed(1)) * 5
    a[: len(EDGES)] = torch.tensor(EDGES)
    return a.to(getattr(torch, dtype))


@pytest.mark.parametrize("target", ["cpu", "sim"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_ties_away_from_zero(dtype: str, target: str):
    a = drawn(dtype)
    b, x = torch.empty_like(a), a.double()
    want = x.trunc() + x.sign().where((x - x.trunc()).abs() >= 0.5, 0.0)
    want = want.where(x.isfinite(), x)
    compile(kernel(dtype), target=target)(a, b)
    assert torch.equal(b.double().nan_to_num(7), want.nan_to_num(7))
    some = ~x.isnan()
    assert torch.equal(b.signbit()[some], x.signbit()[some])


def test_on_the_emulated_gpu():
    agree(kernel("float32"), {"A": drawn("float32").numpy(), "B": empty((64,), "float32")})


def test_numbers_of_python_and_other_modes():
    assert (T.round(2.5, "ties-away-from-zero"), T.round(-0.5, "ties-away-from-zero"), T.round(2.5)) == (
        3,
        -1,
        2,
    )
    with refused(TileValueError, "'up'", expected="ties-to-even"):
        kernel("float32", "up").trace()
