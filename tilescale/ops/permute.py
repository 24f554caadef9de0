"""``moe_permute(x, experts, num_experts=E)``: tokens in the order of the experts that their router chose, as
`grouped_matmul` takes them; and the way back, ``moe_unpermute(y, where, weights)``. Of one rank that has all
experts; `moe_dispatch` and `moe_combine` are the same over several ranks.

A *pair* is a token and one of its experts. Pairs are numbered in the order of experts, then of tokens: that
follows from the choices alone, so every run gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tilescale.errors import TileTypeError, TileValueError
from tilescale.ops import host
from tilescale.ops.case import Case, Expected, Op, expected, summed
from tilescale.ops.ranks import combine_kernels, expert_kernels, experts, flat

#: of a block
THREADS = 256


@dataclass(frozen=True)
class Permuted:
    """Where the pairs of tokens and their experts are. How many of them there are the host never knows.

    Attributes:
        sizes: (E,) of int32: how many pairs each expert has.
        index: (t · K,) of int32: the token of each pair; 0 behind the last one.
        pairs: (t, K) of int32: which pair each choice is, −1 for none.
    """

    sizes: torch.Tensor
    index: torch.Tensor
    pairs: torch.Tensor


# ---- what people call


@host.checked
def moe_permute(
    x: torch.Tensor, experts: torch.Tensor, *, num_experts: int, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, Permuted]:
    """The row of each pair's token, in the order of experts.

    Args:
        x: (t, …) of any dtype.
        experts: (t, K) of int32 or int64: the numbers of each token's experts, −1 for none.
        num_experts: of which there are so many.
        out: (t · K, …), contiguous, takes the rows.

    Returns:
        (t · K, …), undefined behind the last pair, and where the pairs are.

    Raises:
        TileValueError, TileTypeError: shapes or dtypes that do not fit.
    """
    where = places(experts, num_experts)
    if x.dim() < 1 or x.shape[0] != experts.shape[0]:
        raise TileValueError(
            f"moe_permute of {tuple(x.shape)} by experts {tuple(experts.shape)}",
            expected="x (t, …), experts (t, K)",
        )
    made = host.result(out, (len(where.index), *x.shape[1:]), x.dtype, x)
    return _expanded(x, where, made), where


def _expanded(x: torch.Tensor, where: Permuted, made: torch.Tensor) -> torch.Tensor:
    return experts.expand(x.contiguous(), where.index, where.sizes, made)


def places(chosen: torch.Tensor, num_experts: int) -> Permuted:
    """Where the pairs are; nothing is moved.

    Raises:
        TileValueError, TileTypeError: shapes or dtypes that do not fit.
    """
    if chosen.dim() != 2 or chosen.shape[1] == 0 or num_experts < 1:
        raise TileValueError(
            f"experts {tuple(chosen.shape)} of {num_experts}", expected="(t, K), one expert at least"
        )
    if chosen.dtype not in (torch.int32, torch.int64):
        raise TileTypeError(f"experts of {host.dtype_name(chosen)}", expected="int32 or int64")
    (t, K), ids = chosen.shape, host.narrowed(chosen)
    made = Permuted(ids.new_empty(num_experts), ids.new_empty(t * K), ids.new_empty((t, K)))
    if not t:
        made.sizes.zero_()
        return made
    chunk, blocks = experts.planned(t, K, num_experts, host.multiprocessors(ids.device))
    counts = ids.new_empty(blocks, expert_kernels.told(num_experts, 1))
    what = {"K": K, "E": num_experts, "world": 0, "chunk": chunk, "blocks": blocks, "threads": THREADS}
    host.launch(expert_kernels.plan, (ids, counts, made.pairs, made.sizes, made.index), **what)
    return made


@host.checked
def moe_unpermute(
    y: torch.Tensor,
    where: Permuted,
    weights: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Of each token the sum of its pairs' rows, times their weights, in the router's order.

    Args:
        y: (t · K, H) of bfloat16, float16, float32 or float64: a row of each pair.
        where: what `moe_permute` gave.
        weights: (t, K) of float32; ones without.
        out: (t, H), contiguous, takes the result.

    Returns:
        (t, H) of y's dtype, added in float32 (float64 of float64) and rounded once; zero where a token has no
        experts.

    Raises:
        TileValueError, TileTypeError: shapes or dtypes that do not fit.
    """
    (t, K), P = where.pairs.shape, len(where.index)
    if y.dim() != 2 or y.shape[0] != P or y.shape[1] == 0:
        raise TileValueError(f"moe_unpermute of {tuple(y.shape)}", expected=f"({P}, H): a row of each pair")
    if y.dtype not in flat.SUMMED:
        raise TileTypeError(
            f"moe_unpermute of {host.dtype_name(y)}", expected="bfloat16, float16, float32 or float64"
        )
    if weights is not None and (weights.shape != (t, K) or weights.dtype != torch.float32):
        raise TileValueError(
            f"weights {tuple(weights.shape)} of {host.dtype_name(weights)}", expected=f"{(t, K)} of float32"
        )
    H = y.shape[1]
    c = host.result(out, (t, H), y.dtype, y)
    if not t:
        return c
    y, landing = flat.row(y.contiguous()).view(P, H), flat.landing(c)
    blocks = 2 * host.multiprocessors(y.device)
    how = experts.cut(H, y.element_size(), t, THREADS // 32 * blocks, 1)
    blocks = max(1, min(blocks, -(-t * how.cut // (THREADS // 32))))
    what = {"wide": how.wide, "steps": how.steps, "cut": how.cut, "blocks": blocks, "threads": THREADS}
    given = where.pairs.new_empty((t, K), dtype=torch.float32) if weights is None else weights.contiguous()
    args = (y, where.pairs, given, landing.view(t, H))
    host.launch(
        combine_kernels.sums, args, H=H, K=K, dtype=host.dtype_name(y), weighted=weights is not None, **what
    )
    flat.landed(landing, c)
    return c


# ---- what is right, and what it is measured against


def there_and_back(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, num_experts: int, out: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What tests compare: the rows of pairs, zero behind the last one; and the sums of rows that each expert
    has multiplied by a factor."""
    made, sums = out or (None, None)
    rows, where = moe_permute(x, experts, num_experts=num_experts, out=made)
    pair = torch.arange(len(rows), device=x.device)
    rows[where.sizes.sum() <= pair] = 0
    expert = torch.searchsorted(where.sizes.cumsum(0), pair, right=True)
    y = (rows.float() * factor(expert)[:, None]).to(x.dtype)
    return rows, moe_unpermute(y, where, weights, out=sums)


def factor(expert: torch.Tensor) -> torch.Tensor:
    """What an expert multiplies by."""
    return 1 + (expert % 13) / 8.0


def draw(device: Any = "cpu", seed: int = 0, **shape: Any) -> dict[str, Any]:
    made = experts.draw(device=device, seed=seed, **shape)
    return {k: made[k] for k in ("x", "experts", "weights", "num_experts")}


def reference(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, num_experts: int
) -> tuple[Expected, ...]:
    """In float64, of rows that the experts rounded."""
    (t, K), ids = experts.shape, experts.long()
    whole = x.new_zeros((t * K, x.shape[1]), dtype=torch.float64)
    came = torch.cat([x[(ids == e).nonzero()[:, 0]].double() for e in range(num_experts)])
    whole[: len(came)] = came
    rows = (x.float()[:, None] * factor(ids)[..., None]).to(x.dtype).double()
    terms = rows * (weights.double() * (ids >= 0))[..., None]
    sums = expected(terms.sum(1), x.dtype, noise=summed(terms.abs().sum(1), K))
    return Expected(whole, torch.zeros_like(whole)), sums


def in_torch(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, num_experts: int
) -> Callable[[], Any]:
    """Sorting, gathering and index_add, as layers without kernels of their own do; choices of none are not
    known to it."""

    def call() -> Any:
        order = experts.flatten().argsort(stable=True)
        token = order // experts.shape[1]
        rows = x[token]
        expert = experts.flatten()[order]
        y = (rows.float() * factor(expert)[:, None]).to(x.dtype)
        terms = y.float() * weights.flatten()[order][:, None]
        return rows, torch.zeros_like(x, dtype=torch.float32).index_add_(0, token, terms).to(x.dtype)

    return call


OP = Op(
    name="moe_permute",
    run=there_and_back,
    draw=draw,
    reference=reference,
    cases=(
        *(
            Case({k: v for k, v in s.items() if k not in ("uneven", "blocks")}, small=True)
            for s in experts.SMALL
        ),
        Case({"tokens": 1000, "hidden": 1030, "topk": 4, "experts": 40}),
        Case({"tokens": 3000, "hidden": 520, "topk": 8, "experts": 256, "choice": "drop"}),
        *(Case(s, bar=1.0) for s in experts.MEASURED),
    ),
    peers={"torch": in_torch},
    moved=lambda tokens, hidden, topk, **_: 2.0 * tokens * hidden * (2 + 2 * topk),
)
