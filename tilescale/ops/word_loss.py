"""``cross_entropy_parts`` and ``cross_entropy_gradient``: the loss of rows of logits whose words are split
over ranks, and its gradient. The first reads the logits once and says of each row what ranks tell each other:
its maximum and its sum of exponentials, kept together as in flash attention (Milakov and Gimelshein, "Online
normalizer calculation for softmax", 2018), and the target's logit. The second reads them once more and writes
the gradient in the dtype that products take it in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import tilescale.language as T
from tilescale.errors import TileTypeError, TileValueError
from tilescale.ops import host
from tilescale.ops.case import Case, Expected, Op, expected, generator, normal
from tilescale.ops.rows import BYTES, cut, error

# ---- the kernels


def parts_of_rows(columns: int, acc: str, rows: int, threads: int, width: int, turns: int) -> Any:
    """Of X (m, columns), the words from ``first`` on: P (3, m), each row's maximum, its sum of exponentials
    below that, and the logit of its target in ``aims``, 0 where that is no word of these."""
    m, least = T.dynamic("m"), -T.infinity(acc)

    @T.prim_func
    def cross_entropy_parts(
        X: T.Tensor((m, columns), acc),
        aims: T.Tensor((m,), "int64"),
        P: T.Tensor((3, m), acc),
        first: T.int64,
    ):
        with T.Kernel(T.ceildiv(m, rows), threads=threads) as b:
            x = T.alloc_fragment((rows, width), acc)
            top, before, total = (T.alloc_fragment((rows,), acc) for _ in range(3))
            T.fill(top, least)
            T.clear(total)
            for t in T.serial(turns):
                for i, j in T.Parallel(rows, width):
                    x[i, j] = T.if_then_else(t * width + j < columns, X[b * rows + i, t * width + j], least)
                T.copy(top, before)
                T.reduce_max(x, top, dim=1, clear=False, nan_propagate=True)
                for i, j in T.Parallel(rows, width):
                    x[i, j] = T.if_then_else(top[i] == least, 0.0, T.exp(x[i, j] - top[i]))
                for i in T.Parallel(rows):
                    total[i] *= T.if_then_else(top[i] == least, 0.0, T.exp(before[i] - top[i]))
                T.reduce_sum(x, total, dim=1, clear=False)
            for i in T.Parallel(rows):
                if b * rows + i < m:
                    word = aims[b * rows + i] - first
                    P[0, b * rows + i] = top[i]
                    P[1, b * rows + i] = total[i]
                    P[2, b * rows + i] = 0.0
                    if word >= 0 and word < columns:
                        P[2, b * rows + i] = X[b * rows + i, word]

    return cross_entropy_parts


def gradient_of_rows(columns: int, dtype: str, acc: str, ranks: int, rows: int, threads: int) -> Any:
    """Of X (m, columns), the words from ``first`` on, whose ranks' parts are P (ranks, 3, m): D (m, columns),
    ``by`` times softmax less one at the target; L (m,), the losses. Both are 0 of rows whose target is
    ``ignore``."""
    m = T.dynamic("m")

    @T.prim_func
    def cross_entropy_gradient(
        X: T.Tensor((m, columns), acc),
        aims: T.Tensor((m,), "int64"),
        P: T.Tensor((ranks, 3, m), acc),
        by: T.Tensor((1,), acc),
        D: T.Tensor((m, columns), dtype),
        L: T.Tensor((m,), acc),
        first: T.int64,
        ignore: T.int64,
    ):
        with T.Kernel(T.ceildiv(m, rows), threads=threads) as b:
            top, total, aim, share = (T.alloc_fragment((rows,), acc) for _ in range(4))
            word = T.alloc_fragment((rows,), "int64")
            for i in T.Parallel(rows):
                top[i] = P[0, 0, b * rows + i]
                for r in T.serial(1, ranks):
                    top[i] = T.max(top[i], P[r, 0, b * rows + i])
                total[i] = 0.0
                aim[i] = 0.0
                for r in T.serial(ranks):
                    total[i] += P[r, 1, b * rows + i] * T.exp(P[r, 0, b * rows + i] - top[i])
                    aim[i] += P[r, 2, b * rows + i]
                counts = aims[b * rows + i] != ignore
                word[i] = aims[b * rows + i] - first
                share[i] = T.if_then_else(counts, by[0], 0.0)
                if b * rows + i < m:
                    L[b * rows + i] = T.if_then_else(counts, top[i] + T.log(total[i]) - aim[i], 0.0)
                total[i] = 1.0 / total[i]
            for i, j in T.Parallel(rows, columns):
                x = T.exp(X[b * rows + i, j] - top[i]) * total[i] - T.if_then_else(j == word[i], 1.0, 0.0)
                D[b * rows + i, j] = T.cast(x * share[i], dtype)

    return cross_entropy_gradient


# ---- what people call


def _fits(what: str, logits: torch.Tensor, targets: torch.Tensor) -> None:
    if logits.dtype not in (torch.float32, torch.float64) or targets.dtype != torch.int64:
        raise TileTypeError(
            f"{what} of {host.dtype_name(logits)}, targets of {host.dtype_name(targets)}",
            expected="float32 or float64, and int64",
        )
    if logits.dim() != 2 or not logits.is_contiguous() or tuple(targets.shape) != tuple(logits.shape[:1]):
        raise TileValueError(
            f"{what} of {tuple(logits.shape)}, targets {tuple(targets.shape)}",
            expected="contiguous logits (m, words), targets (m,)",
        )
    if not logits.shape[1]:
        raise TileValueError(f"{what} of {tuple(logits.shape)}", expected="a word at least")


@host.checked
def cross_entropy_parts(
    logits: torch.Tensor, targets: torch.Tensor, first: int = 0, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """What ranks tell each other of rows of logits, each of some of the words.

    Args:
        logits: (m, words) of float32 or float64, contiguous: words ``first``, ``first`` + 1, ….
        targets: (m,) of int64, any words.
        out: takes the result.

    Returns:
        (3, m), of the logits' dtype: a row's maximum; the sum of exp(logit − maximum); the logit of its
        target, 0 where that is none of these words.

    Raises:
        TileValueError, TileTypeError: shapes or dtypes that do not fit.
    """
    _fits("cross_entropy_parts", logits, targets)
    m, n = logits.shape
    parts = host.result(out, (3, m), logits.dtype, logits)
    if m:
        dtype = host.dtype_name(logits)
        how = cut(n, dtype, m, host.multiprocessors(logits.device))
        args = (logits, targets.contiguous(), parts, first)
        host.launch(parts_of_rows, args, columns=n, acc=dtype, **how._asdict())
    return parts


@host.checked
def cross_entropy_gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    parts: torch.Tensor,
    by: torch.Tensor,
    first: int = 0,
    ignore: int = -100,
    *,
    dtype: torch.dtype | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of rows' losses −log softmax(logits)[target] by the logits, and the losses.

    Args:
        logits, targets, first: as `cross_entropy_parts` takes them.
        parts: (ranks, 3, m), what that gave for each rank's words.
        by: one number of the logits' dtype, which multiplies the gradient.
        ignore: rows with this target have no loss and no gradient.
        dtype: of the gradient; the logits' without. out: takes the results.

    Returns:
        (m, words), rounded once; (m,) of the logits' dtype.

    Raises:
        TileValueError, TileTypeError: shapes or dtypes that do not fit.
    """
    _fits("cross_entropy_gradient", logits, targets)
    (m, n), kind = logits.shape, logits.dtype
    if parts.dim() != 3 or tuple(parts.shape[1:]) != (3, m) or by.numel() != 1 or not len(parts):
        raise TileValueError(
            f"parts {tuple(parts.shape)}, by {tuple(by.shape)} of {m} rows",
            expected=f"parts (ranks, 3, {m}) and one number",
        )
    if parts.dtype != kind or by.dtype != kind:
        raise TileTypeError(
            f"parts of {host.dtype_name(parts)}, by of {host.dtype_name(by)}",
            expected=f"the logits' {host.dtype_name(logits)}",
        )
    to = out or (None, None)
    d = host.result(to[0], (m, n), dtype or kind, logits, "the gradient")
    losses = host.result(to[1], (m,), kind, logits, "losses")
    if m:
        acc = host.dtype_name(logits)
        how = cut(n, acc, m, host.multiprocessors(logits.device))
        args = (logits, targets.contiguous(), parts.contiguous(), by.reshape(1), d, losses, first, ignore)
        what = {"columns": n, "dtype": host.dtype_name(d), "acc": acc, "ranks": len(parts)}
        host.launch(gradient_of_rows, args, **what, rows=how.rows, threads=how.threads)
    return d, losses


# ---- what is right, and what it is measured against


def draw(
    m: int, n: int, ranks: int = 1, dtype: str = "bfloat16", acc: str = "float32", device: Any = "cpu",
    seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Rows of ``ranks`` · n words' logits and their targets, every fifth of which is ignored."""
    g = generator(device, seed)
    logits = normal((m, ranks * n), acc, g, 3.0)
    targets = torch.randint(0, ranks * n, (m,), generator=g, device=device)
    targets[::5] = -100
    by = torch.full((), 0.37, device=device, dtype=logits.dtype)
    return {"logits": logits, "targets": targets, "by": by, "ranks": ranks, "dtype": getattr(torch, dtype)}


def gradients(
    logits: torch.Tensor, targets: torch.Tensor, by: torch.Tensor, ranks: int, dtype: torch.dtype,
    out: Any = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """The gradients of each rank's words, one behind another, and the losses."""
    cuts = [part.contiguous() for part in logits.chunk(ranks, 1)]
    n = cuts[0].shape[1]
    parts = torch.stack([cross_entropy_parts(part, targets, r * n) for r, part in enumerate(cuts)])
    if ranks == 1:
        return cross_entropy_gradient(cuts[0], targets, parts, by, dtype=dtype, out=out)
    found = [cross_entropy_gradient(p, targets, parts, by, r * n, dtype=dtype) for r, p in enumerate(cuts)]
    d, losses = torch.cat([d for d, _ in found], 1), found[0][1]
    if out is None:
        return d, losses
    return out[0].copy_(d), out[1].copy_(losses)


def reference(
    logits: torch.Tensor, targets: torch.Tensor, by: torch.Tensor, ranks: int, dtype: torch.dtype
) -> tuple[Expected, ...]:
    """In float64. Exponentials are off as in `row_softmax.reference`."""
    a, counts = logits.double(), (targets != -100)[:, None]
    p, at = a.softmax(1), targets.clamp(min=0)[:, None]
    d = (p - torch.zeros_like(p).scatter_(1, at, 1.0)) * by.double() * counts
    losses = torch.where(counts[:, 0], -a.log_softmax(1).gather(1, at)[:, 0], 0.0)
    unit, n = error(logits.dtype), a.shape[1]
    off = unit * (12 + 2 * (a - a.amax(1, keepdim=True)).abs() + min(8 * n**0.5, n + 1))
    return (
        expected(d, dtype, noise=(p * off + unit) * by.double() * counts),
        expected(losses, logits.dtype, noise=off.amax(1) + unit * 4 * a.abs().amax(1)),
    )


def in_torch(
    logits: torch.Tensor, targets: torch.Tensor, by: torch.Tensor, dtype: torch.dtype, **_: Any
) -> Callable[[], Any]:
    given = logits.clone().requires_grad_()

    def call() -> Any:
        losses = torch.nn.functional.cross_entropy(given, targets, reduction="none")
        (d,) = torch.autograd.grad(losses, given, by.expand(len(losses)))
        return d.to(dtype), losses

    return call


SMALL: tuple[dict[str, Any], ...] = (
    {"m": 7, "n": 24},
    {"m": 1, "n": 1, "dtype": "float32"},
    {"m": 12, "n": 97, "dtype": "float16"},
    {"m": 3, "n": 1000, "ranks": 3},
    {"m": 5, "n": 33, "ranks": 2, "dtype": "float64", "acc": "float64"},
    {"m": 2, "n": 20000, "ranks": 2},
)
OP = Op(
    name="cross_entropy_gradient",
    run=gradients,
    draw=draw,
    reference=reference,
    cases=(
        *(Case(s, small=True) for s in SMALL),
        *(
            Case(s)
            for s in ({"m": 300, "n": 32000}, {"m": 77, "n": 50257}, {"m": 64, "n": 16032, "ranks": 4})
        ),
        *(
            Case(s, bar=1.0)
            for s in ({"m": 4096, "n": 64128}, {"m": 4096, "n": 16032}, {"m": 8192, "n": 4008})
        ),
    ),
    peers={"torch": in_torch},
    moved=lambda m, n, dtype="bfloat16", acc="float32", **_: (2.0 * BYTES[acc] + BYTES[dtype]) * m * n,
)
