"""``moe_route(logits, k)``: each token's k experts and their weights, for a mixture's router.

A block takes a few tokens, whose logits lie in registers; `T.topk` finds the experts, the greatest first, of
equal ones the lower number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import tilescale.language as T
from tilescale.errors import TileTypeError, TileValueError
from tilescale.ops import host
from tilescale.ops.case import Case, Expected, Op, generator, normal
from tilescale.ops.gemm_kernels import ceil_div

DTYPES = ("float32", "bfloat16", "float16")
SCORES = ("softmax", "sigmoid")


# ---- the kernel


def route(
    E: int, K: int, BT: int, threads: int, scores: str, normalized: bool, biased: bool, dtype: str
) -> Any:
    """``weights`` and ``experts`` (t, K) of each row of L (t, E)."""
    t, softmax = T.dynamic("t"), scores == "softmax"

    @T.prim_func
    def moe_route(
        L: T.Tensor((t, E), dtype),
        bias: T.Tensor((E if biased else 1,), "float32"),
        weights: T.Tensor((t, K), "float32"),
        experts: T.Tensor((t, K), "int32"),
    ):
        with T.Kernel(T.ceildiv(t, BT), threads=threads) as b:
            x, key = (T.alloc_fragment((BT, E), "float32") for _ in range(2))
            best, score = (T.alloc_fragment((BT, K), "float32") for _ in range(2))
            chosen = T.alloc_fragment((BT, K), "int32")
            highest, total = (T.alloc_fragment((BT,), "float32") for _ in range(2))
            T.copy(L[b * BT, 0], x)
            T.reduce_max(x, highest, dim=1, nan_propagate=True)
            for i, e in T.Parallel(BT, E):
                key[i, e] = T.exp(x[i, e] - highest[i]) if softmax else 1 / (1 + T.exp(-x[i, e]))
            if softmax:
                T.reduce_sum(key, total, dim=1)
                for i, e in T.Parallel(BT, E):
                    key[i, e] /= total[i]
            if biased:
                for i, e in T.Parallel(BT, E):
                    key[i, e] += bias[e]
            # without a bias by the logits themselves, whose order no rounding changes
            T.topk(key if biased else x, best, chosen, K)
            for i, k in T.Parallel(BT, K):
                score[i, k] = T.cast(L[T.min(b * BT + i, t - 1), chosen[i, k]], "float32")
            if normalized and (biased or not softmax):
                # of the chosen ones, whose scores are all multiplied by what makes the greatest no zero
                T.reduce_max(score, highest, dim=1, nan_propagate=True)
            for i, k in T.Parallel(BT, K):
                if softmax:
                    score[i, k] = T.exp(score[i, k] - highest[i]) / total[i]
                elif normalized:
                    low = T.min(highest[i], 0.0)
                    score[i, k] = 1 / (T.exp(low) + T.exp(low - score[i, k]))
                else:
                    score[i, k] = 1 / (1 + T.exp(-score[i, k]))
            if normalized:
                T.reduce_sum(score, total, dim=1)
                for i, k in T.Parallel(BT, K):
                    score[i, k] /= total[i]
            T.copy(score, weights[b * BT, 0])
            T.copy(chosen, experts[b * BT, 0])

    return moe_route


# ---- what people call


@host.checked
def moe_route(
    logits: torch.Tensor,
    k: int,
    *,
    scores: str = "softmax",
    normalized: bool = True,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k experts of each token with the greatest scores, and their weights.

    Args:
        logits: (t, E) of float32, bfloat16 or float16, contiguous.
        k: experts of a token, E at most.
        scores: "softmax" over all experts, or "sigmoid" of each.
        normalized: the weights of a token add up to one, also where its scores are too small for a float32;
            else they are its scores.
        bias: (E,) of float32, added to the scores by which experts are chosen, not to the weights: what
            balances the experts.

    Returns:
        weights (t, k) of float32 and experts (t, k) of int32, the greatest first; of equal ones the lower
        number.

    Raises:
        TileValueError, TileTypeError: shapes or dtypes that do not fit.
    """
    if logits.dim() != 2 or not 1 <= k <= logits.shape[1]:
        raise TileValueError(
            f"moe_route of {tuple(logits.shape)}, k={k}", expected="logits (t, E), k of 1 to E"
        )
    if host.dtype_name(logits) not in DTYPES:
        raise TileTypeError(f"logits of {host.dtype_name(logits)}", expected=", ".join(DTYPES))
    if scores not in SCORES:
        raise TileValueError(f"scores={scores!r}", expected='"softmax" or "sigmoid"')
    t, E = logits.shape
    if bias is not None and (bias.shape != (E,) or bias.dtype != torch.float32):
        raise TileValueError(
            f"bias {tuple(bias.shape)} of {host.dtype_name(bias)}", expected=f"({E},) of float32"
        )
    weights = logits.new_empty((t, k), dtype=torch.float32)
    experts = logits.new_empty((t, k), dtype=torch.int32)
    if t:
        what = {"BT": max(1, min(8, ceil_div(2048, E))), "threads": 128, "scores": scores}
        what |= {"normalized": normalized, "biased": bias is not None, "dtype": host.dtype_name(logits)}
        given = logits.new_zeros(1, dtype=torch.float32) if bias is None else bias.contiguous()
        host.launch(route, (logits.contiguous(), given, weights, experts), E=E, K=k, **what)
    return weights, experts


# ---- what is right, and what it is measured against


def run(out: tuple[torch.Tensor, ...] | None = None, **drawn: Any) -> tuple[torch.Tensor, ...]:
    found = moe_route(**drawn)
    if out is None:
        return found
    for to, value in zip(out, found, strict=True):
        to.copy_(value)
    return out


def draw(
    t: int,
    E: int,
    k: int,
    dtype: str = "float32",
    scores: str = "softmax",
    normalized: bool = True,
    biased: bool = False,
    low: float = 0.0,
    device: Any = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Normal random logits. ``low``: the second half of the experts has so much less, and a bias by which it
    is chosen all the same: what it scores may be zero in float32."""
    g = generator(device, seed)
    bias = normal((E,), "float32", g, 0.1) if biased else None
    logits = normal((t, E), dtype, g, 2.0)
    if low:
        assert bias is not None and k <= E // 2
        bias[E // 2 :] += 5
        logits[:, E // 2 :] -= low
    return {"logits": logits, "k": k, "scores": scores, "normalized": normalized, "bias": bias}


def reference(
    logits: torch.Tensor, k: int, scores: str, normalized: bool, bias: torch.Tensor | None
) -> tuple[Expected, ...]:
    """In float64."""
    x = logits.double()
    logs = x.log_softmax(-1) if scores == "softmax" else torch.nn.functional.logsigmoid(x)
    key = x if bias is None else logs.exp() + bias.double()
    chosen = key.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    weights = logs.gather(1, chosen)
    weights = weights.softmax(-1) if normalized else weights.exp()
    return Expected(weights, weights * 1e-5 + 1e-30), Expected(chosen.double(), torch.zeros_like(weights))


def by_torch(
    logits: torch.Tensor, k: int, scores: str, normalized: bool, bias: torch.Tensor | None
) -> Callable[[], Any]:
    """torch's softmax (or sigmoid), topk, gather and division."""

    def call() -> Any:
        score = logits.float().softmax(-1) if scores == "softmax" else logits.float().sigmoid()
        chosen = (score if bias is None else score + bias).topk(k, dim=-1).indices
        weights = score.gather(1, chosen)
        return (weights / weights.sum(-1, keepdim=True) if normalized else weights), chosen

    return call


OP = Op(
    name="moe_route",
    run=run,
    draw=draw,
    reference=reference,
    cases=(
        Case({"t": 9, "E": 16, "k": 2}, small=True),
        Case({"t": 3, "E": 7, "k": 7, "dtype": "bfloat16", "normalized": False}, small=True),
        Case({"t": 1, "E": 40, "k": 3, "scores": "sigmoid", "biased": True}, small=True),
        Case({"t": 20, "E": 33, "k": 1, "dtype": "float16", "biased": True}, small=True),
        *(
            Case({"t": 5, "E": 8, "k": 3, "scores": s, "biased": True, "low": 200.0}, small=True)
            for s in SCORES
        ),
        *(
            Case({"t": t, "E": E, "k": k, "dtype": "bfloat16", "scores": s, "biased": s == "sigmoid"})
            for t, E, k, s in ((1000, 256, 8, "softmax"), (77, 384, 8, "sigmoid"), (4096, 8, 2, "softmax"))
        ),
        *(
            Case({"t": t, "E": 256, "k": 8, "scores": s}, bar=1.0)
            for t, s in ((128, "softmax"), (4096, "softmax"), (4096, "sigmoid"))
        ),
    ),
    peers={"torch": by_torch},
    moved=lambda t, E, k, dtype="float32", **_: t * (E * float(getattr(torch, dtype).itemsize) + 8.0 * k),
)
