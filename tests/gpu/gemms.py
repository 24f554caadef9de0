"""The plain GEMM as a tile program: what Hopper's tests and benchmark compile."""

from __future__ import annotations

from typing import Any

import numpy as np

import tilescale.language as T
from tilescale.compiler.sim import numerics


def gemm(
    M: int, N: int, K: int, BM: int = 128, BN: int = 256, BK: int = 64, stages: int = 4, threads: int = 256, dtype: str = "bfloat16",
    out: str = "", trans_a: bool = False, trans_b: bool = False, panel: int = 0, blocks: int = 0, right: str = "", precision: str = "",
    cluster: Any = 1,
) -> Any:  # fmt: skip
    """C = op(A) · op(B), A (M, K) or (K, M), B (K, N) or (N, K), C (M, N) of ``out``, the operands' dtype without; summed in float32,
    integers in int32. ``right``: B's dtype where it is another. ``precision``: T.gemm's.
    ``panel``: blocks in panels of so many rows (T.use_swizzle). ``blocks``: so many blocks that stay and take one tile after another, in
    panels of ``panel`` rows too. ``cluster``: blocks of a cluster, (x, y) or x; those that stay have their rows side by side."""
    if blocks:
        return _persistent(M, N, K, BM, BN, BK, stages, threads, dtype, out or dtype, trans_b, max(1, panel), blocks, cluster)
    a_shape, b_shape = ((K, M) if trans_a else (M, K)), ((N, K) if trans_b else (K, N))
    sums = "int32" if "int" in dtype else "float32"
    a_tile, b_tile = ((BK, BM) if trans_a else (BM, BK)), ((BN, BK) if trans_b else (BK, BN))

    @T.prim_func
    def gemm(A: T.Tensor(a_shape, dtype), B: T.Tensor(b_shape, right or dtype), C: T.Tensor((M, N), out or dtype)):
        with T.Kernel(T.ceildiv(N, BN), T.ceildiv(M, BM), threads=threads, cta_cluster=cluster) as (bx, by):
            T.use_swizzle(panel, enable=panel > 0)
            a, b = T.alloc_shared(a_tile, dtype), T.alloc_shared(b_tile, right or dtype)
            acc = T.alloc_fragment((BM, BN), sums)
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
                T.gemm(a, b, acc, transpose_A=trans_a, transpose_B=trans_b, precision=precision)
            T.copy(acc, C[by * BM, bx * BN])

    return gemm


def _persistent(
    M: int, N: int, K: int, BM: int, BN: int, BK: int, stages: int, threads: int, dtype: str, out: str, trans_b: bool, panel: int, blocks: int,
    cluster: int,
) -> Any:  # fmt: skip
    b_shape, b_tile = ((N, K) if trans_b else (K, N)), ((BN, BK) if trans_b else (BK, BN))
    high, wide, panel = -(-M // (BM * cluster)), -(-N // BN), max(1, panel // cluster)

    @T.prim_func
    def gemm(A: T.Tensor((M, K), dtype), B: T.Tensor(b_shape, dtype), C: T.Tensor((M, N), out)):
        with T.Kernel(blocks, threads=threads, cta_cluster=cluster) as block:
            a, b = T.alloc_shared((BM, BK), dtype), T.alloc_shared(b_tile, dtype)
            acc = T.alloc_fragment((BM, BN), "float32")
            for tile in T.Persistent(high * wide, blocks // cluster, block // cluster):
                first = tile // (wide * panel) * panel
                rows = T.min(high - first, panel)
                row = (first + (tile - first * wide) % rows) * cluster + block % cluster
                col = (tile - first * wide) // rows
                T.clear(acc)
                for k in T.Pipelined(T.ceildiv(K, BK), num_stages=stages):
                    T.copy(A[row * BM, k * BK], a)
                    if trans_b:
                        T.copy(B[col * BN, k * BK], b)
                    else:
                        T.copy(B[k * BK, col * BN], b)
                    T.gemm(a, b, acc, transpose_B=trans_b)
                T.copy(acc, C[row * BM, col * BN])

    return gemm


def sparse_gemm(
    M: int, N: int, K: int, BM: int = 64, BN: int = 64, BK: int = 64, stages: int = 3, threads: int = 64, dtype: str = "float16",
    out: str = "float32", places: str = "int16", trans_a: bool = False, trans_b: bool = False, panel: int = 0, cluster: Any = 1,
    sums: str = "", right: str = "", blocks: int = 0,
) -> Any:  # fmt: skip
    """C = A · op(B) for A (M, K) with two numbers in each four: what it keeps (M, K / 2) or (K / 2, M), and where that is. ``sums``: the
    accumulator's dtype where it is not C's. ``right``: B's where it is not A's. ``panel``, ``cluster``, ``blocks``: as in `gemm`, where
    blocks that stay take A as (M, K / 2) and B as (N, K)."""
    if blocks:
        return _sparse_persistent(M, N, K, BM, BN, BK, stages, threads, dtype, out, places, max(1, panel), blocks, sums or out, cluster)
    each = {"uint8": 8, "int16": 16, "uint16": 16, "int32": 32, "uint32": 32}[places]
    half = BK // 2

    @T.prim_func
    def gemm(
        A: T.Tensor((K // 2, M) if trans_a else (M, K // 2), dtype), E: T.Tensor((M, K // each), places),
        B: T.Tensor((N, K) if trans_b else (K, N), right or dtype), C: T.Tensor((M, N), out),
    ):  # fmt: skip
        with T.Kernel(T.ceildiv(N, BN), T.ceildiv(M, BM), threads=threads, cta_cluster=cluster) as (bx, by):
            T.use_swizzle(panel, enable=panel > 0)
            a, e = T.alloc_shared((half, BM) if trans_a else (BM, half), dtype), T.alloc_shared((BM, BK // each), places)
            b = T.alloc_shared((BN, BK) if trans_b else (BK, BN), right or dtype)
            acc = T.alloc_fragment((BM, BN), sums or out)
            T.clear(acc)
            for k in T.Pipelined(T.ceildiv(K, BK), num_stages=stages):
                if trans_a:
                    T.copy(A[k * half, by * BM], a)
                else:
                    T.copy(A[by * BM, k * half], a)
                T.copy(E[by * BM, k * (BK // each)], e)
                if trans_b:
                    T.copy(B[bx * BN, k * BK], b)
                else:
                    T.copy(B[k * BK, bx * BN], b)
                T.gemm_sp(a, e, b, acc, transpose_A=trans_a, transpose_B=trans_b)
            T.copy(acc, C[by * BM, bx * BN])

    return gemm


def _sparse_persistent(
    M: int, N: int, K: int, BM: int, BN: int, BK: int, stages: int, threads: int, dtype: str, out: str, places: str, panel: int, blocks: int,
    sums: str, cluster: int,
) -> Any:  # fmt: skip
    each = {"uint8": 8, "int16": 16, "uint16": 16, "int32": 32, "uint32": 32}[places]
    high, wide, panel = -(-M // (BM * cluster)), -(-N // BN), max(1, panel // cluster)

    @T.prim_func
    def gemm(A: T.Tensor((M, K // 2), dtype), E: T.Tensor((M, K // each), places), B: T.Tensor((N, K), dtype), C: T.Tensor((M, N), out)):
        with T.Kernel(blocks, threads=threads, cta_cluster=cluster) as block:
            a, e, b = T.alloc_shared((BM, BK // 2), dtype), T.alloc_shared((BM, BK // each), places), T.alloc_shared((BN, BK), dtype)
            acc = T.alloc_fragment((BM, BN), sums)
            for tile in T.Persistent(high * wide, blocks // cluster, block // cluster):
                first = tile // (wide * panel) * panel
                rows = T.min(high - first, panel)
                row = (first + (tile - first * wide) % rows) * cluster + block % cluster
                col = (tile - first * wide) // rows
                T.clear(acc)
                for k in T.Pipelined(T.ceildiv(K, BK), num_stages=stages):
                    T.copy(A[row * BM, k * (BK // 2)], a)
                    T.copy(E[row * BM, k * (BK // each)], e)
                    T.copy(B[col * BN, k * BK], b)
                    T.gemm_sp(a, e, b, acc, transpose_B=True)
                T.copy(acc, C[row * BM, col * BN])

    return gemm


def sparse_operand(M: int, K: int, dtype: str, places: str, seed: int = 0) -> tuple[Any, Any, Any]:
    """A random matrix with two numbers in each four of a row, as a whole (M, K), what it keeps (M, K / 2), and where that is."""
    draw = np.random.default_rng(seed)
    pairs = np.array([(p, q) for p in range(4) for q in range(p + 1, 4)])[draw.integers(0, 6, (M, K // 4))]
    numbers = draw.integers(-5, 6, (M, K // 4, 2)) if "int" in dtype else draw.standard_normal((M, K // 4, 2))
    kept = numerics.encode(numbers.reshape(M, K // 2).astype(np.int64 if "int" in dtype else np.float64), dtype)
    whole = np.zeros((M, K // 4, 4), kept.dtype)
    np.put_along_axis(whole, pairs, kept.reshape(M, K // 4, 2), axis=-1)
    each = {"8": 2, "16": 4, "32": 8}[places.lstrip("uint")]
    four = (pairs[..., 0] | pairs[..., 1] << 2).reshape(M, -1, each).astype(np.uint64)
    words = np.bitwise_or.reduce(four << (np.arange(each, dtype=np.uint64) * np.uint64(4)), axis=-1)
    return whole.reshape(M, K), kept, words.astype(f"u{each // 2}").view(places)
