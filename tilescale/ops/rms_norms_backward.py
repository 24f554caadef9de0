"""The gradients of `rms_norm`: with r = 1 / sqrt(mean(x²) + eps) and g = dy · w of a row,

    dx = r · (g − x · r² · mean(g · x)),    dw = Σ over rows of dy · x · r.

Blocks stay and walk over rows, which they hold in registers, and add up their part of dw. A second kernel
adds up the blocks' parts: every run gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import tilescale.language as T
from tilescale.errors import TileTypeError, TileValueError
from tilescale.ops import host, rms_norms
from tilescale.ops.case import Case, Expected, Op, expected, generator, normal
from tilescale.ops.gemm_kernels import ceil_div
from tilescale.ops.rows import BYTES, Cut, cut, error

DTYPES = ("bfloat16", "float16", "float32", "float64")
#: columns of a row that a block holds with all that it computes; columns of a block that adds up parts
LONGEST, WIDE = 16384, 32


# ---- the kernels


def gradients(columns: int, dtype: str, eps: float, rows: int, threads: int, blocks: int) -> Any:
    """DX of (m, columns) rows, and of each block its part of dw, in float32 (float64 of float64). A block has
    ``rows`` rows at a time."""
    m, acc = T.dynamic("m"), "float64" if dtype == "float64" else "float32"

    @T.prim_func
    def rms_norm_gradients(
        DY: T.Tensor((m, columns), dtype),
        X: T.Tensor((m, columns), dtype),
        W: T.Tensor((columns,), dtype),
        DX: T.Tensor((m, columns), dtype),
        parts: T.Tensor((blocks, columns), acc),
    ):
        with T.Kernel(blocks, threads=threads) as block:
            x, dy = (T.alloc_fragment((rows, columns), dtype) for _ in range(2))
            term, part = (T.alloc_fragment((rows, columns), acc) for _ in range(2))
            factor, mean, whole = (T.alloc_fragment((n,), acc) for n in (rows, rows, columns))
            T.clear(part)
            for first in T.serial(block, T.ceildiv(m, rows), step=blocks):
                T.copy(X[first * rows, 0], x)
                T.copy(DY[first * rows, 0], dy)
                for i, j in T.Parallel(rows, columns):
                    term[i, j] = T.cast(x[i, j], acc) * T.cast(x[i, j], acc)
                T.reduce_sum(term, factor, dim=1)
                for i in T.Parallel(rows):
                    factor[i] = 1.0 / T.sqrt(factor[i] / columns + eps)
                for i, j in T.Parallel(rows, columns):
                    term[i, j] = T.cast(dy[i, j], acc) * T.cast(x[i, j], acc) * factor[i]
                    part[i, j] += term[i, j]
                    term[i, j] *= T.cast(W[j], acc)
                T.reduce_sum(term, mean, dim=1)
                for i, j in T.Parallel(rows, columns):
                    g = T.cast(dy[i, j], acc) * T.cast(W[j], acc)
                    back = T.cast(x[i, j], acc) * factor[i] * (mean[i] / columns)
                    DX[first * rows + i, j] = T.cast(factor[i] * (g - back), dtype)
            T.reduce_sum(part, whole, dim=0)
            T.copy(whole, parts[block, 0:columns])

    return rms_norm_gradients


def sums(columns: int, dtype: str, blocks: int) -> Any:
    """DW (columns,): the sum of parts (blocks, columns)."""
    acc = "float64" if dtype == "float64" else "float32"

    @T.prim_func
    def rms_norm_weight_gradient(parts: T.Tensor((blocks, columns), acc), DW: T.Tensor((columns,), dtype)):
        with T.Kernel(ceil_div(columns, WIDE), threads=256) as b:
            part, whole = T.alloc_fragment((blocks, WIDE), acc), T.alloc_fragment((WIDE,), acc)
            T.copy(parts[0, b * WIDE], part)
            T.reduce_sum(part, whole, dim=0)
            T.copy(whole, DW[b * WIDE])

    return rms_norm_weight_gradient


# ---- what people call


@host.checked
def rms_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of `rms_norm` by x and by weight, computed in float32 (float64 of float64) and rounded
    once.

    Args:
        dy: the gradient of the result, like x. x: (…, n), contiguous, of bfloat16, float16, float32 or
            float64; n is 16384 at most, 8192 of float64.
        weight: (n,) of x's dtype.
        out: takes the results.

    Raises:
        TileValueError, TileTypeError: shapes or dtypes that do not fit.
    """
    dtype = host.dtype_name(x)
    if dtype not in DTYPES or weight.dtype != x.dtype or dy.dtype != x.dtype:
        raise TileTypeError(
            f"rms_norm_backward of {dtype} by {host.dtype_name(weight)} and {host.dtype_name(dy)}",
            expected="all of one of " + ", ".join(DTYPES),
        )
    n = x.shape[-1] if x.dim() else 0
    if dy.shape != x.shape or tuple(weight.shape) != (n,) or not (x.is_contiguous() and dy.is_contiguous()):
        raise TileValueError(
            f"rms_norm_backward of dy {tuple(dy.shape)}, x {tuple(x.shape)}, weight {tuple(weight.shape)}",
            expected="dy and x alike and contiguous, a weight for each column",
        )
    if n > (longest := LONGEST // 2 if dtype == "float64" else LONGEST):
        raise TileValueError(f"rms_norm_backward of rows of {n}", expected=f"{longest} columns at most")
    to = out or (None, None)
    dx = host.result(to[0], tuple(x.shape), x.dtype, x, "dx")
    dw = host.result(to[1], (n,), x.dtype, x, "dw")
    if not x.numel():
        return dx, dw.zero_()
    m, units = x.numel() // n, host.multiprocessors(x.device)
    how = held(n, dtype)
    blocks = max(1, min(2 * units if how.threads <= 512 else units, ceil_div(m, how.rows)))
    parts = x.new_empty((blocks, n), dtype=torch.float64 if dtype == "float64" else torch.float32)
    what = {"columns": n, "dtype": dtype, "blocks": blocks}
    args = (dy.view(m, n), x.view(m, n), weight.contiguous(), dx.view(m, n), parts)
    host.launch(gradients, args, eps=float(eps), rows=how.rows, threads=how.threads, **what)
    host.launch(sums, (parts, dw), **what)
    return dx, dw


def held(columns: int, dtype: str) -> Cut:
    """Rows of a block that it holds: four numbers for each of x are in registers, sixteen of x a thread."""
    made = cut(columns, dtype)
    if made.rows > 1:
        return made
    each = 8 if dtype == "float64" else 16
    return Cut(1, max(128, 1 << (ceil_div(columns, each) - 1).bit_length()), columns, 1)


# ---- what is right, and what it is measured against


def draw(m: int, n: int, dtype: str = "bfloat16", device: Any = "cpu", seed: int = 0) -> dict[str, Any]:
    g = generator(device, seed + 1)
    return {"dy": normal((m, n), dtype, g), **rms_norms.draw(m, n, dtype, device, seed)}


def reference(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> tuple[Expected, ...]:
    """By torch's autograd in float64."""
    a, w = (t.detach().double().clone().requires_grad_() for t in (x, weight))
    n, m = x.shape[-1], x.shape[0]
    y = a * (a.square().mean(-1, keepdim=True) + eps).rsqrt() * w
    dx, dw = torch.autograd.grad(y, (a, w), dy.double())
    a, w, unit = a.detach(), w.detach(), error(x.dtype)
    r, g = (a.square().mean(-1, keepdim=True) + eps).rsqrt(), (dy.double() * w).abs()
    long = 16 + min(8 * n**0.5, n + 1)
    off = r * (g + a.abs() * r**2 * (g * a.abs()).mean(-1, keepdim=True)) * unit * long
    terms = (dy.double() * a * r).abs().sum(0)
    return (
        expected(dx, x.dtype, noise=off),
        expected(dw, x.dtype, noise=terms * unit * (long + min(8 * m**0.5, m + 1))),
    )


def in_torch(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Callable[[], Any]:
    """torch's own kernel, which autograd calls."""
    fused: Any = torch.ops.aten
    if not hasattr(fused, "_fused_rms_norm_backward"):
        raise NotImplementedError("this version of torch has no kernel of its own for it")
    _, r = fused._fused_rms_norm(x, [x.shape[-1]], weight, 1e-6)
    return lambda: fused._fused_rms_norm_backward(dy, x, [x.shape[-1]], r, weight, [True, True])


OP = Op(
    name="rms_norm_backward",
    run=rms_norm_backward,
    draw=draw,
    reference=reference,
    cases=(
        *(Case({"m": 5, "n": 77, "dtype": d}, small=True) for d in DTYPES),
        *(Case({"m": m, "n": n}, small=True) for m, n in ((1, 1), (300, 19), (33, 16), (3, 1100), (2, 5000))),
        Case({"m": 3, "n": 8192, "dtype": "float64"}, small=True),
        *(Case({"m": m, "n": n}) for m, n in ((1000, 1000), (333, 4096), (9000, 128), (3, 16384))),
        *(Case({"m": m, "n": n}, bar=1.0) for m, n in ((8192, 8192), (16384, 4096), (65536, 128))),
    ),
    peers={"torch": in_torch},
    moved=lambda m, n, dtype="bfloat16": 3.0 * m * n * BYTES[dtype],
)
