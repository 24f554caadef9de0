"""RMSNorm over the rows of a matrix: ``y[i, j] = x[i, j] · w[j] / sqrt(mean x[i]² + eps)`` (Zhang and Sennrich, 2019)."""

from __future__ import annotations

from typing import Any

import tilescale
import tilescale.language as T
from tilescale.ops.rows import Rows, cut


@tilescale.jit
def kernel(columns: int, dtype: str = "bfloat16", eps: float = 1e-6, plan: Rows | None = None) -> Any:
    """RMSNorm of (m, columns) rows of a floating dtype with a weight for each column, of the same dtype; m may differ from call to call.
    Computed in float32 (float64 of float64)."""
    p = plan or cut(columns, dtype)
    m, rows, width = T.dynamic("m"), p.rows, p.width
    acc = "float64" if dtype == "float64" else "float32"

    @T.prim_func
    def rms_norm(X: T.Tensor((m, columns), dtype), W: T.Tensor((columns,), dtype), Y: T.Tensor((m, columns), dtype)):
        with T.Kernel(T.ceildiv(m, rows), threads=p.threads) as bx:
            x, square = T.alloc_fragment((rows, width), acc), T.alloc_fragment((rows, width), acc)
            factor = T.alloc_fragment((rows,), acc)
            for i, j in T.Parallel(rows, width):
                x[i, j] = T.cast(X[bx * rows + i, j], acc)
            for i, j in T.Parallel(rows, width):
                square[i, j] = x[i, j] * x[i, j]
            T.reduce_sum(square, factor, dim=1)
            for i in T.Parallel(rows):
                factor[i] = T.rsqrt(factor[i] / columns + eps)
            for i, j in T.Parallel(rows, width):
                Y[bx * rows + i, j] = T.cast(x[i, j] * factor[i] * T.cast(W[j], acc), dtype)

    @T.prim_func
    def rms_norm_of_long_rows(X: T.Tensor((m, columns), dtype), W: T.Tensor((columns,), dtype), Y: T.Tensor((m, columns), dtype)):
        with T.Kernel(m, threads=p.threads) as row:
            square, factor = T.alloc_fragment((1, width), acc), T.alloc_fragment((1,), acc)
            T.clear(square)
            for t in T.serial(p.turns):
                for i, j in T.Parallel(1, width):
                    x = T.cast(X[row + i, t * width + j], acc)
                    square[i, j] += x * x
            T.reduce_sum(square, factor, dim=1)
            for i in T.Parallel(1):
                factor[i] = T.rsqrt(factor[i] / columns + eps)
            for i, j in T.Parallel(1, columns):
                Y[row + i, j] = T.cast(T.cast(X[row + i, j], acc) * factor[i] * T.cast(W[j], acc), dtype)

    return rms_norm if p.turns == 1 else rms_norm_of_long_rows
