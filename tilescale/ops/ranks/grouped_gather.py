"""``all_gather_grouped_matmul(x, w, experts, weights)``: the first product of experts that are cut by columns
among ranks. Everyone's tokens are gathered, put in the order of their experts and multiplied by this rank's
columns of all experts' weights. `grouped_matmul_reduce_scatter` is the way back.

The gather, the search for places and the product are launches of their own. Nothing is asked of the host, so
all of it replays in a CUDA graph with other choices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tilescale.comm.backend import Team
from tilescale.errors import TileTypeError, TileValueError
from tilescale.ops import grouped, host
from tilescale.ops.case import Case, Expected, generator, normal
from tilescale.ops.permute import Permuted, moe_permute
from tilescale.ops.ranks import experts as drawn
from tilescale.ops.ranks import flat
from tilescale.ops.ranks.case import Pick, RankOp
from tilescale.ops.ranks.gather import all_gather
from tilescale.ops.ranks.groups import Group, filled, gather_into, rows_of, share, team_of, total


@dataclass(frozen=True)
class GatheredTokens(Permuted):
    """All ranks' tokens and their experts, alike on all ranks.

    Attributes:
        weights: (M, K) of float32, of all tokens. team: the ranks.
    """

    weights: torch.Tensor
    team: Team


@host.checked
def all_gather_grouped_matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    gate: str = "",
    group: Group = None,
    rows: int | None = None,
    out: torch.Tensor | None = None,
    blocks: int | None = None,
) -> tuple[torch.Tensor, GatheredTokens]:
    """Every token of all ranks times this rank's columns of each of its experts' weights. Collective.

    Args:
        x: (m, H), this rank's tokens, of bfloat16 or float16.
        w: (E, H, N), this rank's columns of all E experts, contiguous or the transpose of a contiguous (E, N,
            H); N may differ between ranks.
        experts: (m, K) of int32 or int64: the experts of this rank's tokens, −1 for none.
        weights: (m, K) of float32, which are gathered for `grouped_matmul_reduce_scatter`; ones without.
        gate: as in `grouped_matmul`: w has the gate's columns first, and the result has N / 2.
        group: who takes part, see `groups.team_of`; all ranks without.
        rows: all ranks' m together, split as torch.chunk does; without it every rank has as many.
        out: (M · K, N), contiguous, takes the rows.
        blocks: multiprocessors that the gather keeps at most.

    Returns:
        (M · K, N): a row of each pair of a token and one of its experts, in the order of experts, then of
        ranks and their tokens; undefined behind the last pair. And where they are.

    Raises:
        TileValueError, TileTypeError: shapes or dtypes that do not fit.
    """
    team, m = team_of(group), x.shape[0]
    weights = torch.ones_like(experts, dtype=torch.float32) if weights is None else weights
    if (
        x.dim() != 2
        or w.dim() != 3
        or experts.dim() != 2
        or len(experts) != m
        or weights.shape != experts.shape
    ):
        raise TileValueError(
            f"all_gather_grouped_matmul of {tuple(x.shape)} by {tuple(w.shape)}, experts "
            f"{tuple(experts.shape)}, weights {tuple(weights.shape)}",
            expected="x (m, H), w (E, H, N), experts and weights (m, K)",
        )
    if experts.dtype not in (torch.int32, torch.int64) or weights.dtype != torch.float32:
        raise TileTypeError(
            f"experts of {host.dtype_name(experts)}, weights of {host.dtype_name(weights)}",
            expected="int32 or int64, and float32",
        )
    M = total(rows, m, team, "x")
    tokens = all_gather(x, group=team, rows=M, blocks=blocks)
    both = torch.cat([host.narrowed(experts), weights.view(torch.int32)], 1)
    chosen, shares = all_gather(both, group=team, rows=M, blocks=blocks).chunk(2, 1)
    by_expert, where = moe_permute(tokens, chosen, num_experts=w.shape[0])
    there = GatheredTokens(
        where.sizes, where.index, where.pairs, shares.contiguous().view(torch.float32), team
    )
    if not M:
        return host.result(out, (0, w.shape[2] // (2 if gate else 1)), x.dtype, x), there
    return grouped.grouped_matmul(by_expert, w, where.sizes, gate=gate, out=out), there


# ---- what is right, and what it is measured against


def draw(
    tokens: int,
    hidden: int,
    topk: int,
    experts: int,
    inner: int,
    gate: str = "",
    trans: bool = False,
    rank: int = 0,
    world: int = 1,
    device: Any = "cpu",
    seed: int = 0,
    **more: Any,
) -> dict[str, Any]:
    """A rank's tokens, of ``tokens`` in all, and its share of ``inner`` columns of each expert (and of the
    gate's)."""
    m, n = rows_of(rank, tokens, world), share(inner, world) * (2 if gate else 1)
    given = drawn.draw(m, hidden, topk, experts, rank=rank, world=world, device=device, seed=seed, **more)
    g, dtype = generator(device, 1000 * seed + 500 + rank), host.dtype_name(given["x"])
    w = normal((experts, n, hidden) if trans else (experts, hidden, n), dtype, g, hidden**-0.5)
    made = {k: given[k] for k in ("x", "experts", "weights")}
    return made | {"w": w.transpose(1, 2) if trans else w, "rows": tokens, **({"gate": gate} if gate else {})}


def pairs_that_came(out: torch.Tensor | None = None, **arguments: Any) -> torch.Tensor:
    """The rows, zero behind the last pair; what tests compare."""
    y, where = all_gather_grouped_matmul(**arguments, out=out)
    y[torch.arange(len(y), device=y.device) >= where.sizes.sum()] = 0
    return y


def products(everyone: list[dict[str, Any]]) -> list[Expected]:
    """Each rank's rows in float64, before they are rounded, and what their sums may be off."""
    x = torch.cat([a["x"] for a in everyone])
    ids = torch.cat([a["experts"] for a in everyone])
    E, found = everyone[0]["w"].shape[0], []
    order = [(ids == e).nonzero()[:, 0] for e in range(E)]
    by_expert = x.new_zeros(ids.numel(), x.shape[1])
    came = torch.cat([x[o] for o in order])
    by_expert[: len(came)] = came
    sizes = torch.tensor([len(o) for o in order])
    for a in everyone:
        (y,) = grouped.reference(by_expert.cpu(), a["w"].cpu(), sizes, a.get("gate", ""))
        found.append(y)
    return found


def by_library(
    x: torch.Tensor,
    w: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    group: Any,
    rows: int,
    gate: str = "",
    **_: Any,
) -> Callable[[], Any]:
    """The library's gathers, torch's sort and its grouped product."""
    world = torch.distributed.get_world_size(group)
    each, E = share(rows, world), w.shape[0]
    part, ids = filled(x, each), filled(experts.int(), each)
    tokens, chosen = (t.new_empty(each * world, t.shape[1]) for t in (part, ids))

    def call() -> Any:
        gather_into(tokens, part, group)
        gather_into(chosen, ids, group)
        flat_ids = chosen[:rows].flatten()
        order = flat_ids.argsort(stable=True)
        sizes = torch.zeros(E, dtype=torch.int32, device=x.device)
        sizes.index_add_(0, flat_ids, torch.ones_like(flat_ids))
        return grouped.torch_grouped(tokens[order // experts.shape[1]], w, sizes, gate)()

    return call


def pick(world: int, units: int = 132, **_: Any) -> Pick:
    return Pick("apart", units)


SMALL: tuple[dict[str, Any], ...] = (
    {"tokens": 37, "hidden": 24, "topk": 2, "experts": 5, "inner": 40},
    {"tokens": 50, "hidden": 40, "topk": 3, "experts": 4, "inner": 33, "gate": "silu", "trans": True},
    {"tokens": 2, "hidden": 16, "topk": 1, "experts": 3, "inner": 8, "dtype": "float16"},
    {"tokens": 30, "hidden": 24, "topk": 4, "experts": 6, "inner": 20, "choice": "drop", "gate": "gelu"},
)
MEASURED: tuple[dict[str, Any], ...] = (
    {"tokens": 4096, "hidden": 4096, "topk": 2, "experts": 8, "inner": 14336, "gate": "silu"},
    {"tokens": 8192, "hidden": 7168, "topk": 8, "experts": 64, "inner": 2048, "gate": "silu"},
)


def remote(world: int, tokens: int, hidden: int, dtype: str = "bfloat16", **_: Any) -> float:
    return float((world - 1) * share(tokens, world) * hidden * getattr(torch, dtype).itemsize)


def work(world: int, tokens: int, hidden: int, topk: int, inner: int, gate: str = "", **_: Any) -> float:
    return 2.0 * tokens * topk * hidden * share(inner, world) * (2 if gate else 1)


OP = RankOp(
    name="all_gather_grouped_matmul",
    run=pairs_that_came,
    draw=draw,
    reference=products,
    pick=pick,
    ways=lambda **_: {"apart": {}},
    base=lambda **_: {"blocks": None},
    knobs=lambda **_: (flat.BLOCKS,),
    cases=(*(Case(s, small=True) for s in SMALL), *(Case(s, bar=1.0) for s in MEASURED)),
    peers={"library": by_library},
    remote=remote,
    flops=work,
    timed=lambda out=None, **a: lambda: all_gather_grouped_matmul(**a, out=out),
    seen=lambda given: given[0],
)
