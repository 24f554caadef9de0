"""``rms_norm_gradients(dy, x, weight)``: what `rms_norm` makes of dy on its way back. With r = 1 /
sqrt(mean x[i]² + eps), x̂ = x · r and g = dy · w: ``dx[i] = r · (g[i] − x̂[i] · mean(g[i] · x̂[i]))``, and
``dw = Σ over rows of dy · x̂``.

A block has a row, or a few, in registers, and so it has the sums of the columns over all its rows. Blocks
stay; what each of them has summed is added up at last, in their order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import tilescale.language as T
from tilescale.errors import TileTypeError, TileValueError
from tilescale.ops import host
from tilescale.ops.case import Case, Expected, Op, expected, generator, normal, summed
from tilescale.ops.rows import BYTES, error

DTYPES = ("bfloat16", "float16", "float32", "float64")
#: numbers of a row that one thread has in registers, four times: of rows that 1024 threads hold so, and at
#: most (of float64 half as many)
EACH, MOST = 8, 16
#: threads of a block at most, which is half of what a multiprocessor has
THREADS = 1024


def cut(columns: int, dtype: str) -> tuple[int, int]:
    """Rows of a block, and its threads."""
    each = EACH // 2 if dtype == "float64" else EACH
    threads = min(THREADS, max(128, 1 << (-(-columns // each) - 1).bit_length()))
    return max(1, threads * each // columns), threads


def gradients(columns: int, dtype: str, eps: float, rows: int, threads: int, blocks: int) -> Any:
    """DX (m, columns), and of each block the sums of dy · x̂ over its rows, of DY, X (m, columns) and W."""
    m, acc = T.dynamic("m"), "float64" if dtype == "float64" else "float32"

    @T.prim_func
    def rms_norm_gradients(
        DY: T.Tensor((m, columns), dtype),
        X: T.Tensor((m, columns), dtype),
        W: T.Tensor((columns,), dtype),
        DX: T.Tensor((m, columns), dtype),
        sums: T.Tensor((blocks, columns), acc),
    ):
        with T.Kernel(blocks, threads=threads) as b:
            x, g, mine, product = (T.alloc_fragment((rows, columns), acc) for _ in range(4))
            factor, dot = (T.alloc_fragment((rows,), acc) for _ in range(2))
            total = T.alloc_fragment((columns,), acc)
            T.clear(mine)
            for t in T.serial(b, T.ceildiv(m, rows), step=blocks):
                for i, j in T.Parallel(rows, columns):
                    x[i, j] = T.cast(X[t * rows + i, j], acc)
                    g[i, j] = T.cast(DY[t * rows + i, j], acc)
                for i, j in T.Parallel(rows, columns):
                    product[i, j] = x[i, j] * x[i, j]
                T.reduce_sum(product, factor, dim=1)
                for i in T.Parallel(rows):  # rows that are none: zeros, also where eps is
                    root = 1.0 / T.sqrt(factor[i] / columns + eps)
                    factor[i] = T.if_then_else(t * rows + i < m, root, 0.0)
                for i, j in T.Parallel(rows, columns):
                    x[i, j] *= factor[i]
                    mine[i, j] += g[i, j] * x[i, j]
                    g[i, j] *= T.cast(W[j], acc)
                    product[i, j] = g[i, j] * x[i, j]
                T.reduce_sum(product, dot, dim=1)
                for i, j in T.Parallel(rows, columns):
                    back = factor[i] * (g[i, j] - x[i, j] * (dot[i] / columns))
                    DX[t * rows + i, j] = T.cast(back, dtype)
            T.reduce_sum(mine, total, dim=0)
            T.copy(total, sums[b, 0])

    return rms_norm_gradients


@host.checked
def rms_norm_gradients(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of `rms_norm` by x and by the weight, computed in float32 (float64 of float64) and
    rounded once; the same bits from run to run.

    Args:
        dy, x: of one shape, contiguous, 16384 columns at most (8192 of float64). weight: of the last axis'
            extent and x's dtype: bfloat16, float16, float32 or float64.
        out: takes the results.

    Raises:
        TileValueError, TileTypeError: shapes or dtypes that do not fit.
    """
    dtype = host.dtype_name(x)
    if dtype not in DTYPES or weight.dtype != x.dtype or dy.dtype != x.dtype:
        raise TileTypeError(
            f"rms_norm_gradients of {host.dtype_name(dy)}, {dtype} by {host.dtype_name(weight)}",
            expected="all of one of " + ", ".join(DTYPES),
        )
    if not x.dim() or dy.shape != x.shape or not x.is_contiguous() or not dy.is_contiguous():
        raise TileValueError(
            f"rms_norm_gradients of {tuple(dy.shape)}, {tuple(x.shape)}", expected="contiguous rows, alike"
        )
    n, most = x.shape[-1], longest(dtype)
    if tuple(weight.shape) != (n,) or not weight.is_contiguous() or n > most:
        raise TileValueError(
            f"a weight of {tuple(weight.shape)} for rows of {n}", expected=f"({n},), {most} columns at most"
        )
    dx, dw = (
        host.result(o, tuple(t.shape), x.dtype, x)
        for o, t in zip(out or (None, None), (x, weight), strict=True)
    )
    if not x.numel():
        return dx, dw.zero_()
    rows, threads = cut(n, dtype)
    blocks = max(1, min(THREADS // threads * host.multiprocessors(x.device), -(-x.numel() // n // rows)))
    acc = torch.promote_types(x.dtype, torch.float32)
    sums = torch.empty(blocks, n, dtype=acc, device=x.device)
    args = (dy.view(-1, n), x.view(-1, n), weight, dx.view(-1, n), sums)
    what = {"columns": n, "dtype": dtype, "eps": float(eps), "rows": rows, "threads": threads}
    host.launch(gradients, args, **what, blocks=blocks)
    dw.copy_(sums.sum(0))
    return dx, dw


def longest(dtype: str) -> int:
    """Columns of the longest row."""
    return THREADS * MOST // (2 if dtype == "float64" else 1)


# ---- what is right, and what it is measured against


def draw(m: int, n: int, dtype: str = "bfloat16", device: Any = "cpu", seed: int = 0) -> dict[str, Any]:
    g = generator(device, seed)
    return {
        "dy": normal((m, n), dtype, g),
        "x": normal((m, n), dtype, g, 2.0),
        "weight": normal((n,), dtype, g),
    }


def reference(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> tuple[Expected, ...]:
    """In float64; sums are off by those of their terms, in units of what rows are computed in."""
    a, d, n = x.double(), dy.double(), x.shape[-1]
    r = (a.square().mean(-1, keepdim=True) + eps).rsqrt()
    y, g = a * r, d * weight.double()
    dot, size = (g * y).mean(-1, keepdim=True), (g * y).abs().mean(-1, keepdim=True)
    unit, many = error(x.dtype), 8 + min(8 * n**0.5, n + 1)
    noise = r * (g.abs() + y.abs() * (dot.abs() + size)) * unit * many
    off = summed((d * y).abs().sum(0), len(x)) * (error(x.dtype) * 2.0**24)
    off = off + (d * y).abs().sum(0) * unit * many
    return expected(r * (g - y * dot), x.dtype, noise=noise), expected((d * y).sum(0), x.dtype, noise=off)


def in_torch(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Callable[[], Any]:
    """torch's own."""
    r = (x.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    back = torch.ops.aten._fused_rms_norm_backward
    return lambda: back(dy, x, x.shape[-1:], r, weight, [True, True])


OP = Op(
    name="rms_norm_gradients",
    run=rms_norm_gradients,
    draw=draw,
    reference=reference,
    cases=(
        *(
            Case(shape, small=True)
            for shape in (
                {"m": 5, "n": 77},
                {"m": 5, "n": 77, "dtype": "float64"},
                {"m": 300, "n": 24, "dtype": "float16"},
                {"m": 3, "n": 1100, "dtype": "float32"},
                {"m": 1, "n": 1},
                {"m": 2, "n": 5000},
            )
        ),
        *(
            Case({"m": m, "n": n, "dtype": d})
            for d in DTYPES
            for m, n in ((1000, 64), (333, 1000), (77, 8192), (5, 1025))
        ),
        Case({"m": 300, "n": 16384}),
        *(Case({"m": m, "n": n}, bar=1.0) for m, n in ((65536, 128), (16384, 1024), (8192, 8192))),
    ),
    peers={"torch": in_torch},
    moved=lambda m, n, dtype="bfloat16": 3.0 * m * n * BYTES[dtype],
)
