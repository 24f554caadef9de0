"""``grouped_matmul_backward(a, dy, sizes)``: the gradients of the matrices of `grouped_matmul`: of each group
of rows aᵀ · dy, summed over its rows.

How long the groups are is known on the device alone: a block takes tiles of all groups' results in turn, and
walks over the rows of the tile's group. All steps go through the ring. Of the last one, which the next
group's rows fill up, or nobody's, the rows of this group alone are multiplied: 16 at once where they lie, and
what is left of 16 from a copy with zeros behind it.
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
from tilescale.ops.grouped import DTYPES, SHARES, share_of

#: rows of a step that are multiplied at once behind the whole steps
FEW = 16


# ---- the kernel


def grouped_outer(
    M: int, N: int, G: int, BM: int, BN: int, BK: int, stages: int, threads: int, panel: int, blocks: int,
    dtype: str, out: str, shares: int, parts: int,
) -> Any:  # fmt: skip
    """C[g] (M, N) = Aᵀ · B of the rows of each group of ``sizes`` (G,): A (P, M), B (P, N). By ``blocks``
    blocks that take one tile after another, in panels of ``panel`` rows of tiles; or by ``shares`` times as
    many (`grouped.share_of`). ``parts``: not 0, a group's rows lie in so many places, ``firsts`` and
    ``sizes`` (parts, G), and are added up in their order."""
    P, tall, wide = T.dynamic("P"), ceil_div(M, BM), ceil_div(N, BN)

    @T.macro
    def kept(few, tile, first, count):
        """few (FEW, …) = rows ``first`` and on of a step's tile, zero behind ``count`` of them."""
        for i, j in T.Parallel(*few.shape):
            few[i, j] = tile[first + i, j]
        for i, j in T.Parallel(*few.shape):
            if i >= count:
                few[i, j] = T.cast(0, dtype)

    @T.macro
    def add(A, B, tiles, acc, row, size, i, j):
        """acc += the product of ``size`` rows from ``row`` on: whole steps, then what is left of one."""
        a, b, few_a, few_b = tiles
        for k in T.Pipelined(size // BK, num_stages=stages):
            T.copy(A[row + k * BK, i * BM], a)
            T.copy(B[row + k * BK, j * BN], b)
            T.gemm(a, b, acc, transpose_A=True)
        for k in T.Pipelined(T.ceildiv(size % BK, BK), num_stages=stages):
            T.copy(A[row + (size // BK + k) * BK, i * BM], a)
            T.copy(B[row + (size // BK + k) * BK, j * BN], b)
            for s in range(0, BK, FEW):
                if size % BK >= s + FEW:
                    T.gemm(a[s : s + FEW, 0:BM], b[s : s + FEW, 0:BN], acc, transpose_A=True)
                elif size % BK > s:
                    kept(few_a, a, s, size % BK - s)
                    kept(few_b, b, s, size % BK - s)
                    T.gemm(few_a, few_b, acc, transpose_A=True)

    @T.macro
    def body(A, B, sizes, firsts, C):
        with T.Kernel(blocks * shares, threads=threads) as block:
            a, b = T.alloc_shared((BK, BM), dtype), T.alloc_shared((BK, BN), dtype)
            few_a, few_b = T.alloc_shared((FEW, BM), dtype), T.alloc_shared((FEW, BN), dtype)
            acc = T.alloc_fragment((BM, BN), "float32")
            group, row, size = (T.alloc_var("int32") for _ in range(3))
            if not parts:
                size = sizes[0]
            for tile in T.serial(*share_of(block, G * tall * wide, blocks, shares), step=blocks):
                while group < tile // (tall * wide):
                    if not parts:
                        row = row + size
                        size = sizes[group + 1]
                    group = group + 1
                i, j = panelled(tile % (tall * wide), tall, wide, panel)
                T.clear(acc)
                if parts:
                    for part in T.serial(parts):
                        add(A, B, (a, b, few_a, few_b), acc, firsts[part, group], sizes[part, group], i, j)
                else:
                    add(A, B, (a, b, few_a, few_b), acc, row, size, i, j)
                T.copy(acc, C[group, i * BM, j * BN])

    @T.prim_func
    def grouped_backward(
        A: T.Tensor((P, M), dtype),
        B: T.Tensor((P, N), dtype),
        sizes: T.Tensor((G,), "int32"),
        C: T.Tensor((G, M, N), out),
    ):
        body(A, B, sizes, None, C)

    @T.prim_func
    def grouped_backward_of_parts(
        A: T.Tensor((P, M), dtype),
        B: T.Tensor((P, N), dtype),
        sizes: T.Tensor((max(parts, 1), G), "int32"),
        firsts: T.Tensor((max(parts, 1), G), "int32"),
        C: T.Tensor((G, M, N), out),
    ):
        body(A, B, sizes, firsts, C)

    return grouped_backward_of_parts if parts else grouped_backward


# ---- what people call


@host.checked
def grouped_matmul_backward(
    a: torch.Tensor,
    dy: torch.Tensor,
    sizes: torch.Tensor,
    *,
    firsts: torch.Tensor | None = None,
    beside: bool = False,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """a[rows of group g]ᵀ · dy[rows of group g] for each group, summed in float32 and rounded once: the
    gradient of b in ``grouped_matmul(a, b, sizes)``. That of a is ``grouped_matmul(dy, b.transpose(1, 2),
    sizes)``.

    Args:
        a: (P, M), dy: (P, N), of bfloat16 or float16, contiguous. Rows behind the groups are not read.
        sizes: (G,) of int32 on the same device, which the host never looks at; they add up to P at most.
        firsts: the groups' rows lie in several parts: (parts, G) of int32, the first row of each part of each
            group, whose ``sizes`` are (parts, G), too. A sum takes its parts one after another.
        beside: as in `grouped_matmul`.
        out: (G, M, N), contiguous, takes the result. out_dtype: of the result; a's without, or float32.

    Returns:
        (G, M, N), zero for a group without rows.

    Raises:
        TileValueError, TileTypeError: shapes or dtypes that do not fit.
    """
    fits = a.dim() == dy.dim() == 2 and a.shape[0] == dy.shape[0]
    fits &= sizes.dim() == 1 if firsts is None else sizes.dim() == 2 and sizes.shape == firsts.shape
    if not fits or not a.is_contiguous() or not dy.is_contiguous():
        also = "" if firsts is None else f", firsts {tuple(firsts.shape)}"
        raise TileValueError(
            f"grouped_matmul_backward of {tuple(a.shape)} and {tuple(dy.shape)} in groups of "
            f"{tuple(sizes.shape)}{also}",
            expected="a (P, M), dy (P, N), contiguous, sizes (G,); or sizes and firsts (parts, G)",
        )
    if firsts is not None and firsts.dtype != torch.int32:
        raise TileTypeError(f"firsts of {host.dtype_name(firsts)}", expected="int32")
    if a.dtype != dy.dtype or host.dtype_name(a) not in DTYPES or sizes.dtype != torch.int32:
        raise TileTypeError(
            f"grouped_matmul_backward of {host.dtype_name(a)} and {host.dtype_name(dy)}, sizes of "
            f"{host.dtype_name(sizes)}",
            expected="bfloat16 or float16 for both, int32 for the sizes",
        )
    kind = out.dtype if out is not None and out_dtype is None else out_dtype or a.dtype
    if kind not in (a.dtype, torch.float32):
        raise TileTypeError(f"a result of {kind}", expected=f"{a.dtype} or torch.float32")
    (P, M), N, G, parts = a.shape, dy.shape[1], sizes.shape[-1], 0 if firsts is None else len(sizes)
    if 0 in (P, M, N, G, len(sizes)):
        raise TileValueError(
            f"grouped_matmul_backward of {tuple(a.shape)} and {tuple(dy.shape)}",
            expected="extents of 1 at least",
        )
    c = host.result(out, (G, M, N), kind, a)
    BN = 128 if N <= 128 else 256
    cut = {"BM": 128, "BN": BN, "BK": 64, "stages": 4 if BN == 256 else 6, "threads": 256, "panel": 8}
    what = {"M": M, "N": N, "G": G, "dtype": host.dtype_name(a), "out": host.dtype_name(c)}
    cut |= {"blocks": host.multiprocessors(a.device), "shares": SHARES if beside else 1, "parts": parts}
    host.launch(grouped_outer, (a, dy, sizes, *(() if firsts is None else (firsts,)), c), **what, **cut)
    return c


# ---- what is right, and what it is measured against


def draw(
    sizes: tuple[int, ...], M: int, N: int, dtype: str = "bfloat16", rows: int = 0, parts: int = 0,
    beside: bool = False, device: Any = "cpu", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Normal random operands, NaN in ``rows`` rows behind the groups. ``parts``: the groups' rows lie in so
    many parts, each as long as the first one with NaN behind, the later ones of fewer rows a group."""
    g, P = generator(device, seed), sum(sizes) + rows
    a, dy = normal((max(1, parts) * P, M), dtype, g), normal((max(1, parts) * P, N), dtype, g)
    several = [[size // (part + 1) for size in sizes] for part in range(max(1, parts))]
    for part, of in enumerate(several):
        for x in (a, dy):
            x[part * P + sum(of) : part * P + P] = torch.nan
    found = torch.tensor(several, dtype=torch.int32, device=device)
    more: dict[str, Any] = {"beside": True} if beside else {}
    if not parts:
        return {"a": a, "dy": dy, "sizes": found[0], **more}
    firsts = found.cumsum(1) - found + P * torch.arange(parts, device=device)[:, None]
    return {"a": a, "dy": dy, "sizes": found, "firsts": firsts.to(torch.int32), **more}


def reference(
    a: torch.Tensor, dy: torch.Tensor, sizes: torch.Tensor, firsts: torch.Tensor | None = None, **_: Any
) -> tuple[Expected, ...]:
    """In float64, group by group."""
    G = sizes.shape[-1]
    total = torch.zeros(G, a.shape[1], dy.shape[1], dtype=torch.float64, device=a.device)
    noise, rows = torch.zeros_like(total), [0] * G
    begins = sizes.cumsum(0) - sizes if firsts is None else firsts
    for at, (row, n) in enumerate(zip(begins.flatten().tolist(), sizes.flatten().tolist(), strict=True)):
        k = at % G
        x, y = a[row : row + n].double(), dy[row : row + n].double()
        total[k], noise[k], rows[k] = total[k] + x.T @ y, noise[k] + x.abs().T @ y.abs(), rows[k] + n
    for k in range(G):
        noise[k] = summed(noise[k], rows[k])
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
                {"sizes": (5, 0, 70, 1), "M": 72, "N": 104, "beside": True},
                {"sizes": (200, 3, 0), "M": 40, "N": 264, "rows": 5, "parts": 3},
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
