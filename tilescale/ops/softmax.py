"""Softmax over the rows of a matrix: ``y[i, j] = exp(x[i, j] - max x[i]) / sum exp(x[i] - max x[i])``.

A row that a block holds in registers is read once. A longer one is read twice: the maximum and the sum of the exponentials are kept
together, as in flash attention (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018), then the row is written.
"""

from __future__ import annotations

from typing import Any

import tilescale
import tilescale.language as T
from tilescale.ops.rows import Rows, cut


@tilescale.jit
def kernel(columns: int, dtype: str = "bfloat16", plan: Rows | None = None) -> Any:
    """Softmax of (m, columns) rows of a floating dtype; m may differ from call to call. Computed in float32 (float64 of float64)."""
    p = plan or cut(columns, dtype)
    m, rows, width = T.dynamic("m"), p.rows, p.width
    acc = "float64" if dtype == "float64" else "float32"
    least = -T.infinity(acc)

    @T.prim_func
    def softmax(X: T.Tensor((m, columns), dtype), Y: T.Tensor((m, columns), dtype)):
        with T.Kernel(T.ceildiv(m, rows), threads=p.threads) as bx:
            x = T.alloc_fragment((rows, width), acc)
            top, total = T.alloc_fragment((rows,), acc), T.alloc_fragment((rows,), acc)
            for i, j in T.Parallel(rows, width):
                x[i, j] = T.if_then_else(j < columns, T.cast(X[bx * rows + i, j], acc), least)
            T.reduce_max(x, top, dim=1)
            for i, j in T.Parallel(rows, width):
                x[i, j] = T.exp(x[i, j] - top[i])
            T.reduce_sum(x, total, dim=1)
            for i in T.Parallel(rows):
                total[i] = 1.0 / total[i]
            for i, j in T.Parallel(rows, width):
                Y[bx * rows + i, j] = T.cast(x[i, j] * total[i], dtype)

    @T.prim_func
    def softmax_of_long_rows(X: T.Tensor((m, columns), dtype), Y: T.Tensor((m, columns), dtype)):
        with T.Kernel(m, threads=p.threads) as row:
            x = T.alloc_fragment((1, width), acc)
            top, before = T.alloc_fragment((1,), acc), T.alloc_fragment((1,), acc)
            total = T.alloc_fragment((1,), acc)
            T.fill(top, least)
            T.clear(total)
            for t in T.serial(p.turns):
                for i, j in T.Parallel(1, width):
                    x[i, j] = T.if_then_else(t * width + j < columns, T.cast(X[row + i, t * width + j], acc), least)
                T.copy(top, before)
                T.reduce_max(x, top, dim=1, clear=False)
                for i, j in T.Parallel(1, width):
                    x[i, j] = T.if_then_else(top[i] == least, 0.0, T.exp(x[i, j] - top[i]))
                for i in T.Parallel(1):
                    total[i] *= T.if_then_else(top[i] == least, 0.0, T.exp(before[i] - top[i]))
                T.reduce_sum(x, total, dim=1, clear=False)
            for i in T.Parallel(1):
                total[i] = 1.0 / total[i]
            for i, j in T.Parallel(1, columns):
                Y[row + i, j] = T.cast(T.exp(T.cast(X[row + i, j], acc) - top[i]) * total[i], dtype)

    return softmax if p.turns == 1 else softmax_of_long_rows
