"""``rms_norm(x, weight)`` over the last axis: ``y[i, j] = x[i, j] · w[j] / sqrt(mean x[i]² + eps)`` (Zhang
and Sennrich, "Root Mean Square Layer Normalization", 2019). A row that a block holds in registers is read
once, a longer one twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import tilescale.language as T
from tilescale.errors import TileTypeError, TileValueError
from tilescale.ops import host
from tilescale.ops.case import Case, Expected, Op, expected, generator, normal
from tilescale.ops.rows import BYTES, DTYPES, cut, error, fetch, flat, halves, leave, ragged, shapes


def rms_norm_rows(
    columns: int, dtype: str, eps: float, rows: int, threads: int, width: int, turns: int
) -> Any:
    """RMSNorm of (m, columns) rows of a floating dtype with a weight for each column, of the same dtype; m
    may differ from call to call. Computed in float32 (float64 of float64)."""
    m, acc = T.dynamic("m"), "float64" if dtype == "float64" else "float32"

    @T.prim_func
    def rms_norm(
        X: T.Tensor((m, columns), dtype), W: T.Tensor((columns,), dtype), Y: T.Tensor((m, columns), dtype)
    ):
        with T.Kernel(T.ceildiv(m, rows), threads=threads) as bx:
            x, square = T.alloc_fragment((rows, width), acc), T.alloc_fragment((rows, width), acc)
            factor = T.alloc_fragment((rows,), acc)
            for i, j in T.Parallel(rows, width):
                x[i, j] = T.cast(X[bx * rows + i, j], acc)
            for i, j in T.Parallel(rows, width):
                square[i, j] = x[i, j] * x[i, j]
            T.reduce_sum(square, factor, dim=1)
            for i in T.Parallel(rows):
                factor[i] = 1.0 / T.sqrt(factor[i] / columns + eps)
            for i, j in T.Parallel(rows, width):
                Y[bx * rows + i, j] = T.cast(x[i, j] * factor[i] * T.cast(W[j], acc), dtype)

    @T.prim_func
    def rms_norm_of_long_rows(
        X: T.Tensor((m, columns), dtype), W: T.Tensor((columns,), dtype), Y: T.Tensor((m, columns), dtype)
    ):
        with T.Kernel(m, threads=threads) as row:
            square, factor = T.alloc_fragment((1, width), acc), T.alloc_fragment((1,), acc)
            T.clear(square)
            for t in T.serial(turns):
                for i, j in T.Parallel(1, width):
                    x = T.cast(X[row + i, t * width + j], acc)
                    square[i, j] += x * x
            T.reduce_sum(square, factor, dim=1)
            for i in T.Parallel(1):
                factor[i] = 1.0 / T.sqrt(factor[i] / columns + eps)
            for i, j in T.Parallel(1, columns):
                Y[row + i, j] = T.cast(T.cast(X[row + i, j], acc) * factor[i] * T.cast(W[j], acc), dtype)

    return rms_norm if turns == 1 else rms_norm_of_long_rows


def rms_norm_ragged_rows(columns: int, dtype: str, eps: float, threads: int, words: int, turns: int) -> Any:
    """The same where rows begin anywhere, as words of 16 bytes: X and Y in halves (`rows.halves`)."""
    acc, (whole, rest), word = (
        ("float64" if dtype == "float64" else "float32"),
        flat(dtype),
        16 // BYTES[dtype],
    )

    @T.prim_func
    def rms_norm_of_ragged_rows(
        X: whole, Xend: rest, W: T.Tensor((columns,), dtype), Y: whole, Yend: rest, rows: T.int32
    ):
        with T.Kernel(rows, threads=threads) as row:
            x, square = T.alloc_fragment((1, words, word), acc), T.alloc_fragment((1, words, word), acc)
            part, factor = T.alloc_fragment((1, words), acc), T.alloc_fragment((1,), acc)
            T.clear(square)
            for t in T.serial(turns) if turns > 1 else (0,):
                fetch(X, Xend, x, row, row == rows - 1, columns, t * words, acc, 0.0)
                for i, w, e in T.Parallel(1, words, word):
                    square[i, w, e] += x[i, w, e] * x[i, w, e]
            T.reduce_sum(square, part, dim=2)
            T.reduce_sum(part, factor, dim=1)
            for i in T.Parallel(1):
                factor[i] = 1.0 / T.sqrt(factor[i] / columns + eps)
            for t in T.serial(turns) if turns > 1 else (0,):
                if turns > 1:
                    fetch(X, Xend, x, row, row == rows - 1, columns, (turns - 1 - t) * words, acc, 0.0)
                for i, w, e in T.Parallel(
                    1, words, word
                ):  # by itself: the weights' places decide nothing about the row's
                    square[i, w, e] = T.cast(
                        W[((turns - 1 - t) * words + w) * word + e - row * columns % word], acc
                    )
                for i, w, e in T.Parallel(1, words, word):
                    x[i, w, e] *= factor[i] * square[i, w, e]
                leave(x, Y, Yend, row, row == rows - 1, columns, (turns - 1 - t) * words, dtype)

    return rms_norm_of_ragged_rows


@host.checked
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """RMSNorm over the last axis of a contiguous tensor, computed in float32 (float64 of float64) and rounded
    once.

    Args:
        weight: of the last axis' extent and x's dtype.

    Raises:
        TileValueError, TileTypeError: shapes or dtypes that do not fit.
    """
    dtype = host.dtype_name(x)
    if dtype not in DTYPES or weight.dtype != x.dtype:
        raise TileTypeError(
            f"rms_norm of {dtype} by {host.dtype_name(weight)}",
            expected="both of one of " + ", ".join(DTYPES),
        )
    if not x.dim() or not x.is_contiguous():
        raise TileValueError(
            f"rms_norm of {tuple(x.shape)}{'' if x.is_contiguous() else ', not contiguous'}",
            expected="contiguous rows",
        )
    n = x.shape[-1]
    if tuple(weight.shape) != (n,) or not weight.is_contiguous():
        raise TileValueError(
            f"a weight of {tuple(weight.shape)} for rows of {n}", expected=f"({n},), contiguous"
        )
    y = host.result(out, tuple(x.shape), x.dtype, x)
    if x.numel():
        units = host.multiprocessors(x.device)
        if (how := ragged(n, dtype, x.numel() // n, units)) is not None:
            given = (*halves(x), weight, *halves(y), x.numel() // n)
            host.launch(rms_norm_ragged_rows, given, columns=n, dtype=dtype, eps=float(eps), **how._asdict())
            return y
        args = x.view(-1, n), weight, y.view(-1, n)
        host.launch(
            rms_norm_rows,
            args,
            columns=n,
            dtype=dtype,
            eps=float(eps),
            **cut(n, dtype, x.numel() // n, units)._asdict(),
        )
    return y


def draw(m: int, n: int, dtype: str = "bfloat16", device: Any = "cpu", seed: int = 0) -> dict[str, Any]:
    g = generator(device, seed)
    return {"x": normal((m, n), dtype, g, 2.0), "weight": normal((n,), dtype, g)}


def reference(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> tuple[Expected, ...]:
    """In float64; the sum of squares is off by those of its terms, its root by half of that."""
    a = x.double()
    y = a * (a.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()
    return (
        expected(
            y, x.dtype, noise=y.abs() * error(x.dtype) * (8 + min(8 * x.shape[-1] ** 0.5, x.shape[-1] + 1))
        ),
    )


def in_torch(x: torch.Tensor, weight: torch.Tensor) -> Callable[[], Any]:
    return lambda: torch.nn.functional.rms_norm(x, x.shape[-1:], weight, 1e-6)


OP = Op(
    name="rms_norm",
    run=rms_norm,
    draw=draw,
    reference=reference,
    cases=(
        *(Case(s, small=True) for s in shapes(small=True)),
        *(Case(s) for s in shapes(small=False)),
        *(
            Case({"m": m, "n": n, "dtype": d}, bar=1.0)
            for m, n in ((65536, 128), (16384, 1024), (8192, 8192), (4096, 32768))
            for d in ("bfloat16", "float32")
        ),
    ),
    peers={"torch": in_torch},
    moved=lambda m, n, dtype="bfloat16": 2.0 * m * n * BYTES[dtype],
)
