"""The plain GEMM as a tile program: what Hopper's tests and benchmark compile."""

from __future__ import annotations

from typing import Any

import tilescale.language as T


def gemm(
    M: int, N: int, K: int, BM: int = 128, BN: int = 256, BK: int = 64, stages: int = 4, threads: int = 256, dtype: str = "bfloat16",
    out: str = "", trans_a: bool = False, trans_b: bool = False, panel: int = 0,
) -> Any:  # fmt: skip
    """C = op(A) · op(B), A (M, K) or (K, M), B (K, N) or (N, K), C (M, N) of ``out``, the operands' dtype without; summed in float32.
    ``panel``: blocks in panels of so many rows (T.use_swizzle)."""
    a_shape, b_shape = ((K, M) if trans_a else (M, K)), ((N, K) if trans_b else (K, N))
    a_tile, b_tile = ((BK, BM) if trans_a else (BM, BK)), ((BN, BK) if trans_b else (BK, BN))

    @T.prim_func
    def gemm(A: T.Tensor(a_shape, dtype), B: T.Tensor(b_shape, dtype), C: T.Tensor((M, N), out or dtype)):
        with T.Kernel(T.ceildiv(N, BN), T.ceildiv(M, BM), threads=threads) as (bx, by):
            T.use_swizzle(panel, enable=panel > 0)
            a, b = T.alloc_shared(a_tile, dtype), T.alloc_shared(b_tile, dtype)
            acc = T.alloc_fragment((BM, BN), "float32")
            T.clear(acc)
            for k in T.Pipelined(T.ceildiv(K, BK), num_stages=stages):
                if trans_a:
                    T.copy(A[k * BK, by * BM], a)
                else:
                    T.copy(A[by * BM, k * BK], a)
                if trans_b:
                    T.copy(B[bx * BN, k * BK], b)
                else:
                    T.copy(B[k * BK, bx * BN], b)
                T.gemm(a, b, acc, transpose_A=trans_a, transpose_B=trans_b)
            T.copy(acc, C[by * BM, bx * BN])

    return gemm
