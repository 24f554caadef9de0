"""Kernels written by hand down to the instruction, on a Hopper GPU."""

from __future__ import annotations

from typing import Any

import pytest

import tilescale
from tests.unit.cuda.test_expert import gemm, rows_by_hand, stored

torch: Any = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]


@pytest.mark.parametrize(
    "shape, options",
    [
        ((1000, 776, 520), {}),
        ((257, 264, 200), {"BM": 64, "stages": 2}),
        ((1024, 1024, 4096), {"BN": 256, "stages": 4}),
        ((1000, 776, 520), {"later": False}),
    ],
)
def test_a_gemm_by_hand(shape: tuple[int, int, int], options: dict[str, int]):
    M, N, K = shape
    a, b = (torch.randn(s, device="cuda").bfloat16() for s in ((M, K), (K, N)))
    made = tilescale.compile(gemm(M, N, K, **options), target="cuda")
    first, c = (torch.full((M, N), float("nan"), device="cuda") for _ in range(2))
    made(a, b, first)
    want = a.double() @ b.double()
    assert ((first.double() - want).abs() <= 2.0**-22 * K**0.5 * (a.double().abs() @ b.double().abs())).all()
    for _ in range(100):
        c.fill_(float("nan"))
        made(a, b, c)
        assert (c == first).all()


@pytest.mark.parametrize(
    "reduce, dtype",
    [("", "float32"), ("add", "float32"), ("add", "bfloat16"), ("max", "int32"), ("min", "bfloat16")],
)
def test_stores_and_reductions_by_tma(reduce: str, dtype: str):
    made = tilescale.compile(stored(reduce, dtype), target="cuda")
    a, c = ((torch.randn(100, 128, device="cuda") * 100).to(getattr(torch, dtype)) for _ in range(2))
    want = {"": a, "add": c + a, "max": torch.maximum(c, a), "min": torch.minimum(c, a)}[reduce]
    made(a, c)
    assert (c == want).all()


@pytest.mark.parametrize(("stages", "width", "dtype"), [(1, 64, "bfloat16"), (3, 1024, "float32")])
def test_rows_by_tma(stages: int, width: int, dtype: str):
    made = tilescale.compile(rows_by_hand(stages, width, dtype), target="cuda")
    a = torch.randn(7, 2 * width, device="cuda").to(getattr(torch, dtype))
    for _ in range(20):
        c = torch.full_like(a, float("nan"))
        made(a, c)
        assert (c[:, width:] == 2 * a[:, width:]).all() and c[:, :width].isnan().all()
