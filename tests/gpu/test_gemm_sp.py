"""T.gemm_sp by wgmma.sp on a Hopper GPU, against float64; every launch gives the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilescale
from tests.gpu.device import to_gpu
from tests.gpu.gemms import sparse_gemm, sparse_operand
from tests.unit.cuda.emulated import data
from tilescale.compiler.sim import numerics

torch: Any = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]

TILE = {"BM": 128, "BN": 128, "BK": 128, "threads": 256}
#: (M, N, K), options of the kernel
CASES: list[tuple[tuple[int, int, int], dict[str, Any]]] = [
    ((512, 384, 1024), {}),
    (
        (200, 264, 1152),
        {"dtype": "bfloat16", "BK": 256, "stages": 2},
    ),  # the last tile's places are zeros, like its numbers
    ((256, 256, 512), {"trans_b": True, "places": "uint8"}),
    ((256, 256, 512), {"trans_a": True, "places": "int32"}),
    (
        (256, 256, 512),
        {"trans_a": True, "trans_b": True, "dtype": "bfloat16", "out": "bfloat16", "sums": "float32"},
    ),
    ((384, 384, 1024), {"BM": 192, "BN": 192, "threads": 384, "stages": 2, "trans_b": True}),
    (
        (1024, 512, 4096),
        {
            "BM": 256,
            "trans_b": True,
            "cluster": (1, 2),
            "dtype": "bfloat16",
            "out": "bfloat16",
            "sums": "float32",
        },
    ),
    ((512, 512, 1024), {"BN": 256, "stages": 2, "cluster": (1, 2), "panel": 4}),
    ((64, 64, 256), {"BM": 64, "BN": 64, "threads": 128, "BK": 256}),
    (
        (1000, 1288, 1152),
        {
            "BN": 256,
            "stages": 2,
            "trans_b": True,
            "blocks": 6,
            "cluster": 2,
            "panel": 4,
            "dtype": "bfloat16",
            "out": "bfloat16",
            "sums": "float32",
        },
    ),
    ((256, 256, 1024), {"dtype": "float8_e4m3fn", "trans_b": True, "places": "uint32"}),
    (
        (256, 256, 1024),
        {"dtype": "float8_e5m2", "right": "float8_e4m3fn", "trans_b": True, "places": "uint8"},
    ),
    ((256, 256, 1024), {"dtype": "int8", "trans_b": True, "out": "int32"}),
    (
        (256, 256, 1024),
        {"dtype": "uint8", "right": "int8", "trans_b": True, "out": "int32", "BK": 256, "places": "uint16"},
    ),
]


@pytest.mark.parametrize("shape, options", CASES, ids=str)
def test_products(shape: tuple[int, int, int], options: dict[str, Any]):
    M, N, K = shape
    options = {**TILE, **options}
    dtype, out = options.get("dtype", "float16"), options.get("out", "float32")
    whole, kept, where = sparse_operand(M, K, dtype, options.get("places", "int16"))
    b = data((N, K) if options.get("trans_b") else (K, N), options.get("right", dtype), 2)
    kept = np.ascontiguousarray(kept.T) if options.get("trans_a") else kept
    made = tilescale.compile(sparse_gemm(M, N, K, **options), target="cuda")
    assert "ts::wgmma_sp_m64" in made.get_kernel_source("cuda")
    first, c = (torch.full((M, N), -1, device="cuda", dtype=getattr(torch, out)) for _ in range(2))
    args = [to_gpu(x) for x in (kept, where, b)]
    made(*args, first)
    y = numerics.decode(b, str(b.dtype)).astype(np.float64)
    x, y = numerics.decode(whole, str(whole.dtype)).astype(np.float64), y.T if options.get("trans_b") else y
    got, want, size = first.double().cpu().numpy(), x @ y, np.abs(x) @ np.abs(y)
    # sums of products in float32; of 8-bit floats as tests/gpu/test_dtypes.py says
    unit = {"float32": 2.0**-24 * 8 * K**0.5, "bfloat16": 2.0**-8, "int32": 0.0}[out]
    unit = max(unit, 2.0**-10) if dtype.startswith("float8") else unit
    assert (np.abs(got - want) <= unit * size + 1e-6 * (out != "int32")).all(), np.abs(got - want).max()
    for _ in range(20):
        c.fill_(-1)
        made(*args, c)
        assert torch.equal(c, first)
