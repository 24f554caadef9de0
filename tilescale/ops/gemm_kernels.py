"""The tile programs of ``matmul``: a block for each tile, blocks that stay, blocks that share tiles
(stream-K), and the sum of shares of k.

In all of them ``M`` is the number of rows, or None: then one kernel serves every number (`T.dynamic`), as it
may where A's rows lie one behind another. Sums are float32, and their order follows from the shape and the
configuration alone.
"""

from __future__ import annotations

from typing import Any

import tilescale.language as T
from tilescale.ops.activations import RUN, activated, is_short

#: of a tile of Cᵀ: C's rows beyond which it leaves through shared memory, by so many of C's columns. Eight
#: lanes of a warp hold neighbours of a row of C: 16 bytes of 32 that memory writes at once, all 32 where they
#: are float32
WHOLE, PART = 64, 64


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def operands(
    M: Any, N: int, K: int, trans_a: bool, trans_b: bool, align_a: int = 1, align_b: int = 1
) -> tuple[tuple[Any, Any], tuple[int, int]]:  # fmt: skip
    """The shapes of A (M, K) and B (K, N), or of their transposes. align_a, align_b: what rows are filled up
    to multiples of."""
    (a_rows, a_row), (b_rows, b_row) = ((K, M) if trans_a else (M, K)), ((N, K) if trans_b else (K, N))
    return (a_rows, filled(a_row, align_a) if align_a > 1 else a_row), (b_rows, filled(b_row, align_b))


def filled(extent: int, align: int) -> int:
    """The next multiple."""
    return ceil_div(extent, align) * align


@T.macro
def load(A: Any, B: Any, a: Any, b: Any, row: Any, col: Any, at: Any, trans_a: bool, trans_b: bool):
    """The tiles of A and B from step ``at`` of k on, for C's tile at (row, col)."""
    if trans_a:
        T.copy(A[at, row], a)
    else:
        T.copy(A[row, at], a)
    load_b(B, b, col, at, trans_b)


@T.macro
def load_b(B: Any, b: Any, col: Any, at: Any, trans_b: bool):
    """B's alone."""
    if trans_b:
        T.copy(B[col, at], b)
    else:
        T.copy(B[at, col], b)


@T.macro
def multiply(a: Any, b: Any, acc: Any, swap: bool, trans_a: bool, trans_b: bool):
    """acc += op(a) · op(b), or with ``swap`` the transpose of that."""
    if swap:
        T.gemm(b, a, acc, transpose_A=not trans_b, transpose_B=not trans_a)
    else:
        T.gemm(a, b, acc, transpose_A=trans_a, transpose_B=trans_b)


@T.macro
def finish(acc: Any, bias: Any, C: Any, row: Any, col: Any, activation: str, swap: bool):
    """C's tile at (row, col): act(acc + bias)."""
    if bias is not None or activation:
        for i, j in T.Parallel(*acc.shape):
            x = acc[i, j] if bias is None else acc[i, j] + bias[col + (i if swap else j)]
            acc[i, j] = activated(x, activation, is_short(C.dtype))
    if swap and acc.shape[1] > WHOLE and acc.shape[0] % PART == 0 and str(C.dtype) != "float32":
        # Eight neighbours of a column lie in all banks.
        tile = T.alloc_shared((acc.shape[1], PART + 8), C.dtype)
        for part in range(0, acc.shape[0], PART):
            for i, j in T.Parallel(PART, acc.shape[1]):
                tile[j, i] = acc[part + i, j]
            for j, i in T.Parallel(acc.shape[1], PART):
                C[row + j, col + part + i] = tile[j, i]
    elif swap:
        for i, j in T.Parallel(*acc.shape):
            C[row + j, col + i] = acc[i, j]
    elif acc.shape[1] % PART == 0 and C.shape[1] % 8 and str(C.dtype) != "float32":
        # rows that TMA cannot store: neighbouring threads store neighbours of a row
        tile = T.alloc_shared((acc.shape[0], PART + 8), C.dtype)
        for part in range(0, acc.shape[1], PART):
            for i, j in T.Parallel(acc.shape[0], PART):
                tile[i, j] = acc[i, part + j]
            for i, j in T.Parallel(acc.shape[0], PART):
                C[row + i, col + part + j] = tile[i, j]
    else:
        T.copy(acc, C[row, col])


def results(M: Any, N: int, gate: str, kept: bool) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Extents of the product and of what a gate leaves of it; of one number where it is not written."""
    return ((M, N) if kept or not gate else (1,)), ((M, N // 2) if gate else (1,))


@T.macro
def finish_gated(acc: Any, bias: Any, C: Any, Y: Any, row: Any, col: Any, gate: str, kept: bool):
    """Y's tile: act(gate) · up of acc + bias, whose columns come in turn, `RUN` of each. A thread has
    both of a pair: tensor cores leave columns 8 q + c in the same lane for all q. C's tile, where it is
    ``kept``: acc + bias."""
    if bias is not None:
        for i, j in T.Parallel(*acc.shape):
            acc[i, j] += bias[col + j]
    y = T.alloc_fragment((acc.shape[0], acc.shape[1] // 2), "float32")
    for i, j in T.Parallel(*y.shape):
        at = j // RUN * 2 * RUN + j % RUN
        y[i, j] = activated(acc[i, at], gate, True) * acc[i, at + RUN]
    if kept:
        T.copy(acc, C[row, col])
    T.copy(y, Y[row, col // 2])


@T.macro
def panelled(tile: Any, high: Any, wide: Any, panel: int):
    """The row and the column of a tile where tiles are counted down the columns of panels of ``panel`` rows,
    which L2 caches hold."""
    first = tile // (wide * panel) * panel
    height = T.min(high - first, panel)
    return first + (tile - first * wide) % height, (tile - first * wide) // height


# ---- kernels


def product(
    M: int | None,
    N: int,
    K: int,
    BM: int,
    BN: int,
    BK: int,
    stages: int,
    threads: int,
    split: int,
    panel: int,
    swap: bool,
    cluster: int,
    dtype: str,
    out: str,
    trans_a: bool,
    trans_b: bool,
    bias: bool,
    activation: str,
    align_a: int = 1,
    align_b: int = 1,
) -> Any:
    """C = act(op(A) · op(B) + bias): A (M, K) or (K, M), B (K, N) or (N, K), C (M, N) of ``out``, bias (N,)
    of ``out``. Rows of A and B are filled up to multiples of ``align_a`` and ``align_b``, with zeros where
    they are rows of k.

    ``split`` > 1: C is (split, M, N) of float32 instead, each a sum over its share of k, and bias and
    activation are left to `combine`. Its rows are filled up to multiples of four, which TMA can store.
    ``swap``: the block computes its tile of Cᵀ. ``panel``: blocks in panels of so many rows of tiles. The
    ``cluster`` blocks of a cluster have tiles side by side, and fetch A's tile together.
    """
    M = T.dynamic("M") if M is None else M
    a_shape, b_shape = operands(M, N, K, trans_a, trans_b, align_a, align_b)
    a_tile, b_tile = operands(BM, BN, BK, trans_a, trans_b)
    shape = ((M, N) if split == 1 else (split, M, filled(N, 4))), (out if split == 1 else "float32")
    steps = ceil_div(ceil_div(K, BK), split)  # of k, a block

    @T.macro
    def body(A, B, bias, C):
        wide = T.ceildiv(N, BN * cluster) * cluster
        with T.Kernel(wide, T.ceildiv(M, BM), split, threads=threads, cta_cluster=cluster) as (bx, by, bz):
            T.use_swizzle(panel, enable=panel > 0)
            a, b = T.alloc_shared(a_tile, dtype), T.alloc_shared(b_tile, dtype)
            acc = T.alloc_fragment((BN, BM) if swap else (BM, BN), "float32")
            T.clear(acc)
            for k in T.Pipelined(steps, num_stages=stages):
                load(A, B, a, b, by * BM, bx * BN, (bz * steps + k) * BK, trans_a, trans_b)
                multiply(a, b, acc, swap, trans_a, trans_b)
            if split == 1:
                finish(acc, bias, C, by * BM, bx * BN, activation, swap)
            elif swap:
                for i, j in T.Parallel(BN, BM):
                    C[bz, by * BM + j, bx * BN + i] = acc[i, j]
            else:
                T.copy(acc, C[bz, by * BM, bx * BN])

    @T.prim_func
    def gemm(A: T.Tensor(a_shape, dtype), B: T.Tensor(b_shape, dtype), C: T.Tensor(*shape)):
        body(A, B, None, C)

    @T.prim_func
    def gemm_bias(
        A: T.Tensor(a_shape, dtype),
        B: T.Tensor(b_shape, dtype),
        bias: T.Tensor((N,), out),
        C: T.Tensor(*shape),
    ):
        body(A, B, bias, C)

    return gemm_bias if bias and split == 1 else gemm


def persistent(
    M: int | None,
    N: int,
    K: int,
    BM: int,
    BN: int,
    BK: int,
    stages: int,
    threads: int,
    panel: int,
    blocks: int,
    cluster: int,
    dtype: str,
    out: str,
    trans_a: bool,
    trans_b: bool,
    bias: bool,
    activation: str,
    align_a: int = 1,
    align_b: int = 1,
    gate: str = "",
    kept: bool = False,
) -> Any:
    """The same by ``blocks`` blocks that stay and take one tile after another, in panels of ``panel`` rows of
    tiles. The ``cluster`` blocks of a cluster have tiles one below the other, and fetch B's tile together.
    ``gate``: see `finish_gated` and `results`; without a bias its place takes a number."""
    M = T.dynamic("M") if M is None else M
    a_shape, b_shape = operands(M, N, K, trans_a, trans_b, align_a, align_b)
    a_tile, b_tile = operands(BM, BN, BK, trans_a, trans_b)

    @T.macro
    def body(A, B, bias, C, Y):
        with T.Kernel(blocks, threads=threads, cta_cluster=cluster) as block:
            high, wide = T.ceildiv(M, BM * cluster), ceil_div(N, BN)
            a, b = T.alloc_shared(a_tile, dtype), T.alloc_shared(b_tile, dtype)
            acc = T.alloc_fragment((BM, BN), "float32")
            for tile in T.Persistent(high * wide, blocks // cluster, block // cluster):
                pair, col = panelled(tile, high, wide, max(1, panel // cluster))
                row = pair * cluster + block % cluster
                T.clear(acc)
                for k in T.Pipelined(T.ceildiv(K, BK), num_stages=stages):
                    load(A, B, a, b, row * BM, col * BN, k * BK, trans_a, trans_b)
                    multiply(a, b, acc, False, trans_a, trans_b)
                if gate:
                    finish_gated(acc, bias, C, Y, row * BM, col * BN, gate, kept)
                else:
                    finish(acc, bias, C, row * BM, col * BN, activation, False)

    @T.prim_func
    def gemm(A: T.Tensor(a_shape, dtype), B: T.Tensor(b_shape, dtype), C: T.Tensor((M, N), out)):
        body(A, B, None, C, None)

    @T.prim_func
    def gemm_bias(
        A: T.Tensor(a_shape, dtype),
        B: T.Tensor(b_shape, dtype),
        bias: T.Tensor((N,), out),
        C: T.Tensor((M, N), out),
    ):
        body(A, B, bias, C, None)

    c_shape, y_shape = results(M, N, gate, kept)

    @T.prim_func
    def gated(
        A: T.Tensor(a_shape, dtype),
        B: T.Tensor(b_shape, dtype),
        add: T.Tensor((N if bias else 1,), out),
        C: T.Tensor(c_shape, out),
        Y: T.Tensor(y_shape, out),
    ):
        body(A, B, add if bias else None, C, Y)

    if gate:
        return gated
    return gemm_bias if bias else gemm


def streamed(
    M: int | None,
    N: int,
    K: int,
    BM: int,
    BN: int,
    BK: int,
    stages: int,
    threads: int,
    panel: int,
    blocks: int,
    swap: bool,
    dtype: str,
    out: str,
    trans_a: bool,
    trans_b: bool,
    bias: bool,
    activation: str,
) -> Any:
    """Stream-K: the same by ``blocks`` blocks that stay, of which each takes an equal share of the steps of k
    (Osama et al., "Stream-K: Work-centric Parallel Decomposition for Dense Matrix-Matrix Multiplication on
    the GPU", 2023). No more blocks than there are steps.

    The steps of the first tiles, up to two for a block, lie end to end, and each block has as many of them;
    whole waves of the other tiles follow, a tile a block. A block goes through its share from the end. So it
    begins with the front part of a tile, which it leaves in ``P`` (blocks, tile) of float32 and tells of in
    ``ready`` (blocks,), which are zero when the launch begins. It ends with the back part of another tile,
    adds what the blocks before it left of that tile, in their order, and stores it: which sums are taken, and
    in what order, the shape and ``blocks`` decide.

    Order in memory: a block's writes of P[block] come before its store of ready[block], which releases;
    whoever loads 1 from there acquires, and reads P[block] behind that. Progress: a block waits only for what
    blocks of smaller numbers do before they wait for anyone. That comes to pass where blocks start in the
    order of their numbers, and where all are resident, as on a GPU with at least as many multiprocessors.
    """
    M = T.dynamic("M") if M is None else M
    a_shape, b_shape, a_tile, b_tile = (
        *operands(M, N, K, trans_a, trans_b),
        *operands(BM, BN, BK, trans_a, trans_b),
    )
    sums, steps, wide = ((BN, BM) if swap else (BM, BN)), ceil_div(K, BK), ceil_div(N, BN)

    @T.macro
    def body(A, B, bias, P, ready, C):
        with T.Kernel(blocks, threads=threads) as block:
            a, b = T.alloc_shared(a_tile, dtype), T.alloc_shared(b_tile, dtype)
            acc = T.alloc_fragment(sums, "float32")
            high = T.ceildiv(M, BM)
            waves = T.max(high * wide // blocks - 1, 0)
            rest = high * wide - waves * blocks
            total = rest * steps
            start, stop = block * total // blocks, (block + 1) * total // blocks
            last = (stop - 1) // steps
            parts = last - start // steps + 1
            for n in T.serial(parts + waves):
                tile = T.if_then_else(n < parts, last - n, rest + (n - parts) * blocks + block)
                front = T.if_then_else(n < parts, T.max(start - tile * steps, 0), 0)
                back = T.if_then_else(n < parts, T.min(stop - tile * steps, steps), steps)
                row, col = panelled(tile, high, wide, panel)
                T.clear(acc)
                for k in T.Pipelined(back - front, num_stages=stages):
                    load(A, B, a, b, row * BM, col * BN, (front + k) * BK, trans_a, trans_b)
                    multiply(a, b, acc, swap, trans_a, trans_b)
                if back < steps:
                    T.copy(acc, P[block, 0, 0])
                    T.atomic_store(ready[block], 1)
                else:
                    if front > 0:
                        # the block whose share has the tile's first step: the last one that begins there or
                        # before
                        for other in T.serial(((tile * steps + 1) * blocks - 1) // total, block):
                            seen = T.alloc_var("int32", 0)
                            while seen == 0:
                                seen = T.atomic_load(ready[other])
                            for i, j in T.Parallel(*sums):
                                acc[i, j] += P[other, i, j]
                    finish(acc, bias, C, row * BM, col * BN, activation, swap)

    @T.prim_func
    def gemm(
        A: T.Tensor(a_shape, dtype), B: T.Tensor(b_shape, dtype), P: T.Tensor((blocks, *sums), "float32"),
        ready: T.Tensor((blocks,), "int32"), C: T.Tensor((M, N), out),
    ):  # fmt: skip
        body(A, B, None, P, ready, C)

    @T.prim_func
    def gemm_bias(
        A: T.Tensor(a_shape, dtype),
        B: T.Tensor(b_shape, dtype),
        bias: T.Tensor((N,), out),
        P: T.Tensor((blocks, *sums), "float32"),
        ready: T.Tensor((blocks,), "int32"),
        C: T.Tensor((M, N), out),
    ):
        body(A, B, bias, P, ready, C)

    return gemm_bias if bias else gemm


#: shares of k up to which a thread adds its column's; more of them are spread over threads
SERIAL = 16


def combine(M: int | None, N: int, split: int, out: str, bias: bool, activation: str) -> Any:
    """C = act(the sum of ``split`` partial sums (split, M, N), in one order, + bias); their rows are filled
    up to multiples of four."""
    M = T.dynamic("M") if M is None else M
    columns, threads = (256, 64) if split <= SERIAL else (32, 256)

    @T.macro
    def body(P, bias, C):
        with T.Kernel(T.ceildiv(N, columns), M, threads=threads) as (bx, by):
            if split <= SERIAL:
                for j in T.Parallel(columns):
                    x = P[0, by, bx * columns + j]
                    for s in range(1, split):
                        x = x + P[s, by, bx * columns + j]
                    C[by, bx * columns + j] = activated(
                        x if bias is None else x + bias[bx * columns + j], activation
                    )
            else:
                part, total = (
                    T.alloc_fragment((split, columns), "float32"),
                    T.alloc_fragment((columns,), "float32"),
                )
                for s, j in T.Parallel(split, columns):
                    part[s, j] = P[s, by, bx * columns + j]
                T.reduce_sum(part, total, dim=0)
                for j in T.Parallel(columns):
                    x = total[j]
                    C[by, bx * columns + j] = activated(
                        x if bias is None else x + bias[bx * columns + j], activation
                    )

    @T.prim_func
    def combine(P: T.Tensor((split, M, filled(N, 4)), "float32"), C: T.Tensor((M, N), out)):
        body(P, None, C)

    @T.prim_func
    def combine_bias(
        P: T.Tensor((split, M, filled(N, 4)), "float32"), bias: T.Tensor((N,), out), C: T.Tensor((M, N), out)
    ):
        body(P, bias, C)

    return combine_bias if bias else combine
