"""Extents of zero on a Hopper GPU: loops without a round, and tensor maps of tensors that have no
elements."""

from __future__ import annotations

from typing import Any

import pytest

import tilescale
import tilescale.language as T
from tests.gpu.gemms import gemm
from tests.unit.cuda.test_hopper import ROWS, summed

torch: Any = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]
OPTIONS = [{}, {"blocks": 2}, {"cluster": 2}]


@T.prim_func
def stored(A: T.Tensor((64, 64), "float16"), C: T.Tensor((ROWS, 64), "float32")):
    with T.Kernel(1, threads=128):
        a, c = T.alloc_shared((64, 64), "float16"), T.alloc_fragment((64, 64), "float32")
        T.clear(c)
        for _ in T.Pipelined(3, num_stages=2):
            T.copy(A, a)
            T.gemm(a, a, c)
        T.copy(c, C[0, 0])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_loop_without_rounds(options: dict[str, Any]):
    k = T.dynamic("k", multiple_of=8)
    made = tilescale.compile(
        gemm(128, 128, k, BM=64, BN=64, BK=32, stages=3, threads=128, out="float32", **options), target="cuda"
    )
    assert "ts::wgmma_m64" in made.get_kernel_source()
    for k in (72, 0, 8, 0, 104):
        a, b = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in ((128, k), (k, 128)))
        c = torch.full((128, 128), 7.0, device="cuda")
        made(a, b, c)
        assert torch.allclose(c.double(), a.double() @ b.double(), atol=1e-3), k


def test_maps_of_nothing():
    """Rounds over a tensor without rows add zeros, also behind a kernel that stores outside one."""
    total, store = tilescale.compile(summed, target="cuda"), tilescale.compile(stored, target="cuda")
    assert "ts::tma_load" in total.get_kernel_source() and "ts::tma_store" in store.get_kernel_source()
    a, nothing = (
        torch.randn(64, 64, device="cuda", dtype=torch.float16),
        torch.empty(0, 64, device="cuda", dtype=torch.float16),
    )
    for rounds in (0, 3):
        c = torch.full((64, 64), 7.0, device="cuda")
        total(nothing, c, rounds)
        assert (c == 1).all(), rounds
        store(a, torch.empty(0, 64, device="cuda"))
    c = torch.empty(64, 64, device="cuda")
    store(a, c)
    assert torch.allclose(c.double(), 3 * a.double() @ a.double(), atol=1e-2)
    torch.cuda.synchronize()
