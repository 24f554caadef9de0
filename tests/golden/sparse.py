"""A product of an operand with two numbers in each four, whose printed code is compared."""

from __future__ import annotations

import tilescale.language as T


@T.prim_func
def sparse_gemm(
    A: T.Tensor((256, 128), "float16"),
    E: T.Tensor((256, 16), "int16"),
    B: T.Tensor((128, 256), "float16"),
    C: T.Tensor((256, 128), "float16"),
):
    with T.Kernel(2, 2, threads=128) as (bx, by):
        a, e, b = (
            T.alloc_shared((128, 64), "float16"),
            T.alloc_shared((128, 8), "int16"),
            T.alloc_shared((64, 128), "float16"),
        )
        acc = T.alloc_fragment((128, 64), "float32")
        T.clear(acc)
        for k in T.Pipelined(2, num_stages=2):
            T.copy(A[by * 128, k * 64], a)
            T.copy(E[by * 128, k * 8], e)
            T.copy(B[bx * 64, k * 128], b)
            T.gemm_sp(a, e, b, acc, transpose_B=True)
        T.copy(acc, C[by * 128, bx * 64])
