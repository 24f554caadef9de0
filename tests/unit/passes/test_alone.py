"""Products of a kernel without a producer: wgmma where they are large enough, behind a proxy fence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.unit.cuda.emulated import agree, data, empty, lowered
from tilescale.compiler.cuda.printer import print_kernel

GATHERED = {
    "Q": data((64, 64), "float16", 1),
    "KV": data((256, 64), "float16", 2),
    "At": data((128,), "int32", 3) % 256,
    "O": empty((64, 64), "float32"),
}


def text(kernel: Any) -> str:
    return print_kernel(lowered(kernel).kernel).text


def gathered(threads: int, policy: Any, more: bool = False) -> Any:
    """Rows that an index names come by threads. ``more``: a second product into the same sums, of 8 numbers, which
    wgmma has none of."""

    @T.prim_func
    def kernel(
        Q: T.Tensor((64, 64), "float16"),
        KV: T.Tensor((256, 64), "float16"),
        At: T.Tensor((128,), "int32"),
        O: T.Tensor((64, 64), "float32"),
    ):
        with T.Kernel(1, threads=threads):
            q, kv = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            o = T.alloc_fragment((64, 64), "float32")
            T.copy(Q, q)
            T.clear(o)
            for k in T.serial(2):
                for i, j in T.Parallel(64, 64):
                    kv[i, j] = KV[At[k * 64 + i], j]
                T.gemm(q, kv, o, transpose_B=True, policy=policy)
                if more:
                    T.gemm(q[:, :8], kv[:, :8], o, transpose_B=True, policy=policy)
            T.copy(o, O)

    return kernel


@pytest.mark.parametrize("threads", [128, 256])
@pytest.mark.parametrize("policy", list(T.GemmWarpPolicy))
def test_rows_that_threads_gather_are_multiplied_by_wgmma(threads: int, policy: Any):
    """On two warpgroups the 64 rows are cut along the columns, whatever the policy: nobody would compute beside
    the one that has them all."""
    kernel = gathered(threads, policy)
    said = text(kernel)
    assert f"wgmma_m64n{64 // (threads // 128)}k16_f16_00" in said and "fence_proxy_async" in said
    assert "ts::mma_" not in said
    agree(kernel, GATHERED)


def test_sums_are_made_by_one_kind_of_instruction():
    said = text(gathered(128, T.GemmWarpPolicy.Square, more=True))
    assert "wgmma" not in said and "ts::mma_" in said
    agree(gathered(128, T.GemmWarpPolicy.Square, more=True), GATHERED)


def whole(shape: tuple[int, ...], seed: int) -> Any:
    """Small whole numbers, whose sums are exact in any order."""
    return np.random.default_rng(seed).integers(-2, 3, shape).astype("float16")


def mixed(rows: int) -> Any:
    """A gradient's products: two by tiles of 128 rows, and one of few rows, of the tile that the others read."""

    @T.prim_func
    def kernel(
        K: T.Tensor((128, 64), "float16"),
        Q: T.Tensor((512, 64), "float16"),
        S: T.Tensor((512, 128), "float32"),
        D: T.Tensor((512, 64), "float32"),
    ):
        with T.Kernel(1, threads=256):
            k, q, s_cast = (
                T.alloc_shared((128, 64), "float16"),
                T.alloc_shared((rows, 64), "float16"),
                T.alloc_shared((128, rows), "float16"),
            )
            s, d = T.alloc_fragment((128, rows), "float32"), T.alloc_fragment((rows, 64), "float32")
            T.copy(K, k)
            for i in T.Pipelined(512 // rows, num_stages=2):
                T.copy(Q[i * rows, 0], q)
                T.clear(s)
                T.gemm(k, q, s, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                T.gemm(k, q, s, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                T.copy(s, s_cast)
                T.clear(d)
                T.gemm(s_cast, k, d, transpose_A=True)
                for a, b in T.Parallel(rows, 64):
                    T.atomic_add(D[i * rows + a, b], d[a, b])
                for a, b in T.Parallel(128, rows):
                    S[i * rows + b, a] = s[a, b]

    return kernel


def test_a_product_of_few_rows_keeps_no_producer_away():
    """It is left to mma.sync, which reads what TMA brought."""
    kernel, seen = mixed(32), {}
    said = text(kernel)
    for word in ("tma_load", "ts::wgmma_m64n32k16_f16_00", "ts::mma_m16n8k16_f16"):
        seen[word] = word in said
    assert all(seen.values()), seen
    agree(
        kernel,
        {
            "K": whole((128, 64), 1),
            "Q": whole((512, 64), 2),
            "S": empty((512, 128), "float32"),
            "D": empty((512, 64), "float32"),
        },
    )
