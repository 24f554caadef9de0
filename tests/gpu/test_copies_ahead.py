"""Loops whose copies run ahead by cp.async on a GPU: against float64, and the same bits from launch to
launch."""

from __future__ import annotations

from typing import Any

import pytest

import tilescale
from tests.gpu.gemms import gemm
from tests.unit.cuda.test_gathers import attention
from tests.unit.passes.test_rings_below import rows

torch: Any = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

#: (M, N, K), options, bytes of one copy; blocks of 64 threads are none of Hopper's consumers
CASES = [
    ((520, 776, 1000), {"BM": 64, "BN": 64, "BK": 32, "stages": 2, "threads": 64}, 16),
    (
        (520, 776, 1000),
        {"BM": 64, "BN": 64, "BK": 32, "stages": 4, "threads": 64, "trans_b": True, "dtype": "float16"},
        16,
    ),
    ((1000, 780, 1004), {"BM": 128, "BN": 128, "BK": 32, "stages": 3, "threads": 256}, 8),
    ((1000, 780, 1004), {"BM": 128, "BN": 128, "BK": 64, "stages": 3, "threads": 256, "trans_a": True}, 8),
    ((333, 334, 502), {"BM": 64, "BN": 64, "BK": 32, "stages": 3, "threads": 128}, 4),
    ((300, 304, 24), {"BM": 64, "BN": 64, "BK": 32, "stages": 4, "threads": 64}, 16),
    (
        (700, 700, 700),
        {"BM": 64, "BN": 64, "BK": 32, "stages": 3, "threads": 64, "blocks": 40, "panel": 3},
        8,
    ),
]


@pytest.mark.parametrize("shape, options, size", CASES, ids=str)
def test_products(shape: tuple[int, int, int], options: dict[str, Any], size: int):
    M, N, K = shape
    dtype, ta, tb = (
        options.get("dtype", "bfloat16"),
        options.get("trans_a", False),
        options.get("trans_b", False),
    )
    draw = torch.Generator("cuda").manual_seed(1)
    a, b = (
        torch.randn(s, device="cuda", generator=draw).to(getattr(torch, dtype))
        for s in ((K, M) if ta else (M, K), (N, K) if tb else (K, N))
    )
    made = tilescale.compile(gemm(M, N, K, out="float32", **options), target="cuda")
    assert f"ts::cp_async<{size}>" in made.get_kernel_source("cuda")
    c = torch.full((M, N), float("nan"), device="cuda")
    made(a, b, c)
    x, y = (a.T if ta else a).double(), (b.T if tb else b).double()
    assert ((c.double() - x @ y).abs() <= x.abs() @ y.abs() * 2.0**-20).all()
    different = torch.zeros((), device="cuda", dtype=torch.int64)
    for _ in range(100):
        again = torch.full((M, N), float("nan"), device="cuda")
        made(a, b, again)
        different += (again != c).any()
    assert different.item() == 0


@pytest.mark.parametrize("stages", [2, 3, 5])
@pytest.mark.parametrize("scale", ["warp", "warpgroup"])
def test_rings_of_parts_of_a_block(scale: str, stages: int):
    """Each warp's own rows, of more rounds than there are stages, some warps with none."""
    x = torch.randn(2001, 256, device="cuda")
    made = tilescale.compile(rows(scale, stages, 256, blocks=16, wide=256), target="cuda")
    assert "ts::cp_async<16>" in made.get_kernel_source("cuda")
    want = 2 * x + x.flip(1)
    for _ in range(100):
        y = torch.full_like(x, float("nan"))
        made(x, y)
        assert torch.equal(y, want)


def gathered(q: Any, kv: Any, index: Any) -> Any:
    """What `attention` computes, in float64: rows that are not there are zero."""
    there = (index >= 0) & (index < kv.shape[0])
    picked = torch.where(there[..., None], kv[index.clamp(0, kv.shape[0] - 1).long()], 0).double()
    weights = q.double() @ picked.mT + (index < 0)[:, None, :]
    return weights @ picked[..., :64]


@pytest.mark.parametrize("top, mask, stages", [(192, False, 2), (1990, True, 2), (4096, False, 3)], ids=str)
def test_gathered_rows(top: int, mask: bool, stages: int):
    """Small integers, whose sums are exact: rows again and again, and rows that are not there."""
    draw = torch.Generator("cuda").manual_seed(1)
    q, kv = (
        torch.randint(-1, 2, s, device="cuda", generator=draw).to(torch.bfloat16)
        for s in ((64, 96), (900, 96))
    )
    index = torch.randint(-20, 920, (2, top), device="cuda", generator=draw, dtype=torch.int32)
    made = tilescale.compile(attention(top, mask, stages, rows=900), target="cuda")
    assert "ts::cp_async<16>(&kv" in made.get_kernel_source("cuda")
    want = gathered(q, kv, index)
    for _ in range(100):
        o = torch.full((2, 64, 64), float("nan"), device="cuda")
        made(q, kv, index, o)
        assert torch.equal(o.double(), want)
