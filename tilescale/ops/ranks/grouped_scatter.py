"""``grouped_matmul_reduce_scatter(y, w, where)``: the second product of experts that are cut among ranks, by
rows of its weights. Each rank multiplies all tokens' pairs by its rows, adds up each token's pairs, times
their weights, and gets its own tokens' sums over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilescale.errors import TileValueError
from tilescale.ops import grouped, host
from tilescale.ops.case import ROUNDING, Case, Expected, expected, generator, normal, summed
from tilescale.ops.permute import moe_unpermute
from tilescale.ops.ranks import flat, grouped_gather
from tilescale.ops.ranks.case import RankOp
from tilescale.ops.ranks.grouped_gather import GatheredTokens, all_gather_grouped_matmul
from tilescale.ops.ranks.groups import rows_of, share
from tilescale.ops.ranks.scatter import reduce_scatter


@host.checked
def grouped_matmul_reduce_scatter(
    y: torch.Tensor,
    w: torch.Tensor,
    where: GatheredTokens,
    *,
    weighted: bool = True,
    out: torch.Tensor | None = None,
    blocks: int | None = None,
) -> torch.Tensor:
    """Of each of this rank's tokens the sum over all ranks and its experts of its pairs' rows times the
    expert's weights. Collective among the ranks of the gather.

    Args:
        y: (M · K, k) of bfloat16 or float16: a row of each pair, as `all_gather_grouped_matmul` gave them;
            this rank's columns.
        w: (E, k, N), this rank's rows of all experts, contiguous or the transpose of a contiguous (E, N, k).
        where: what `all_gather_grouped_matmul` gave.
        weighted: False: the router's weights are all one.
        out: (m, N), contiguous, takes the result.
        blocks: multiprocessors that the reduce-scatter keeps at most.

    Returns:
        (m, N) of y's dtype. Products and sums are taken in float32; a pair's row, a rank's sum and the result
        are each rounded once. Ranks are added in their order.

    Raises:
        TileValueError, TileTypeError: shapes or dtypes that do not fit.
    """
    if y.dim() != 2 or len(y) != len(where.index) or w.dim() != 3 or len(w) != len(where.sizes):
        raise TileValueError(
            f"grouped_matmul_reduce_scatter of {tuple(y.shape)} by {tuple(w.shape)}",
            expected=f"y ({len(where.index)}, k), w ({len(where.sizes)}, k, N)",
        )
    if not len(y):
        return host.result(out, (0, w.shape[2]), y.dtype, y)
    rows = grouped.grouped_matmul(y, w, where.sizes)
    sums = moe_unpermute(rows, where, where.weights if weighted else None)
    return reduce_scatter(sums, group=where.team, out=out, blocks=blocks)


# ---- what is right, and what it is measured against


def draw(
    hidden: int, experts: int, inner: int, rank: int = 0, world: int = 1, device: Any = "cpu", seed: int = 0,
    **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """As `grouped_gather.draw`, and this rank's rows of the second product."""
    made = grouped_gather.draw(
        hidden=hidden, experts=experts, inner=inner, rank=rank, world=world, device=device, seed=seed, **more
    )
    g, each = generator(device, 1000 * seed + 700 + rank), share(inner, world)
    return made | {"second": normal((experts, each, hidden), host.dtype_name(made["x"]), g, inner**-0.5)}


def there_and_back(
    second: torch.Tensor, out: torch.Tensor | None = None, blocks: int | None = None, **first: Any
) -> torch.Tensor:
    """Both products; what tests compare."""
    y, where = all_gather_grouped_matmul(**first)
    return grouped_matmul_reduce_scatter(y, second, where, out=out, blocks=blocks)


def reference(everyone: list[dict[str, Any]]) -> list[Expected]:
    """In float64, of the first product's rows, which were rounded."""
    ids = torch.cat([a["experts"] for a in everyone]).cpu().long()
    weights = torch.cat([a["weights"] for a in everyone]).cpu().double() * (ids >= 0)
    M, K = ids.shape
    E, dtype = everyone[0]["w"].shape[0], everyone[0]["x"].dtype
    places = torch.zeros(M, K, dtype=torch.long)
    places.view(-1)[torch.where(ids.flatten() < 0, E, ids.flatten()).argsort(stable=True)] = torch.arange(
        M * K
    )
    sizes, total, noise, magnitude = ids[ids >= 0].bincount(minlength=E).tolist(), 0.0, 0.0, 0.0
    for y, a in zip(grouped_gather.products(everyone), everyone, strict=True):
        w = a["second"].cpu().double()
        off = torch.zeros(M * K, w.shape[2], dtype=torch.float64)
        part, row = off.clone(), 0
        for e, n in enumerate(sizes):
            rows = slice(row, row + n)
            part[rows] = y.value[rows] @ w[e]
            off[rows] = y.allowed[rows] @ w[e].abs() + summed(y.value[rows].abs() @ w[e].abs(), w.shape[1])
            row += n
        off = off * 1.01 + part.abs() * ROUNDING[dtype]
        pair, pair_off = part[places] * weights[..., None], off[places] * weights[..., None].abs()
        mine = pair.sum(1)
        total = total + mine
        noise = noise + (pair_off.sum(1) + summed(pair.abs().sum(1), K)) * 1.01 + mine.abs() * ROUNDING[dtype]
        magnitude = magnitude + mine.abs()
    made = expected(total, dtype, noise=(noise + summed(magnitude, len(everyone))) * 1.01)
    n, each = len(everyone), share(M, len(everyone))
    cut = [slice(r * each, r * each + rows_of(r, M, n)) for r in range(n)]
    return [Expected(made.value[c], made.allowed[c]) for c in cut]


def timed(
    second: torch.Tensor, out: torch.Tensor | None = None, blocks: int | None = None, **first: Any
) -> Callable[[], torch.Tensor]:
    """The call that is timed, its first product made before."""
    y, where = all_gather_grouped_matmul(**first)
    return lambda: grouped_matmul_reduce_scatter(y, second, where, out=out, blocks=blocks)


def by_library(
    second: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, group: Any, rows: int, **first: Any
) -> Callable[[], Any]:
    """torch's grouped product, index_add and the library's reduce-scatter."""
    from tilescale.ops.ranks.scatter import by_library as scattered

    first = {**first, "experts": experts, "weights": weights, "rows": rows}
    y, where = all_gather_grouped_matmul(**first, group=group)
    product = grouped.torch_grouped(y, second, where.sizes)
    token, shares = where.index.long(), y.new_empty(len(y), 1, dtype=torch.float32)
    shares[where.pairs.flatten().long(), 0] = where.weights.flatten()
    sums = y.new_zeros(rows, second.shape[2], dtype=torch.float32)
    last = y.new_empty(rows, second.shape[2])
    whole = scattered(last, group)

    def call() -> Any:
        last.copy_(sums.zero_().index_add_(0, token, product().float() * shares))
        return whole()

    return call


def remote(world: int, tokens: int, hidden: int, dtype: str = "bfloat16", **_: Any) -> float:
    return float((world - 1) * share(tokens, world) * hidden * getattr(torch, dtype).itemsize)


OP = RankOp(
    name="grouped_matmul_reduce_scatter",
    run=there_and_back,
    draw=draw,
    reference=reference,
    pick=grouped_gather.pick,
    ways=lambda **_: {"apart": {}},
    base=lambda **_: {"blocks": None},
    knobs=lambda **_: (flat.BLOCKS,),
    cases=(
        *(Case(s, small=True) for s in grouped_gather.SMALL),
        *(Case(s, bar=1.0) for s in grouped_gather.MEASURED),
    ),
    peers={"library": by_library},
    remote=remote,
    flops=lambda world, tokens, hidden, topk, inner, **_: 2.0 * tokens * topk * hidden * share(inner, world),
    timed=timed,
)
