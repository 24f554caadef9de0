"""``softmax(x)`` over the last axis: ``y[i, j] = exp(x[i, j] - max x[i]) / sum exp(x[i] - max x[i])``.

A row that a block, or the blocks of a cluster, hold in registers is read once. A longer one is read twice:
the maximum and the sum of the exponentials are kept together, as in flash attention (Milakov and Gimelshein,
"Online normalizer calculation for softmax", 2018), then the row is written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import tilescale.language as T
from tilescale.errors import TileTypeError, TileValueError
from tilescale.ops import host
from tilescale.ops.case import Case, Expected, Op, expected, generator, normal
from tilescale.ops.rows import (
    BYTES,
    DTYPES,
    cut,
    error,
    fetch,
    flat,
    halves,
    leave,
    ragged,
    shapes,
    share,
    shared,
)


def softmax_rows(columns: int, dtype: str, rows: int, threads: int, width: int, turns: int) -> Any:
    """Softmax of (m, columns) rows of a floating dtype; m may differ from call to call. Computed in float32
    (float64 of float64)."""
    m, acc = T.dynamic("m"), "float64" if dtype == "float64" else "float32"
    least = -T.infinity(acc)

    @T.prim_func
    def softmax(X: T.Tensor((m, columns), dtype), Y: T.Tensor((m, columns), dtype)):
        with T.Kernel(T.ceildiv(m, rows), threads=threads) as bx:
            x = T.alloc_fragment((rows, width), acc)
            top, total = T.alloc_fragment((rows,), acc), T.alloc_fragment((rows,), acc)
            for i, j in T.Parallel(rows, width):
                x[i, j] = T.if_then_else(j < columns, T.cast(X[bx * rows + i, j], acc), least)
            T.reduce_max(x, top, dim=1, nan_propagate=True)
            for i, j in T.Parallel(rows, width):
                x[i, j] = T.exp(x[i, j] - top[i])
            T.reduce_sum(x, total, dim=1)
            for i in T.Parallel(rows):
                total[i] = 1.0 / total[i]
            for i, j in T.Parallel(rows, width):
                Y[bx * rows + i, j] = T.cast(x[i, j] * total[i], dtype)

    @T.prim_func
    def softmax_of_long_rows(X: T.Tensor((m, columns), dtype), Y: T.Tensor((m, columns), dtype)):
        with T.Kernel(m, threads=threads) as row:
            x = T.alloc_fragment((1, width), acc)
            top, before = T.alloc_fragment((1,), acc), T.alloc_fragment((1,), acc)
            total = T.alloc_fragment((1,), acc)
            T.fill(top, least)
            T.clear(total)
            for t in T.serial(turns):
                for i, j in T.Parallel(1, width):
                    x[i, j] = T.if_then_else(
                        t * width + j < columns, T.cast(X[row + i, t * width + j], acc), least
                    )
                T.copy(top, before)
                T.reduce_max(x, top, dim=1, clear=False, nan_propagate=True)
                for i, j in T.Parallel(1, width):
                    x[i, j] = T.if_then_else(top[i] == least, 0.0, T.exp(x[i, j] - top[i]))
                for i in T.Parallel(1):
                    total[i] *= T.if_then_else(top[i] == least, 0.0, T.exp(before[i] - top[i]))
                T.reduce_sum(x, total, dim=1, clear=False)
            for i in T.Parallel(1):
                total[i] = 1.0 / total[i]
            for i, j in T.Parallel(1, columns):
                Y[row + i, j] = T.cast(T.exp(T.cast(X[row + i, j], acc) - top[i]) * total[i], dtype)

    return softmax if turns == 1 else softmax_of_long_rows


@T.macro
def together(top: Any, total: Any, pairs: Any, acc: str):
    """From each block's maximum and sum of exponentials below it, which all have in ``pairs`` (blocks, 2):
    total = what the block's own exponentials are multiplied by."""
    tops, parts = T.alloc_fragment((pairs.shape[0],), acc), T.alloc_fragment((pairs.shape[0],), acc)
    most, whole = T.alloc_fragment((1,), acc), T.alloc_fragment((1,), acc)
    for b in T.Parallel(pairs.shape[0]):
        tops[b] = pairs[b, 0]
    T.reduce_max(tops, most, dim=0, nan_propagate=True)
    for b in T.Parallel(pairs.shape[0]):
        parts[b] = pairs[b, 1] * T.exp(tops[b] - most[0])
    T.reduce_sum(parts, whole, dim=0)
    for i in T.Parallel(1):
        total[i] = T.exp(top[i] - most[i]) / whole[i]


def softmax_shared_rows(
    columns: int, dtype: str, blocks: int, threads: int, width: int, begin_anywhere: bool
) -> Any:
    """The same by clusters of ``blocks`` blocks, each with ``width`` columns of a row in registers. They
    exchange their maxima and their sums of exponentials, both at once."""
    m, acc = T.dynamic("m"), "float64" if dtype == "float64" else "float32"
    (whole, rest), word = flat(dtype), 16 // BYTES[dtype]
    least = -T.infinity(acc)

    @T.prim_func
    def softmax_of_shared_rows(X: T.Tensor((m, columns), dtype), Y: T.Tensor((m, columns), dtype)):
        with T.Kernel(m * blocks, threads=threads, cta_cluster=blocks) as block:
            x = T.alloc_fragment((1, width), acc)
            top, total = T.alloc_fragment((1,), acc), T.alloc_fragment((1,), acc)
            own, pairs = T.alloc_shared((2,), acc), T.alloc_shared((blocks, 2), acc)
            row, begin = block // blocks, block % blocks * width
            for i, j in T.Parallel(1, width):
                x[i, j] = T.if_then_else(begin + j < columns, T.cast(X[row + i, begin + j], acc), least)
            T.reduce_max(x, top, dim=1, nan_propagate=True)
            for i, j in T.Parallel(1, width):
                x[i, j] = T.if_then_else(top[i] == least, 0.0, T.exp(x[i, j] - top[i]))
            T.reduce_sum(x, total, dim=1)
            for i in T.Parallel(1):
                own[i] = top[i]
                own[1 + i] = total[i]
            with T.Scale("cta_cluster"):
                T.all_gather(own, pairs)
            together(top, total, pairs, acc)
            for i, j in T.Parallel(1, width):
                Y[row + i, begin + j] = T.cast(x[i, j] * total[i], dtype)

    @T.prim_func
    def softmax_of_shared_ragged_rows(X: whole, Xend: rest, Y: whole, Yend: rest, rows: T.int32):
        with T.Kernel(rows * blocks, threads=threads, cta_cluster=blocks) as block:
            x, part = (
                T.alloc_fragment((1, width // word, word), acc),
                T.alloc_fragment((1, width // word), acc),
            )
            top, total = T.alloc_fragment((1,), acc), T.alloc_fragment((1,), acc)
            own, pairs = T.alloc_shared((2,), acc), T.alloc_shared((blocks, 2), acc)
            row, skip = block // blocks, block % blocks * (width // word)
            fetch(X, Xend, x, row, row == rows - 1, columns, skip, acc, least)
            T.reduce_max(x, part, dim=2, nan_propagate=True)
            T.reduce_max(part, top, dim=1, nan_propagate=True)
            for i, w, e in T.Parallel(1, width // word, word):
                x[i, w, e] = T.if_then_else(top[i] == least, 0.0, T.exp(x[i, w, e] - top[i]))
            T.reduce_sum(x, part, dim=2)
            T.reduce_sum(part, total, dim=1)
            for i in T.Parallel(1):
                own[i] = top[i]
                own[1 + i] = total[i]
            with T.Scale("cta_cluster"):
                T.all_gather(own, pairs)
            together(top, total, pairs, acc)
            for i, w, e in T.Parallel(1, width // word, word):
                x[i, w, e] *= total[i]
            leave(x, Y, Yend, row, row == rows - 1, columns, skip, dtype)

    return softmax_of_shared_ragged_rows if begin_anywhere else softmax_of_shared_rows


def softmax_ragged_rows(columns: int, dtype: str, threads: int, words: int, turns: int) -> Any:
    """The same where rows begin anywhere, as words of 16 bytes: X and Y in halves (`rows.halves`)."""
    acc, (whole, rest), word = (
        ("float64" if dtype == "float64" else "float32"),
        flat(dtype),
        16 // BYTES[dtype],
    )
    least = -T.infinity(acc)

    @T.prim_func
    def softmax_of_ragged_rows(X: whole, Xend: rest, Y: whole, Yend: rest, rows: T.int32):
        with T.Kernel(rows, threads=threads) as row:
            x, part = T.alloc_fragment((1, words, word), acc), T.alloc_fragment((1, words), acc)
            top, total = T.alloc_fragment((1,), acc), T.alloc_fragment((1,), acc)
            fetch(X, Xend, x, row, row == rows - 1, columns, 0, acc, least)
            T.reduce_max(x, part, dim=2, nan_propagate=True)
            T.reduce_max(part, top, dim=1, nan_propagate=True)
            for i, w, e in T.Parallel(1, words, word):
                x[i, w, e] = T.exp(x[i, w, e] - top[i])
            T.reduce_sum(x, part, dim=2)
            T.reduce_sum(part, total, dim=1)
            for i in T.Parallel(1):
                total[i] = 1.0 / total[i]
            for i, w, e in T.Parallel(1, words, word):
                x[i, w, e] *= total[i]
            leave(x, Y, Yend, row, row == rows - 1, columns, 0, dtype)

    @T.prim_func
    def softmax_of_long_ragged_rows(X: whole, Xend: rest, Y: whole, Yend: rest, rows: T.int32):
        with T.Kernel(rows, threads=threads) as row:
            x, part = T.alloc_fragment((1, words, word), acc), T.alloc_fragment((1, words), acc)
            top, before, total = (
                T.alloc_fragment((1,), acc),
                T.alloc_fragment((1,), acc),
                T.alloc_fragment((1,), acc),
            )
            T.fill(top, least)
            T.clear(total)
            for t in T.serial(turns):
                fetch(X, Xend, x, row, row == rows - 1, columns, t * words, acc, least)
                T.copy(top, before)
                T.reduce_max(x, part, dim=2, nan_propagate=True)
                T.reduce_max(part, top, dim=1, clear=False, nan_propagate=True)
                for i, w, e in T.Parallel(1, words, word):
                    x[i, w, e] = T.if_then_else(top[i] == least, 0.0, T.exp(x[i, w, e] - top[i]))
                for i in T.Parallel(1):
                    total[i] *= T.if_then_else(top[i] == least, 0.0, T.exp(before[i] - top[i]))
                T.reduce_sum(x, part, dim=2)
                T.reduce_sum(part, total, dim=1, clear=False)
            for i in T.Parallel(1):
                total[i] = 1.0 / total[i]
            for t in T.serial(turns):
                fetch(X, Xend, x, row, row == rows - 1, columns, (turns - 1 - t) * words, acc, least)
                for i, w, e in T.Parallel(1, words, word):
                    x[i, w, e] = T.exp(x[i, w, e] - top[i]) * total[i]
                leave(x, Y, Yend, row, row == rows - 1, columns, (turns - 1 - t) * words, dtype)

    return softmax_of_ragged_rows if turns == 1 else softmax_of_long_ragged_rows


@host.checked
def softmax(x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Softmax over the last axis of a contiguous tensor, computed in float32 (float64 of float64) and rounded
    once. A row of minus infinities gives NaN.

    Raises:
        TileValueError, TileTypeError: shapes or dtypes that do not fit.
    """
    dtype = host.dtype_name(x)
    if dtype not in DTYPES:
        raise TileTypeError(f"softmax of {dtype}", expected="one of " + ", ".join(DTYPES))
    if not x.dim() or not x.is_contiguous():
        raise TileValueError(
            f"softmax of {tuple(x.shape)}{'' if x.is_contiguous() else ', not contiguous'}",
            expected="contiguous rows",
        )
    y = host.result(out, tuple(x.shape), x.dtype, x)
    if x.numel():
        n, units = x.shape[-1], host.multiprocessors(x.device)
        m = x.numel() // n
        what, how = {"columns": n, "dtype": dtype}, ragged(n, dtype, m, units)
        given = (x.view(m, n), y.view(m, n)) if how is None else (*halves(x), *halves(y), m)
        if (blocks := shared(n, dtype, m, units) if host.has_clusters(x.device) else 1) > 1:
            # A word more, where the row begins within one.
            most = n if how is None else n + 16 // x.element_size() - 1
            host.launch(
                softmax_shared_rows,
                given,
                **what,
                **share(most, dtype, blocks)._asdict(),
                begin_anywhere=how is not None,
            )
        elif how is not None:
            host.launch(softmax_ragged_rows, given, **what, **how._asdict())
        else:
            host.launch(softmax_rows, given, **what, **cut(n, dtype, m, units)._asdict())
    return y


def draw(m: int, n: int, dtype: str = "bfloat16", device: Any = "cpu", seed: int = 0) -> dict[str, Any]:
    return {"x": normal((m, n), dtype, generator(device, seed), 3.0)}


def reference(x: torch.Tensor) -> tuple[Expected, ...]:
    """In float64. The argument of an exponential is off by half a unit of its own, the exponential by two,
    the sum by those of its terms."""
    a = x.double()
    y = a.softmax(-1)
    distance = (a - a.amax(-1, keepdim=True)).abs()
    return (
        expected(
            y,
            x.dtype,
            noise=y * error(x.dtype) * (8 + 2 * distance + min(8 * x.shape[-1] ** 0.5, x.shape[-1] + 1)),
        ),
    )


def in_torch(x: torch.Tensor) -> Callable[[], Any]:
    out = torch.empty_like(x)
    return lambda: torch.softmax(x, -1, out=out)


OP = Op(
    name="softmax",
    run=softmax,
    draw=draw,
    reference=reference,
    cases=(
        *(Case(s, small=True) for s in shapes(small=True)),
        *(Case(s) for s in shapes(small=False)),
        *(
            Case({"m": m, "n": n, "dtype": d}, bar=1.0)
            for m, n in ((65536, 128), (16384, 1024), (8192, 8192), (4096, 32768), (512, 131072))
            for d in ("bfloat16", "float32")
        ),
    ),
    peers={"torch": in_torch},
    moved=lambda m, n, dtype="bfloat16": 2.0 * m * n * BYTES[dtype],
)
