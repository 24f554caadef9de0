"""The kernels of tilescale.ops for several ranks on the emulated Hopper GPU, as they are printed for TMA,
mbarriers, wgmma and the peers' addresses, against the simulator."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tests.unit.cuda.emulated import agree_on_ranks, data, empty
from tilescale.compiler import driver
from tilescale.ops.ranks import flat_kernels, gather_gemm

FLAT = {"P": 64, "blocks": 2, "threads": 64}


def zeros(*shape: int) -> Any:
    return np.zeros(shape, np.int64)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("world, n, m", [(2, 320, 320), (3, 44, 20)])
def test_gather(world: int, n: int, m: int, direct: bool):
    kernel = flat_kernels.gather(world=world, dtype="int32", align=4, direct=direct, **FLAT)
    args = []
    for r in range(world):
        given = {
            "A": data((n if r < world - 1 else m,), "int32", r),
            "G": empty((world, n), "int32"),
            "arrived": zeros(world, 2),
        }
        args.append(given if direct else {**given, "C": empty((world, n), "int32")})
    agree_on_ranks(kernel, args)


@pytest.mark.parametrize(
    "world, M, bias", [(2, 128, False), (3, 100, True), (3, 2, False)], ids=["whole", "ragged", "few"]
)
def test_gather_gemm(world: int, M: int, bias: bool):
    N, K = 72, 136
    cut = {
        "BM": 64,
        "BN": 64,
        "BK": 64,
        "stages": 2,
        "threads": 128,
        "blocks": 2,
        "panel": 2,
        "high": 32,
        "wide": 64,
    }
    what = {
        "dtype": "bfloat16",
        "out": "bfloat16",
        "trans_b": False,
        "bias": bias,
        "activation": "relu" if bias else "",
    }
    kernel = gather_gemm.gather_gemm(M=M, N=N, K=K, world=world, **cut, **what)
    each = -(-M // world)
    args = [
        {
            "A": data((max(0, min(each, M - r * each)), K), "bfloat16", r),
            "X": empty((M, K), "bfloat16"),
            "W": data((K, N), "bfloat16", 9 + r),
            "add": data((N if bias else 1,), "bfloat16", 20 + r),
            "here": zeros(math.ceil(M / 64)),
            "C": empty((M, N), "bfloat16"),
        }
        for r in range(world)
    ]
    agree_on_ranks(kernel, args)


def test_gather_gemm_is_fetched_by_tma_and_multiplied_by_wgmma_at_full_size():
    for M, N, K, world in ((8192, 2560, 8192, 4), (5000, 1000, 1000, 3)):
        how = vars(gather_gemm.choose(M, N, K, world, "bfloat16")) | {"M": M, "N": N, "K": K, "world": world}
        assert how.pop("fused")
        what = {"dtype": "bfloat16", "out": "bfloat16", "trans_b": False, "bias": False, "activation": ""}
        made = driver.lower(gather_gemm.gather_gemm(**how, **what).trace(), "cuda:sm_90a")
        assert not [n for n in made.program.notes if "without" in n or "in turn" in n], made.program.notes
        code = driver.source_text(gather_gemm.gather_gemm(**how, **what).trace(), "cuda", "cuda:sm_90a")
        producer = code[code.index("ts::fewer_registers") : code.index("ts::more_registers")]
        assert "ts::wait<true>" in producer and "ts::tma_load(&x[" in producer and "ts::wgmma_m64n" in code
