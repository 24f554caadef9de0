"""A kernel that its author could make faster warns, and runs all the same."""

from __future__ import annotations

import warnings

import pytest
import torch

import tilescale
from tests.gpu.gemms import gemm
from tilescale import PerformanceWarning, advice

SHAPE = {"M": 768, "N": 512, "K": 256, "BM": 128, "BN": 256, "BK": 64, "stages": 2}


def product(threads: int) -> None:
    kernel = tilescale.compile(gemm(**SHAPE, threads=threads), target="cuda")
    a, b = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in ((768, 256), (256, 512)))
    c = torch.empty(768, 512, device="cuda", dtype=torch.bfloat16)
    kernel(a, b, c)
    torch.testing.assert_close(c, a @ b, rtol=2e-2, atol=2e-1)


def test_a_slow_kernel_warns_and_is_right(monkeypatch: pytest.MonkeyPatch):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma needs Hopper")
    monkeypatch.setattr(advice, "_registry", {})
    with pytest.warns(PerformanceWarning, match="smaller tiles"):
        product(128)


@pytest.mark.parametrize("threads", [256, 384])
def test_what_wgmma_can_share_does_not_warn(threads: int):
    with warnings.catch_warnings():
        warnings.simplefilter("error", PerformanceWarning)
        product(threads)
