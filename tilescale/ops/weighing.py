"""``weighted_pairs(a, g, weights, sizes)``: the gradients where a mixture's experts are weighed. An expert's
result is weight · (a · down), and g = dy · downᵀ; so the weight's gradient is the sum of a · g, and what goes
on are weight · a and weight · g. One kernel reads and writes both once, and only the pairs that came.

How many these are is known on the device alone (``sizes``, as `grouped_matmul` takes them).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import tilescale.language as T
from tilescale.errors import TileTypeError, TileValueError
from tilescale.ops import host
from tilescale.ops.case import Case, Expected, Op, expected, generator, normal, summed
from tilescale.ops.gated import DTYPES, THREADS, cut
from tilescale.ops.rows import BYTES, error

# ---- the kernel


def weighing(n: int, dtype: str, blocks: int, inplace: bool) -> Any:
    """weight · A, weight · G (P, n), and S (P,), the sums of A · G, of the rows that sizes (groups,) add up
    to; others stay as they are. ``inplace``: into A and G."""
    P, groups, acc = T.dynamic("P"), T.dynamic("groups"), "float64" if dtype == "float64" else "float32"
    rows, width, wide = cut(n)

    @T.macro
    def body(A, G, W, sizes, toA, toG, S):
        with T.Kernel(blocks, threads=THREADS) as block:
            stop = T.alloc_var("int32")
            for k in T.serial(sizes.shape[0]):
                stop = stop + sizes[k]
            a, g, product = (T.alloc_fragment((rows, width), acc) for _ in range(3))
            total = T.alloc_fragment((rows,), acc)
            for t in T.serial(block, T.ceildiv(stop, rows), step=blocks):
                T.clear(product)
                for c in T.serial(wide):
                    for i, j in T.Parallel(rows, width):
                        a[i, j] = T.cast(A[t * rows + i, c * width + j], acc)
                        g[i, j] = T.cast(G[t * rows + i, c * width + j], acc)
                    for i, j in T.Parallel(rows, width):
                        product[i, j] += T.if_then_else(c * width + j < n, a[i, j] * g[i, j], 0.0)
                    for part, to in ((a, toA), (g, toG)):
                        for i, j in T.Parallel(rows, width):
                            if t * rows + i < stop:
                                by = T.cast(W[t * rows + i], acc)
                                to[t * rows + i, c * width + j] = T.cast(part[i, j] * by, dtype)
                T.reduce_sum(product, total, dim=1)
                for i in T.Parallel(rows):
                    if t * rows + i < stop:
                        S[t * rows + i] = total[i]

    matrix, row, counts = T.Tensor((P, n), dtype), T.Tensor((P,), "float32"), T.Tensor((groups,), "int32")
    sums = T.Tensor((P,), acc)

    @T.prim_func
    def weighted_pairs(A: matrix, G: matrix, W: row, sizes: counts, toA: matrix, toG: matrix, S: sums):
        body(A, G, W, sizes, toA, toG, S)

    @T.prim_func
    def weighted_pairs_in_place(A: matrix, G: matrix, W: row, sizes: counts, S: sums):
        body(A, G, W, sizes, A, G, S)

    return weighted_pairs_in_place if inplace else weighted_pairs


# ---- what people call


@host.checked
def weighted_pairs(
    a: torch.Tensor,
    g: torch.Tensor,
    weights: torch.Tensor,
    sizes: torch.Tensor,
    *,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """weights · a and weights · g, rounded once, and the sums of a · g of each row, computed in float32
    (float64 of float64). The same bits from run to run.

    Args:
        a, g: (P, n) of bfloat16, float16, float32 or float64, contiguous.
        weights: (P,) of float32, contiguous.
        sizes: (groups,) of int32 on the same device, which the host never looks at: only so many rows count
            as they add up to. Others stay as they are.
        out: takes the results; its first two may be a and g themselves, both.

    Returns:
        (P, n) twice, and (P,) of float32 (float64); rows that do not count are undefined without ``out``.

    Raises:
        TileValueError, TileTypeError: shapes or dtypes that do not fit.
    """
    if host.dtype_name(a) not in DTYPES or g.dtype != a.dtype or weights.dtype != torch.float32:
        raise TileTypeError(
            f"weighted_pairs of {host.dtype_name(a)}, {host.dtype_name(g)} by {host.dtype_name(weights)}",
            expected="one of " + ", ".join(DTYPES) + " for both, by float32",
        )
    fits = a.dim() == 2 and g.shape == a.shape and weights.shape == a.shape[:1]
    if not fits or not all(t.is_contiguous() for t in (a, g, weights)):
        raise TileValueError(
            f"weighted_pairs of {tuple(a.shape)}, {tuple(g.shape)} by {tuple(weights.shape)}",
            expected="(P, n) twice, (P,), contiguous",
        )
    if sizes.dim() != 1 or not len(sizes) or sizes.dtype != torch.int32:
        raise TileValueError(
            f"sizes is {tuple(sizes.shape)} of {host.dtype_name(sizes)}", expected="(groups,) of int32"
        )
    (P, n), acc = a.shape, torch.promote_types(a.dtype, torch.float32)
    given = out or (None, None, None)
    x, y = (host.result(o, (P, n), a.dtype, a) for o in given[:2])
    s = host.result(given[2], (P,), acc, a)
    inplace = x.data_ptr() == a.data_ptr()
    if inplace != (y.data_ptr() == g.data_ptr()):
        raise TileValueError("one of a and g takes its result", expected="both, or none")
    if P * n:
        what = {"n": n, "dtype": host.dtype_name(a), "blocks": 8 * host.multiprocessors(a.device)}
        args = (a, g, weights, sizes, *(() if inplace else (x, y)), s)
        host.launch(weighing, args, **what, inplace=inplace)
    return x, y, s


# ---- what is right, and what it is measured against


def draw(
    sizes: tuple[int, ...], n: int, dtype: str = "bfloat16", device: Any = "cpu", seed: int = 0
) -> dict[str, Any]:
    """Random rows, all of which count."""
    draws, P = generator(device, seed), sum(sizes)
    a, g = normal((P, n), dtype, draws), normal((P, n), dtype, draws)
    weights = torch.rand(P, generator=draws, device=device)
    counts = torch.tensor(sizes, dtype=torch.int32, device=device)
    return {"a": a, "g": g, "weights": weights, "sizes": counts}


def reference(
    a: torch.Tensor, g: torch.Tensor, weights: torch.Tensor, sizes: torch.Tensor
) -> tuple[Expected, ...]:
    """In float64."""
    by, unit = weights.double()[:, None], error(a.dtype)
    scaled = [expected(t.double() * by, a.dtype, noise=(t.double() * by).abs() * unit) for t in (a, g)]
    terms = a.double() * g.double()
    noise = summed(terms.abs().sum(1), a.shape[1]) * (unit * 2.0**24) + terms.abs().sum(1) * unit
    return *scaled, expected(terms.sum(1), torch.promote_types(a.dtype, torch.float32), noise=noise)


def in_torch(
    a: torch.Tensor, g: torch.Tensor, weights: torch.Tensor, sizes: torch.Tensor
) -> Callable[[], Any]:
    """One operation after another."""

    def call() -> Any:
        by, x, y = weights[:, None], a.float(), g.float()
        return (x * by).to(a.dtype), (y * by).to(a.dtype), (x * y).sum(1)

    return call


OP = Op(
    name="weighted_pairs",
    run=weighted_pairs,
    draw=draw,
    reference=reference,
    cases=(
        *(
            Case(shape, small=True)
            for shape in (
                {"sizes": (5, 0, 30), "n": 72},
                {"sizes": (3,), "n": 2100, "dtype": "float16"},
                {"sizes": (0, 70), "n": 10, "dtype": "float64"},
                {"sizes": (9, 2), "n": 24, "dtype": "float32"},
            )
        ),
        *(
            Case({"sizes": s, "n": n, "dtype": d})
            for s in ((1000, 1, 0, 517), (7,) * 40)
            for n, d in ((520, "bfloat16"), (1001, "float32"), (5000, "float16"))
        ),
        Case({"sizes": (2048,) * 16, "n": 2048}, bar=1.0),
    ),
    peers={"torch": in_torch},
    moved=lambda sizes, n, dtype="bfloat16": 4.0 * sum(sizes) * n * BYTES[dtype],
)
