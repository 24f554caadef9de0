"""The plain GEMM as a tile program: what Hopper's tests and benchmark compile."""

from __future__ import annotations

from typing import Any

import numpy as np

import tilescale.language as T
from tilescale.compiler.sim import numerics

#: bits of an element of what says where a sparse operand's numbers stand, per dtype
PLACES = {"uint8": 8, "int16": 16, "uint16": 16, "int32": 32, "uint32": 32}


def gemm(
    M: int,
    N: int,
    K: int,
    BM: int = 128,
    BN: int = 256,
    BK: int = 64,
    stages: int = 4,
    threads: int = 256,
    dtype: str = "bfloat16",
    out: str = "",
    trans_a: bool = False,
    trans_b: bool = False,
    panel: int = 0,
    blocks: int = 0,
    right: str = "",
    precision: str = "",
    cluster: Any = 1,
) -> Any:
    """C = op(A) · op(B), A (M, K) or (K, M), B (K, N) or (N, K), C (M, N) of ``out``, the operands' dtype
    without; summed in float32, integers in int32. ``right``: B's dtype where it is another. ``precision``:
    T.gemm's. ``panel``: blocks in panels of so many rows (T.use_swizzle). ``blocks``: so many blocks that
    stay and take one tile after another, in panels of ``panel`` rows too. ``cluster``: blocks of a cluster,
    (x, y) or x; those that stay have their rows side by side."""
    body = _body(
        M,
        N,
        K,
        (BM, BN, BK),
        stages,
        threads,
        (dtype, right or dtype),
        "int32" if "int" in dtype else "float32",
        trans_a,
        trans_b,
        panel,
        blocks,
        cluster,
        precision,
    )
    a_shape, b_shape = ((K, M) if trans_a else (M, K)), ((N, K) if trans_b else (K, N))

    @T.prim_func
    def gemm(
        A: T.Tensor(a_shape, dtype), B: T.Tensor(b_shape, right or dtype), C: T.Tensor((M, N), out or dtype)
    ):
        body(A, None, B, C)

    return gemm


def sparse_gemm(
    M: int,
    N: int,
    K: int,
    BM: int = 64,
    BN: int = 64,
    BK: int = 64,
    stages: int = 3,
    threads: int = 64,
    dtype: str = "float16",
    out: str = "float32",
    places: str = "int16",
    trans_a: bool = False,
    trans_b: bool = False,
    panel: int = 0,
    cluster: Any = 1,
    sums: str = "",
    right: str = "",
    blocks: int = 0,
) -> Any:
    """C = A · op(B) for A (M, K) with two numbers in each four: what it keeps (M, K / 2) or (K / 2, M), and
    where that is. ``sums``: the accumulator's dtype where it is not C's. ``right``: B's where it is not A's.
    ``panel``, ``cluster``, ``blocks``: as in `gemm`."""
    body = _body(
        M,
        N,
        K,
        (BM, BN, BK),
        stages,
        threads,
        (dtype, right or dtype),
        sums or out,
        trans_a,
        trans_b,
        panel,
        blocks,
        cluster,
        places=places,
    )
    a_shape, b_shape = ((K // 2, M) if trans_a else (M, K // 2)), ((N, K) if trans_b else (K, N))

    @T.prim_func
    def gemm(
        A: T.Tensor(a_shape, dtype),
        E: T.Tensor((M, K // PLACES[places]), places),
        B: T.Tensor(b_shape, right or dtype),
        C: T.Tensor((M, N), out),
    ):
        body(A, E, B, C)

    return gemm


def _body(
    M: int,
    N: int,
    K: int,
    tile: tuple[int, int, int],
    stages: int,
    threads: int,
    dtypes: tuple[str, str],
    sums: str,
    trans_a: bool,
    trans_b: bool,
    panel: int,
    blocks: int,
    cluster: Any,
    precision: str = "",
    places: str = "",
) -> Any:
    """A launch of A, E, B and C; of a whole operand ``places`` is empty and E None."""
    BM, BN, BK = tile
    deep, far = (BK // 2, BK // PLACES[places]) if places else (BK, 1)  # a tile of A, and of E, along k

    @T.macro
    def tiles() -> Any:
        a = T.alloc_shared((deep, BM) if trans_a else (BM, deep), dtypes[0])
        e = T.alloc_shared((BM, far), places) if places else None
        b = T.alloc_shared((BN, BK) if trans_b else (BK, BN), dtypes[1])
        return a, e, b, T.alloc_fragment((BM, BN), sums)

    @T.macro
    def product(A: Any, E: Any, B: Any, C: Any, a: Any, e: Any, b: Any, acc: Any, row: Any, col: Any) -> None:
        T.clear(acc)
        for k in T.Pipelined(T.ceildiv(K, BK), num_stages=stages):
            if trans_a:
                T.copy(A[k * deep, row * BM], a)
            else:
                T.copy(A[row * BM, k * deep], a)
            if places:
                T.copy(E[row * BM, k * far], e)
            if trans_b:
                T.copy(B[col * BN, k * BK], b)
            else:
                T.copy(B[k * BK, col * BN], b)
            if places:
                T.gemm_sp(a, e, b, acc, transpose_A=trans_a, transpose_B=trans_b)
            else:
                T.gemm(a, b, acc, transpose_A=trans_a, transpose_B=trans_b, precision=precision)
        T.copy(acc, C[row * BM, col * BN])

    @T.macro
    def in_turn(A: Any, E: Any, B: Any, C: Any) -> None:
        with T.Kernel(T.ceildiv(N, BN), T.ceildiv(M, BM), threads=threads, cta_cluster=cluster) as (bx, by):
            T.use_swizzle(panel, enable=panel > 0)
            a, e, b, acc = tiles()
            product(A, E, B, C, a, e, b, acc, by, bx)

    @T.macro
    def staying(A: Any, E: Any, B: Any, C: Any) -> None:
        high, wide, rows_each = -(-M // (BM * cluster)), -(-N // BN), max(1, max(1, panel) // cluster)
        with T.Kernel(blocks, threads=threads, cta_cluster=cluster) as block:
            a, e, b, acc = tiles()
            for tile in T.Persistent(high * wide, blocks // cluster, block // cluster):
                first = tile // (wide * rows_each) * rows_each
                rows = T.min(high - first, rows_each)
                row = (first + (tile - first * wide) % rows) * cluster + block % cluster
                col = (tile - first * wide) // rows
                product(A, E, B, C, a, e, b, acc, row, col)

    return staying if blocks else in_turn


def sparse_operand(M: int, K: int, dtype: str, places: str, seed: int = 0) -> tuple[Any, Any, Any]:
    """A random matrix with two numbers in each four of a row, as a whole (M, K), what it keeps (M, K / 2),
    and where that is."""
    draw = np.random.default_rng(seed)
    pairs = np.array([(p, q) for p in range(4) for q in range(p + 1, 4)])[draw.integers(0, 6, (M, K // 4))]
    numbers = draw.integers(-5, 6, (M, K // 4, 2)) if "int" in dtype else draw.standard_normal((M, K // 4, 2))
    kept = numerics.encode(
        numbers.reshape(M, K // 2).astype(np.int64 if "int" in dtype else np.float64), dtype
    )
    whole = np.zeros((M, K // 4, 4), kept.dtype)
    np.put_along_axis(whole, pairs, kept.reshape(M, K // 4, 2), axis=-1)
    each = {"8": 2, "16": 4, "32": 8}[places.lstrip("uint")]
    four = (pairs[..., 0] | pairs[..., 1] << 2).reshape(M, -1, each).astype(np.uint64)
    words = np.bitwise_or.reduce(four << (np.arange(each, dtype=np.uint64) * np.uint64(4)), axis=-1)
    return whole.reshape(M, K), kept, words.astype(f"u{each // 2}").view(places)
