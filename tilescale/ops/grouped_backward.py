"""``grouped_matmul_backward(a, dy, sizes)``: the gradients of the matrices of `grouped_matmul`: of each group
of rows aᵀ · dy, summed over its rows.

How long the groups are is known on the device alone: a block takes tiles of all groups' results in turn, and
walks over the rows of the tile's group. Whole steps go through the ring; what is behind them goes in small
steps whose missing rows are zeros, since the rows that follow are the next group's, or nobody's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import tilescale.language as T
from tilescale.errors import TileTypeError, TileValueError
from tilescale.ops import host
from tilescale.ops.case import Case, Expected, Op, expected, generator, normal, summed
from tilescale.ops.gemm_kernels import ceil_div, panelled
from tilescale.ops.grouped import DTYPES

#: rows of a step behind the whole ones
FEW = 16


# ---- the kernel


def grouped_outer(
    M: int, N: int, G: int, BM: int, BN: int, BK: int, stages: int, threads: int, panel: int, blocks: int,
    dtype: str, out: str,
) -> Any:  # fmt: skip
    """C[g] (M, N) = Aᵀ · B of the rows of each group of ``sizes`` (G,): A (P, M), B (P, N). By ``blocks``
    blocks that take one tile after another, in panels of ``panel`` rows of tiles."""
    P, tall, wide = T.dynamic("P"), ceil_div(M, BM), ceil_div(N, BN)

    @T.macro
    def rest(X, tile, first, end, column):
        """tile (FEW, …) = rows ``first`` and on of X, zero from ``end`` on."""
        for i, j in T.Parallel(*tile.shape):
            there = (first + i < end) & (column + j < X.shape[1])
            tile[i, j] = T.if_then_else(there, X[first + i, column + j], T.cast(0, dtype))

    @T.prim_func
    def grouped_backward(
        A: T.Tensor((P, M), dtype),
        B: T.Tensor((P, N), dtype),
        sizes: T.Tensor((G,), "int32"),
        C: T.Tensor((G, M, N), out),
    ):
        with T.Kernel(blocks, threads=threads) as block:
            a, b = T.alloc_shared((BK, BM), dtype), T.alloc_shared((BK, BN), dtype)
            few_a, few_b = T.alloc_shared((FEW, BM), dtype), T.alloc_shared((FEW, BN), dtype)
            acc = T.alloc_fragment((BM, BN), "float32")
            group, row, size = (T.alloc_var("int32") for _ in range(3))
            size = sizes[0]
            for tile in T.Persistent(G * tall * wide, blocks, block):
                while group < tile // (tall * wide):
                    row = row + size
                    group = group + 1
                    size = sizes[group]
                i, j = panelled(tile % (tall * wide), tall, wide, panel)
                T.clear(acc)
                for k in T.Pipelined(size // BK, num_stages=stages):
                    T.copy(A[row + k * BK, i * BM], a)
                    T.copy(B[row + k * BK, j * BN], b)
                    T.gemm(a, b, acc, transpose_A=True)
                for k in T.serial(T.ceildiv(size % BK, FEW)):
                    first = row + size // BK * BK + k * FEW
                    rest(A, few_a, first, row + size, i * BM)
                    rest(B, few_b, first, row + size, j * BN)
                    T.gemm(few_a, few_b, acc, transpose_A=True)
                T.copy(acc, C[group, i * BM, j * BN])

    return grouped_backward


# ---- what people call


@host.checked
def grouped_matmul_backward(
    a: torch.Tensor,
    dy: torch.Tensor,
    sizes: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """a[rows of group g]ᵀ · dy[rows of group g] for each group, summed in float32 and rounded once: the
    gradient of b in ``grouped_matmul(a, b, sizes)``. That of a is ``grouped_matmul(dy, b.transpose(1, 2),
    sizes)``.

    Args:
        a: (P, M), dy: (P, N), of bfloat16 or float16, contiguous. Rows behind the groups are not read.
        sizes: (G,) of int32 on the same device, which the host never looks at; they add up to P at most.
        out: (G, M, N), contiguous, takes the result. out_dtype: of the result; a's without, or float32.

    Returns:
        (G, M, N), zero for a group without rows.

    Raises:
        TileValueError, TileTypeError: shapes or dtypes that do not fit.
    """
    fits = a.dim() == dy.dim() == 2 and a.shape[0] == dy.shape[0] and sizes.dim() == 1
    if not fits or not a.is_contiguous() or not dy.is_contiguous():
        raise TileValueError(
            f"grouped_matmul_backward of {tuple(a.shape)} and {tuple(dy.shape)} in groups of "
            f"{tuple(sizes.shape)}",
            expected="a (P, M), dy (P, N), contiguous, sizes (G,)",
        )
    if a.dtype != dy.dtype or host.dtype_name(a) not in DTYPES or sizes.dtype != torch.int32:
        raise TileTypeError(
            f"grouped_matmul_backward of {host.dtype_name(a)} and {host.dtype_name(dy)}, sizes of "
            f"{host.dtype_name(sizes)}",
            expected="bfloat16 or float16 for both, int32 for the sizes",
        )
    kind = out.dtype if out is not None and out_dtype is None else out_dtype or a.dtype
    if kind not in (a.dtype, torch.float32):
        raise TileTypeError(f"a result of {kind}", expected=f"{a.dtype} or torch.float32")
    (P, M), N, G = a.shape, dy.shape[1], len(sizes)
    if 0 in (P, M, N, G):
        raise TileValueError(
            f"grouped_matmul_backward of {tuple(a.shape)} and {tuple(dy.shape)}",
            expected="extents of 1 at least",
        )
    c = host.result(out, (G, M, N), kind, a)
    BN = 128 if N <= 128 else 256
    cut = {"BM": 128, "BN": BN, "BK": 64, "stages": 4 if BN == 256 else 6, "threads": 256, "panel": 8}
    what = {"M": M, "N": N, "G": G, "dtype": host.dtype_name(a), "out": host.dtype_name(c)}
    blocks = host.multiprocessors(a.device)
    host.launch(grouped_outer, (a, dy, sizes, c), **what, **cut, blocks=blocks)
    return c


# ---- what is right, and what it is measured against


def draw(
    sizes: tuple[int, ...], M: int, N: int, dtype: str = "bfloat16", rows: int = 0, device: Any = "cpu",
    seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Normal random operands, NaN in ``rows`` rows behind the groups."""
    g, P = generator(device, seed), sum(sizes) + rows
    a, dy = normal((P, M), dtype, g), normal((P, N), dtype, g)
    if rows:
        a[-rows:], dy[-rows:] = torch.nan, torch.nan
    return {"a": a, "dy": dy, "sizes": torch.tensor(sizes, dtype=torch.int32, device=device)}


def reference(a: torch.Tensor, dy: torch.Tensor, sizes: torch.Tensor) -> tuple[Expected, ...]:
    """In float64, group by group."""
    total = torch.zeros(len(sizes), a.shape[1], dy.shape[1], dtype=torch.float64, device=a.device)
    noise, row = torch.zeros_like(total), 0
    for k, n in enumerate(sizes.tolist()):
        x, y = a[row : row + n].double(), dy[row : row + n].double()
        total[k], noise[k] = x.T @ y, summed(x.abs().T @ y.abs(), n)
        row += n
    return (expected(total, a.dtype, noise=noise),)


def torch_grouped(a: torch.Tensor, dy: torch.Tensor, sizes: torch.Tensor) -> Callable[[], Any]:
    """torch's own (CUTLASS); it takes where the groups end."""
    ends = sizes.cumsum(0, dtype=torch.int32)
    grouped: Any = torch._grouped_mm
    return lambda: grouped(a.T, dy, offs=ends)


OP = Op(
    name="grouped_matmul_backward",
    run=grouped_matmul_backward,
    draw=draw,
    reference=reference,
    cases=(
        *(
            Case(shape, small=True)
            for shape in (
                {"sizes": (5, 0, 70, 1), "M": 72, "N": 104},
                {"sizes": (200, 3), "M": 40, "N": 264, "dtype": "float16", "rows": 9},
                {"sizes": (0, 64, 0), "M": 136, "N": 8, "rows": 1},
            )
        ),
        *(
            Case({"sizes": s, "M": m, "N": n})
            for s in ((1000, 1, 0, 517, 128, 129), (3,) * 40, (0, 700))
            for m, n in ((520, 264), (1000, 1032))
        ),
        *(
            Case({"sizes": s, "M": 4096, "N": 4096}, bar=1.0)
            for s in ((1024,) * 8, (3000, 17, 1200, 800, 2048, 127, 0, 1000))
        ),
    ),
    peers={"torch._grouped_mm": torch_grouped},
    flops=lambda sizes, M, N, **_: 2.0 * sum(sizes) * M * N,
    moved=lambda sizes, M, N, **_: 2.0 * (sum(sizes) * (M + N) + len(sizes) * M * N),
)
